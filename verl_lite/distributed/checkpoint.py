"""What every rank writes of a sharded model, its optimizer and its random state, and how another run reads it.

Tensors go through torch.distributed.checkpoint's safetensors storage: every rank writes its shards, and any number of
ranks can read them. Nothing is pickled: the default storage's metadata is, and runs code when it is loaded.

    {folder}/model/*.safetensors        parameters and buffers; of tied parameters the first name only
    {folder}/optimizer/*.safetensors    "{parameter}.step", ".exp_avg", ".exp_avg_sq", of parameters that made a step
    {folder}/extra/rank_{r}.safetensors the random generators of rank r's process
    {folder}/huggingface/               config.json and generation_config.json; with "hf_model" the weights too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_lite.distributed.fsdp import FSDPEngine
from verl_lite.distributed.random_state import load_random_state, save_random_state
from verl_lite.models.export import HFExport

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def save_engine(engine: FSDPEngine, folder: Path, contents: Sequence[str], export: HFExport) -> str | None:
    """A collective. Returns what the operating system refused, on the ranks that know of it, or None.

    The folder above `folder` was made by the driver.
    """
    if not _on_all_ranks(engine, folder.parent.is_dir()):
        return f"not every node sees {folder.parent}, which the driver has made: it must be on storage that all share"
    try:
        # Where the tensors are, on a GPU or offloaded: the rollout engine may have the rest of the GPU's memory.
        _reshard(engine.module)
        if "model" in contents:
            _save(model_tensors(engine.module), folder / "model")
        if "optimizer" in contents and engine.optimizer is not None:
            _save(_optimizer_tensors(engine.module, engine.optimizer), folder / "optimizer")
        whole = _gather(engine) if "hf_model" in contents else {}
        if engine.context.rank == 0:
            dtype = next(engine.module.parameters()).dtype
            export.save_settings(folder / "huggingface", dtype)
            if whole:
                export.save(folder / "huggingface", whole)
        if "extra" in contents:
            save_random_state(folder / "extra" / f"rank_{engine.context.rank}.safetensors")
    except (OSError, SafetensorError) as error:
        return str(error)
    return None


def load_engine(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> None:
    """A collective. ValueError where the checkpoint is of another model, or unreadable."""
    with engine.phase("load_checkpoint", optimizer=True):
        _reshard(engine.module)
        if "model" in contents:
            load_tensors(model_tensors(engine.module), folder / "model")
        if "optimizer" in contents and engine.optimizer is not None:
            _load_optimizer(engine.module, engine.optimizer, folder / "optimizer")
    if "extra" in contents:
        load_random_state(folder / "extra" / f"rank_{engine.context.rank}.safetensors")


def _on_all_ranks(engine: FSDPEngine, true: bool) -> bool:
    flag = torch.tensor(int(true), device=engine.device)
    if engine.context.world_size > 1:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
    return bool(flag)


def _reshard(module: nn.Module) -> None:
    """After a pass without backward some parameters are still whole, and not those that the optimizer knows."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors, to write or to read into, by name; of tied parameters only the first."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    once = {name for name, _ in module.named_parameters()}
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, Tensor) and (name in once or name not in every)
    }


def _gather(engine: FSDPEngine) -> dict[str, Tensor]:
    """The whole tensors, on rank 0."""
    whole = {}
    for name, tensor in model_tensors(engine.module).items():
        full = tensor.to(engine.device)
        if isinstance(full, DTensor):
            full = full.full_tensor()
        if engine.context.rank == 0:
            whole[name] = full.cpu()
    return whole


def load_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `tensors` from a folder that has just these names and shapes. Needs a process group if they are sharded."""
    saved = _saved_shapes(folder)
    here = {name: list(tensor.shape) or [1] for name, tensor in tensors.items()}
    differing = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
    if differing:
        name = differing[0]
        raise ValueError(
            f"{folder} is of another model: {len(differing)} tensors differ, e.g. {name}, which is "
            f"{here.get(name, 'absent')} here and {saved.get(name, 'absent')} there; resume with the model it was "
            "saved from"
        )
    _transfer(dcp.load, tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a folder that any number of ranks has written, by this process alone."""
    saved: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    load_tensors(tensors, folder)
    return tensors


def _load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    saved = _saved_shapes(folder) if folder.is_dir() else {}
    optimizer.state.clear()
    for name, parameter in module.named_parameters():
        if f"{name}.step" in saved:
            step = torch.zeros((), device=parameter.device)
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ADAM_STATE[1:]}
            optimizer.state[parameter] = {"step": step, **moments}
    if optimizer.state:
        load_tensors(_optimizer_tensors(module, optimizer), folder)


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    # Not get_optimizer_state_dict: before the first step it makes one of its own, and Adam would count it.
    return {
        f"{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    if tensors:
        _transfer(dcp.save, tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def _transfer(verb: Any, tensors: Mapping[str, Tensor], **storage: Any) -> None:
    # The storage does not know tensors without dimensions, such as step counters; a view writes through.
    views = {name: tensor.detach().view(1) if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}
    try:
        verb(views, no_dist=not torch.distributed.is_initialized(), **storage)
    except CheckpointException as error:
        # All ranks raise it together; what helps is what happened on one of them.
        causes = [failure[0] for failure in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error


def _saved_shapes(folder: Path) -> dict[str, list[int]]:
    try:
        saved: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder} cannot be read ({type(error).__name__}: {error})") from error
    for name, tensor in saved.items():
        # What no file holds would stay as it is, and nobody would notice.
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise ValueError(f"{folder} has not the whole of {name}, of shape {list(tensor.size)}")
    return {name: list(tensor.size) for name, tensor in saved.items()}
