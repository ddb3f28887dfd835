"""The critic: predicts at each response token the return to come, for estimators that need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from verl_lite.algorithms import VALUE_LOSSES
from verl_lite.algorithms.aggregate import MiniBatchTotals, aggregate_loss
from verl_lite.algorithms.value_losses import ValueLossInputs
from verl_lite.batching import RankSchedule
from verl_lite.config import CriticConfig
from verl_lite.distributed.checkpoint import load_engine, save_engine
from verl_lite.distributed.fsdp import FSDPEngine
from verl_lite.distributed.process_group import RankContext
from verl_lite.models.export import HFExport
from verl_lite.models.forward import to_rows
from verl_lite.models.loading import decoder_layers, enable_gradient_checkpointing, load_value_model
from verl_lite.plugins import resolve
from verl_lite.protocol import DataProto
from verl_lite.workers.policy import model_inputs
from verl_lite.workers.update import MiniBatchResult, Shares, forward_micro_batches, train_mini_batches


class CriticWorker:
    def __init__(self, context: RankContext, *, critic: CriticConfig, loss_scale_factor: float | None = None) -> None:
        """loss_scale_factor: the actor's, which loss_agg_mode=seq-mean-token-sum-norm divides by."""
        self.critic = critic
        self.loss_scale_factor = loss_scale_factor
        self.value_loss = resolve("clipped", VALUE_LOSSES, key="critic.value_loss")
        model, fsdp = critic.model, critic.fsdp
        self.export = HFExport("value", model.path, model.override_config, model.trust_remote_code)

        def build(on_meta: bool) -> nn.Module:
            value_model = load_value_model(model, getattr(torch, fsdp.model_dtype), on_meta=on_meta)
            if model.enable_gradient_checkpointing:
                enable_gradient_checkpointing(value_model.backbone)
            return value_model

        self.engine = FSDPEngine(build, lambda module: decoder_layers(module.backbone), context=context, fsdp=fsdp)
        self.engine.train_with(
            critic.optim,
            grad_clip=critic.grad_clip,
            sync_every_micro_batch=not fsdp.use_no_sync_for_gradient_accumulation,
            optimizer_offload=fsdp.optimizer_offload,
        )
        if context.rank == 0:
            self.export.read()

    def compute_values(self, shard: DataProto, schedule: RankSchedule) -> DataProto:
        """`values` [B, R] of the shard's rows, read before each response token; 0 where `response_mask` is 0."""
        with self.engine.phase("values"):
            return forward_micro_batches(shard, schedule, lambda rows: {"values": self._values(rows)})

    def update(
        self, shard: DataProto, schedule: RankSchedule, *, totals: Sequence[MiniBatchTotals], lr: float
    ) -> list[MiniBatchResult]:
        """One pass over the batch: an optimizer step per mini-batch. Reads values, returns, response_mask."""
        with self.engine.phase("update_critic", optimizer=True):
            return train_mini_batches(
                self.engine, shard, schedule, totals, lr,
                lambda micros, shares: (self._loss(micro, shares) for micro in micros),
            )  # fmt: skip

    def _loss(self, rows: DataProto, shares: Shares) -> Tensor:
        """This micro-batch's share of the mini-batch's loss; its metrics go to `shares`."""
        old_values, returns, mask = (
            rows.batch[name].to(self.engine.device) for name in ("values", "returns", "response_mask")
        )
        outputs = self.value_loss(
            ValueLossInputs(self._values(rows), old_values, returns, mask), cliprange_value=self.critic.cliprange_value
        )
        loss = aggregate_loss(outputs.losses, mask, self.critic.loss_agg_mode, shares.totals, self.loss_scale_factor)
        shares.add("vf_loss", loss)
        for name, values in outputs.metrics.items():
            shares.add_tokens(name, values, mask)
        return loss

    def _values(self, rows: DataProto) -> Tensor:
        values = self.engine.module(model_inputs(rows, self.engine.device, packed=self.critic.model.use_remove_padding))
        return to_rows(values, rows.batch["response_mask"].to(self.engine.device))

    def save_checkpoint(self, folder: str) -> str | None:
        """A collective. What the operating system refused, if anything."""
        return save_engine(self.engine, Path(folder), self.critic.checkpoint.save_contents, self.export)

    def load_checkpoint(self, folder: str) -> None:
        """A collective; the ranks may be more or fewer than those that saved."""
        load_engine(self.engine, Path(folder), self.critic.checkpoint.load_contents)

    def pop_peak_memory(self) -> dict[str, int]:
        """Bytes of the phases since the last call."""
        return self.engine.pop_peak_memory()
