"""What every rank writes of a sharded model, its optimizer and its random state, and how another run reads it.

Tensors go through torch.distributed.checkpoint's safetensors storage: every rank writes its shards, and any number of
ranks can read them. Nothing is pickled: the default storage's metadata is, and runs code when it is loaded.

    {folder}/model/*.safetensors        parameters and buffers; of tied parameters the first name only
    {folder}/optimizer/*.safetensors    "{parameter}.step", ".exp_avg", ".exp_avg_sq", of parameters that made a step
    {folder}/extra/rank_{r}.safetensors the random generators of rank r's process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from verl_lite.distributed.fsdp import FSDPEngine

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def save_engine(engine: FSDPEngine, folder: Path, contents: Sequence[str]) -> str | None:
    """A collective. Returns what the operating system refused, on the ranks that know of it, or None.

    The folder above `folder` was made by the driver.
    """
    if not _on_all_ranks(engine, folder.parent.is_dir()):
        return f"not every node sees {folder.parent}, which the driver has made: it must be on storage that all share"
    try:
        with engine.phase("save_checkpoint", optimizer=True):
            _reshard(engine.module)
            if "model" in contents:
                _save(model_tensors(engine.module), folder / "model")
            if "optimizer" in contents and engine.optimizer is not None:
                _save(_optimizer_tensors(engine.module, engine.optimizer), folder / "optimizer")
        if "extra" in contents:
            path = _random_state_path(folder, engine)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(random_state()))
    except OSError as error:
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
    path = _random_state_path(folder, engine)
    if "extra" in contents and path.is_file():  # saved by fewer ranks: this one keeps the state it has
        set_random_state(load(path.read_bytes()))


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


def random_state() -> dict[str, Tensor]:
    """Torch's generators of this process; no worker draws from another one."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _random_state_path(folder: Path, engine: FSDPEngine) -> Path:
    return folder / "extra" / f"rank_{engine.context.rank}.safetensors"
