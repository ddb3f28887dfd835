"""The policy in training: scores its own samples, then learns from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_lite.algorithms import POLICY_LOSSES
from verl_lite.algorithms.aggregate import MiniBatchTotals, aggregate_loss
from verl_lite.algorithms.kl import kl_penalty
from verl_lite.algorithms.policy_losses import PolicyLossInputs, row_keys, selector
from verl_lite.batching import RankSchedule
from verl_lite.config import ActorConfig, ModelConfig
from verl_lite.distributed.checkpoint import load_engine, save_engine
from verl_lite.distributed.memory import own_memory_bytes
from verl_lite.distributed.process_group import RankContext
from verl_lite.models.export import HFExport
from verl_lite.plugins import pick_options, resolve
from verl_lite.protocol import DataProto
from verl_lite.rollout.weight_transfer import WeightUpdate, make_publisher
from verl_lite.workers.policy import build_policy_engine, score_tokens
from verl_lite.workers.update import MiniBatchResult, Shares, forward_micro_batches, train_mini_batches


class ActorWorker:
    def __init__(
        self,
        context: RankContext,
        *,
        model: ModelConfig,
        actor: ActorConfig,
        temperature: float,
        vocab_size: int | None = None,
    ) -> None:
        """temperature: of sampling; log-probs and entropies are those of the distribution samples come from.
        vocab_size: the tokenizer's size where the engine gives ids beyond it no probability; None: all the model's ids.
        """
        self.actor = actor
        self.export = HFExport("policy", model.path, model.override_config, model.trust_remote_code)
        self.packed = model.use_remove_padding
        self.policy_loss = resolve(actor.policy_loss.loss_mode, POLICY_LOSSES, key="actor.policy_loss.loss_mode")
        self.select = selector(self.policy_loss)
        self.options = {
            "clip_ratio_low": actor.clip_ratio_low,
            "clip_ratio_high": actor.clip_ratio_high,
            "clip_ratio_c": actor.clip_ratio_c,
            **actor.policy_loss.options,
        }
        self.kl = kl_penalty(actor.kl_loss_type, key="actor.kl_loss_type")
        self.engine = build_policy_engine(
            context,
            model,
            actor.fsdp_config,
            temperature=temperature,
            vocab_size=vocab_size,
            gradient_checkpointing=model.enable_gradient_checkpointing,
        )
        self.engine.train_with(
            actor.optim,
            grad_clip=actor.grad_clip,
            sync_every_micro_batch=not actor.fsdp_config.use_no_sync_for_gradient_accumulation,
            optimizer_offload=actor.fsdp_config.optimizer_offload,
        )
        if context.rank == 0:
            self.export.read()

    def compute_log_probs(self, shard: DataProto, schedule: RankSchedule) -> DataProto:
        """`old_log_probs` and `entropies` (nats) of the shard's rows, each [B, R], 0 where `response_mask` is 0."""

        def score(rows: DataProto) -> dict[str, Tensor]:
            log_probs, entropies = score_tokens(self.engine, rows, packed=self.packed, with_entropy=True)
            assert entropies is not None, "asked for"
            return {"old_log_probs": log_probs, "entropies": entropies}

        with self.engine.phase("old_log_prob"):
            return forward_micro_batches(shard, schedule, score)

    def update(
        self, shard: DataProto, schedule: RankSchedule, *, totals: Sequence[MiniBatchTotals], lr: float
    ) -> list[MiniBatchResult]:
        """One pass over the batch: an optimizer step per mini-batch. Reads old_log_probs, advantages, response_mask.

        Also read where they apply: ref_log_probs (use_kl_loss), rollout_weights (rollout correction).
        """
        with self.engine.phase("update_actor", optimizer=True):
            return train_mini_batches(self.engine, shard, schedule, totals, lr, self._losses)

    def _losses(self, micros: list[DataProto], shares: Shares) -> Iterator[Tensor]:
        selected = self._select(micros) if self.select is not None else [None] * len(micros)
        return (self._loss(micro, chosen, shares) for micro, chosen in zip(micros, selected, strict=True))

    def _loss(self, rows: DataProto, selected: Tensor | None, shares: Shares) -> Tensor:
        """This micro-batch's share of the mini-batch's loss; its metrics go to `shares`."""
        actor, mask = self.actor, rows.batch["response_mask"].to(self.engine.device)
        log_probs, entropies = score_tokens(
            self.engine, rows, packed=self.packed, with_entropy=actor.entropy_coeff != 0
        )
        outputs = self.policy_loss(
            self._loss_inputs(rows, log_probs, selected), **pick_options(self.policy_loss, self.options)
        )
        loss = self._aggregate(outputs.losses, mask, shares)
        shares.add("pg_loss", loss)
        for name, values in outputs.metrics.items():
            shares.add_tokens(name, values, mask)
        if actor.has_kl_loss:
            ref_log_probs = rows.batch["ref_log_probs"].to(self.engine.device)
            kl_loss = self._aggregate(self.kl(log_probs, ref_log_probs, mask), mask, shares)
            shares.add("kl_loss", kl_loss)
            loss = loss + actor.kl_loss_coef * kl_loss
        if entropies is not None:
            entropy_loss = self._aggregate(entropies, mask, shares)
            shares.add("entropy_loss", entropy_loss)
            loss = loss - actor.entropy_coeff * entropy_loss
        shares.add("loss", loss)
        return loss

    def _aggregate(self, values: Tensor, mask: Tensor, shares: Shares) -> Tensor:
        return aggregate_loss(values, mask, self.actor.loss_agg_mode, shares.totals, self.actor.loss_scale_factor)

    def _loss_inputs(self, rows: DataProto, log_probs: Tensor, selected: Tensor | None = None) -> PolicyLossInputs:
        columns = {
            name: rows.batch[name].to(self.engine.device)
            for name in ("old_log_probs", "advantages", "response_mask", "rollout_weights")
            if name in rows.batch.keys()  # noqa: SIM118
        }
        return PolicyLossInputs(log_probs=log_probs, selected=selected, **columns)

    @torch.no_grad()
    def _select(self, micros: Sequence[DataProto]) -> list[Tensor]:
        """The tokens that the loss chooses by statistics of the whole mini-batch, as one mask per micro-batch."""
        assert self.select is not None, "asked only of losses that select"
        fields = ("log_probs", "old_log_probs", "advantages", "response_mask")
        own: list[tuple[Tensor, ...]] = []
        for rows in micros:
            log_probs, _ = score_tokens(self.engine, rows, packed=self.packed)
            inputs = self._loss_inputs(rows, log_probs)
            own.append((row_keys(rows.batch["input_ids"]), *(getattr(inputs, name).cpu() for name in fields)))
        everyone: list[list[tuple[Tensor, ...]]] = [[] for _ in range(self.engine.context.world_size)]
        dist.all_gather_object(everyone, own)
        keys, *columns = (torch.cat(parts) for parts in zip(*(part for rank in everyone for part in rank), strict=True))
        inputs = PolicyLossInputs(**dict(zip(fields, columns, strict=True)))
        selected = self.select(inputs, row_keys=keys, **pick_options(self.select, self.options))
        first = sum(len(part[0]) for rank in everyone[: self.engine.context.rank] for part in rank)
        sizes = [len(part[0]) for part in own]
        return [mask.to(self.engine.device) for mask in selected[first : first + sum(sizes)].split(sizes)]

    def weights(self) -> dict[str, Tensor]:
        """The sharded weights under the names of the HF model's state dict, tied ones too."""
        return {name.removeprefix("lm."): tensor for name, tensor in self.engine.module.state_dict().items()}

    def open_transfer(self, backend: str, dtype: str, **options: Any) -> dict[str, Any] | None:
        """Make this rank's side of the weight transfer (options: `make_publisher`); what the engines' side needs."""
        self.publisher = make_publisher(backend, rank=self.engine.context.rank, dtype=dtype, **options)
        return self.publisher.connection()

    def connect_transfer(self) -> None:
        self.publisher.connect()

    def publish_weights(self, version: int) -> WeightUpdate | None:
        """The first part of an update of the rollout engines, on rank 0; a collective, as are the next two."""
        return self.publisher.publish(self.weights(), version)

    def next_weights(self) -> WeightUpdate | None:
        return self.publisher.next_part()

    def release_weights(self) -> None:
        self.publisher.release()

    def save_checkpoint(self, folder: str) -> str | None:
        """A collective. What the operating system refused, if anything."""
        return save_engine(self.engine, Path(folder), self.actor.checkpoint.save_contents, self.export)

    def load_checkpoint(self, folder: str) -> None:
        """A collective; the ranks may be more or fewer than those that saved."""
        load_engine(self.engine, Path(folder), self.actor.checkpoint.load_contents)

    def pop_peak_memory(self) -> dict[str, int]:
        """Bytes of the phases since the last call."""
        return self.engine.pop_peak_memory()

    def own_memory(self) -> int:
        """Bytes of this process, all its roles."""
        return own_memory_bytes(children=False)

    def close_transfer(self) -> None:
        """Give up what the transfer holds, such as its folder in shared memory."""
        self.publisher.release()
        del self.publisher

    def device_name(self) -> str:
        """Of this rank's GPU."""
        return torch.cuda.get_device_name(self.engine.device)
