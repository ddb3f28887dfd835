"""The training engine: one model sharded over the ranks with FSDP2, and its optimizer.

Losses come as this rank's share of a mini-batch's loss; shares of all ranks and micro-batches add up to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_lite.config import FSDPConfig, OptimConfig
from verl_lite.distributed.memory import peak_memory_bytes, reset_peak_memory
from verl_lite.distributed.process_group import RankContext


@dataclass(frozen=True)
class NotFinite:
    """What this rank saw that was NaN or infinite in a step that was not made."""

    losses: tuple[int, ...] = ()  # numbers of the micro-batches whose loss it was
    gradients: tuple[str, ...] = ()  # names of the parameters, of which this rank holds a part
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepOutcome:
    done: bool  # False: a loss or the gradient was not finite on some rank, and no parameter was touched
    grad_norm: float  # over all ranks, before clipping
    not_finite: NotFinite | None = None  # of a step not made


class FSDPEngine:
    """A module sharded layer by layer. Every method is a collective: all ranks call it, in the same order."""

    def __init__(
        self,
        build: Callable[[bool], nn.Module],
        layers: Callable[[nn.Module], list[nn.Module]],
        *,
        context: RankContext,
        fsdp: FSDPConfig,
    ) -> None:
        """build: makes the module, without storage if its argument (on_meta) is True; weights are read on rank 0 only.
        layers: the submodules that are gathered one at a time.
        """
        self.context = context
        self.device = context.torch_device
        self.param_offload = fsdp.param_offload and self.device.type == "cuda"
        self.optimizer: torch.optim.AdamW | None = None
        self.finite_losses: list[Tensor] = []  # of the micro-batches since the last step, whether they are
        self.peak_memory: dict[str, int] = {}  # phase → bytes, since the last `pop_peak_memory`
        full = build(False) if context.rank == 0 else None
        # One rank shards what it has read; several start from empty modules, so that only rank 0 ever holds the whole.
        self.module = full if full is not None and context.world_size == 1 else build(True)
        dtype = getattr(torch, fsdp.dtype)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (context.world_size,)),
            "reshard_after_forward": fsdp.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32)
            ),
        }
        for layer in layers(self.module):
            fully_shard(layer, **options)
        self.root = fully_shard(self.module, **options)  # the same object, seen as FSDP's
        if context.world_size > 1:
            self._receive_weights(full)
        if self.param_offload:
            self.module.cpu()

    def _receive_weights(self, full: nn.Module | None) -> None:
        self.module.to_empty(device=self.device)
        set_model_state_dict(
            self.module,
            {} if full is None else full.state_dict(),
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        # State dicts leave out the buffers that a model computes when it is built, rotary frequencies for one.
        computed = {} if full is None else dict(full.named_buffers())
        for name, buffer in self.module.named_buffers():
            if computed:
                buffer.copy_(computed[name])
            dist.broadcast(buffer, src=0)

    def freeze(self) -> None:
        self.module.requires_grad_(False)

    def train_with(
        self, optim: OptimConfig, *, grad_clip: float, sync_every_micro_batch: bool, optimizer_offload: bool
    ) -> None:
        """Give the model its optimizer."""
        self.grad_clip = grad_clip
        self.sync_every_micro_batch = sync_every_micro_batch
        self.optimizer_offload = optimizer_offload and self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def backward(self, loss_share: Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients. last: no other micro-batch follows before `step`."""
        if not self.sync_every_micro_batch:
            self.root.set_requires_gradient_sync(last)
        self.finite_losses.append(loss_share.detach().isfinite().all())
        # FSDP averages gradients over ranks; multiply back, or twice the GPUs halve the step.
        (loss_share * self.context.world_size).backward()

    def step(self, lr: float) -> StepOutcome:
        """Clip by the norm over all ranks and update, or, if it or a rank's loss isn't finite, do neither.

        Clears gradients.
        """
        assert self.optimizer is not None, "train_with comes first"
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        grad_norm = float(norm)
        # A loss can be NaN while its gradient isn't, and on one rank alone; all ranks must decide alike.
        losses, self.finite_losses = torch.stack(self.finite_losses), []
        all_finite = losses.all().to(torch.int32)
        dist.all_reduce(all_finite, dist.ReduceOp.MIN)
        done = math.isfinite(grad_norm) and bool(all_finite)
        not_finite = None if done else self._find_not_finite(losses.tolist())
        if done:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(done, grad_norm, not_finite)

    def _find_not_finite(self, finite_losses: list[bool]) -> NotFinite:
        def broken(tensor: Tensor | None) -> bool:
            if tensor is None:
                return False
            return not bool((tensor.to_local() if isinstance(tensor, DTensor) else tensor).isfinite().all())

        named = list(self.module.named_parameters())
        return NotFinite(
            losses=tuple(i for i, finite in enumerate(finite_losses) if not finite),
            gradients=tuple(name for name, parameter in named if broken(parameter.grad)),
            parameters=tuple(name for name, parameter in named if broken(parameter)),
        )

    @contextmanager
    def phase(self, name: str, *, optimizer: bool = False) -> Iterator[None]:
        """Hold the weights (and the optimizer's state) on the device for a while, and record the peak of memory."""
        reset_peak_memory(self.device)
        if self.param_offload:
            self.module.to(self.device)
        if optimizer:
            self._move_optimizer(self.device)
        try:
            yield
        finally:
            if self.param_offload:
                self.module.cpu()
            if optimizer:
                self._move_optimizer(torch.device("cpu"))
            self.peak_memory[name] = max(self.peak_memory.get(name, 0), peak_memory_bytes(self.device))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the rollout engine on the same GPU needs it next

    def _move_optimizer(self, device: torch.device) -> None:
        if self.optimizer is None or not self.optimizer_offload:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if value.dim() > 0:  # step counters stay where AdamW put them
                    state[name] = value.to(device)

    def pop_peak_memory(self) -> dict[str, int]:
        peaks, self.peak_memory = self.peak_memory, {}
        return peaks
