"""The part of an engine that runs inside vLLM's worker processes; `worker_extension_cls` makes them import it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl_lite.rollout.weight_transfer import read_part

OWNER_PID = "VERL_LITE_ENGINE_OWNER_PID"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """A transfer through files needs no meeting."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where one part lies; see `weight_transfer.FilePublisher`."""

    path: str
    checksums: dict[str, int] | None = field(default=None)


class FileReceiver(WeightTransferEngine[NoInitInfo, FileUpdateInfo]):
    """`shm`: reads each part from its file and loads it layer by layer (a live engine has repacked its weights)."""

    init_info_cls = NoInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._expected = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU doesn't have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        tensors = read_part(update_info.path, update_info.checksums)
        self._loaded |= self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if missing := sorted(self._expected - self._loaded):
            raise ValueError(f"the actor's update lacks {len(missing)} of the engine's weights: {missing[:5]}")

    def shutdown(self) -> None:
        pass


class IpcReceiver(IPCWeightTransferEngine):
    """`ipc`: vLLM's own receiver, told the handle in plain values (`weight_transfer.IpcPublisher`)."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.packed = True

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        values = dict(update_dict)
        shape = torch.Size([values.pop("buffer_bytes")])
        fixed = (torch.Tensor, shape, (1,), 0, torch.storage.TypedStorage, torch.uint8)
        handles = {uuid: (*fixed, *handle) for uuid, handle in values.pop("handles").items()}
        return IPCWeightTransferUpdateInfo(**values, ipc_handles=handles)


class WorkerExtension:
    """Methods mixed into vLLM's worker, called through `collective_rpc`."""

    model_runner: Any

    def mask_vocabulary(self, vocab_size: int) -> None:
        """Never sample ids from `vocab_size` on: the tokenizer doesn't know them. The actor masks the same ids."""
        model = self.model_runner.get_model()
        compute_logits = model.compute_logits

        def masked(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:  # only some ranks hold them
                logits[..., vocab_size:] = float("-inf")
            return logits

        model.compute_logits = masked


def _end_with_owner(owner: int) -> None:
    """Kill this worker and its engine core when the process that owns the engine is gone, however it went."""
    engine_core = os.getppid()

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(owner)], [], [])
        if engine_core != owner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine_core, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="end-with-owner").start()


WeightTransferEngineFactory.register_engine("verl_lite_shm", FileReceiver)
WeightTransferEngineFactory.register_engine("verl_lite_ipc", IpcReceiver)
if OWNER_PID in os.environ:
    _end_with_owner(int(os.environ[OWNER_PID]))
