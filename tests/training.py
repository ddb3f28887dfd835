"""Parts of the tests that run real training workers on ranks: a ragged batch, and workers with short configs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ranks import all_gather
from safetensors.torch import load_file
from tiny import CHARACTERS

from verl_lite.algorithms.aggregate import MiniBatchTotals
from verl_lite.batching import MicroLimit, Schedule, build_schedules, forward_schedule
from verl_lite.config import ActorConfig, CriticConfig, FSDPConfig, ModelConfig, TrainFSDPConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.workers.actor import ActorWorker
from verl_lite.workers.critic import CriticWorker
from verl_lite.workers.ref import RefWorker
from verl_lite.workers.update import MiniBatchResult

PROMPT, RESPONSE = 5, 6


def ragged_batch(rows: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> DataProto:
    """What workers read; prompts of 2 to 5 tokens, responses of 1 to 6; row 3 has no loss token, row 4 a hole."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, len(CHARACTERS) + 2, (rows, PROMPT + RESPONSE), generator=generator)
    prompts = torch.tensor([2 + 3 * row % 4 for row in range(rows)])
    responses = torch.tensor([1 + 5 * row % 6 for row in range(rows)])
    columns = torch.arange(PROMPT + RESPONSE)
    attention_mask = ((columns >= PROMPT - prompts[:, None]) & (columns < PROMPT + responses[:, None])).long()
    response_mask = attention_mask[:, PROMPT:].clone()
    if rows > 4:
        response_mask[3] = 0
        response_mask[4, 0] = 0

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, RESPONSE, generator=generator, dtype=dtype)

    tensors = {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "responses": ids[:, PROMPT:],
        "response_mask": response_mask,
    }
    tensors |= {"advantages": noise(1.0), "returns": noise(1.0), "values": noise(0.3)}
    tensors |= {"old_log_probs": noise(0.4) - 4.5, "ref_log_probs": noise(0.4) - 4.5}
    return DataProto.from_dict(tensors)


def lengths(batch: DataProto) -> list[int]:
    return batch.batch["attention_mask"].sum(-1).tolist()


def make_actor(
    context: RankContext, path: str, *, dtype: str = "float32", packed: bool = True, **keys: Any
) -> ActorWorker:
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2} | keys
    fsdp = TrainFSDPConfig(
        dtype=dtype, model_dtype=dtype, use_no_sync_for_gradient_accumulation=keys.pop("no_sync", False)
    )
    model = ModelConfig(
        path=path, use_remove_padding=packed, enable_gradient_checkpointing=keys.pop("checkpointing", True)
    )
    temperature = keys.pop("temperature", 1.0)
    return ActorWorker(context, model=model, actor=ActorConfig(fsdp_config=fsdp, **keys), temperature=temperature)


def make_ref(context: RankContext, path: str, *, packed: bool = True) -> RefWorker:
    model = ModelConfig(path=path, use_remove_padding=packed)
    return RefWorker(context, model=model, fsdp=FSDPConfig(dtype="float32"), temperature=1.0)


def make_critic(context: RankContext, path: str, **keys: Any) -> CriticWorker:
    keys = {"loss_agg_mode": "token-mean"} | keys
    critic = CriticConfig(
        model=ModelConfig(path=path), fsdp=TrainFSDPConfig(dtype="float32", model_dtype="float32"), **keys
    )
    return CriticWorker(context, critic=critic, loss_scale_factor=10.0)


def micro_limit(micro_batch_rows: int | None = None, max_token_len: int | None = None) -> MicroLimit:
    return MicroLimit("a test's limit", micro_batch_rows, max_token_len)


def cut(
    batch: DataProto, context: RankContext, *, mini: int | None = None, epochs: int = 1, **cut: Any
) -> list[Schedule]:
    """The schedules of an update; cut: micro_batch_rows or max_token_len."""
    return build_schedules(
        lengths(batch), mini_batch_rows=mini or len(batch), epochs=epochs, dp_size=context.world_size,
        limit=micro_limit(**cut), balance=True, shuffle=False, seed=0,
    )  # fmt: skip


def update(
    worker: ActorWorker | CriticWorker, batch: DataProto, schedules: Sequence[Schedule], lr: float = 1e-3
) -> list[list[MiniBatchResult]]:
    """What the driver does, on this rank: one call of update per schedule."""
    rank = worker.engine.context.rank
    results = []
    for schedule in schedules:
        masks = [batch.batch["response_mask"][list(mini.rows)] for mini in schedule.mini_batches]
        totals = [MiniBatchTotals.count(mask) for mask in masks]
        shard = batch[schedule.rank_rows(rank)]
        results.append(worker.update(shard, schedule.rank_schedule(rank), totals=totals, lr=lr))
    return results


def forward_pass(method: Any, batch: DataProto, context: RankContext, **cut: Any) -> DataProto:
    """A worker's forward method over the batch, in the order of its rows; cut: micro_batch_rows or max_token_len."""
    schedule = forward_schedule(lengths(batch), dp_size=context.world_size, limit=micro_limit(**cut), balance=True)
    own = method(batch[schedule.rank_rows(context.rank)], schedule.rank_schedule(context.rank))
    return DataProto.concat(all_gather(own))[schedule.inverse_order()]


def full_weights(worker: ActorWorker | CriticWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in worker.engine.module.state_dict().items()}


def everything_in(folder: Path) -> dict[str, bytes]:
    """The tensors of a checkpoint, those of all ranks."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("rank_*"))} | {
        f"{path.relative_to(folder)}:{name}": tensor.numpy().tobytes()
        for path in sorted(folder.rglob("shard-*.safetensors"))
        for name, tensor in load_file(path).items()
    }
