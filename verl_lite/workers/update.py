"""How a rank walks its share of a batch, and what it reports of an update.

Here and in the workers a *share* is a sum over this rank's rows already divided by the mini-batch's total: adding the
shares of all micro-batches and ranks gives the mean over the mini-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from verl_lite.algorithms.aggregate import MiniBatchTotals, aggregate_loss
from verl_lite.batching import RankSchedule
from verl_lite.distributed.fsdp import FSDPEngine, NotFinite, StepOutcome
from verl_lite.protocol import DataProto

# What workers read of a batch: to run the model, and in the losses where they apply.
MODEL_COLUMNS = ("input_ids", "attention_mask", "response_mask")
LOSS_COLUMNS = ("old_log_probs", "advantages", "ref_log_probs", "rollout_weights", "values", "returns")


class Shares:
    """Sums of metrics over a mini-batch's micro-batches."""

    def __init__(self, totals: MiniBatchTotals) -> None:
        self.totals = totals
        self.sums: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, share: Tensor) -> None:
        self.sums[name] += float(share.detach())

    def add_tokens(self, name: str, values: Tensor, response_mask: Tensor) -> None:
        """values [B, T]: their mean over the mini-batch's loss tokens."""
        self.add(name, aggregate_loss(values.detach(), response_mask, "token-mean", self.totals))


@dataclass(frozen=True)
class MiniBatchResult:
    """What became of a mini-batch on this rank."""

    outcome: Literal["done", "skipped", "empty"]  # skipped: a loss or gradient was not finite; empty: no loss token
    grad_norm: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    not_finite: NotFinite | None = None  # of a skipped one, on this rank

    @classmethod
    def of(cls, step: StepOutcome, shares: Shares) -> MiniBatchResult:
        return cls("done" if step.done else "skipped", step.grad_norm, dict(shares.sums), step.not_finite)


@dataclass(frozen=True)
class UpdateSummary:
    """An update of all ranks: means over the mini-batches that made a step."""

    metrics: dict[str, float]
    first: dict[str, float]  # of the first mini-batch that was not empty
    done: int
    skipped: list[int]  # the mini-batches skipped, counted through all epochs
    empty: int


def summarise_updates(results: Sequence[Sequence[Sequence[MiniBatchResult]]]) -> UpdateSummary:
    """results: for each call of `update` (epoch), for each rank, its list of mini-batches."""
    minis = [mini for epoch in results for mini in zip(*epoch, strict=True)]  # each: the mini-batch on all ranks
    outcomes = [ranks[0].outcome for ranks in minis]
    means: list[dict[str, float]] = []
    for ranks in minis:
        names = dict.fromkeys(name for rank in ranks for name in rank.shares)
        means.append({name: sum(rank.shares.get(name, 0.0) for rank in ranks) for name in names})
        if ranks[0].outcome != "empty":
            means[-1]["grad_norm"] = ranks[0].grad_norm
    done = [mean for mean, outcome in zip(means, outcomes, strict=True) if outcome == "done"]
    return UpdateSummary(
        metrics={name: sum(mean[name] for mean in done) / len(done) for name in (done[0] if done else {})},
        first=next((mean for mean, outcome in zip(means, outcomes, strict=True) if outcome != "empty"), {}),
        done=len(done),
        skipped=[index for index, outcome in enumerate(outcomes) if outcome == "skipped"],
        empty=outcomes.count("empty"),
    )


def train_mini_batches(
    engine: FSDPEngine,
    shard: DataProto,
    schedule: RankSchedule,
    totals: Sequence[MiniBatchTotals],
    lr: float,
    loss_shares: Callable[[list[DataProto], Shares], Iterator[Tensor]],
) -> list[MiniBatchResult]:
    """One pass over the batch: an optimizer step per mini-batch that has a loss token.

    totals: of each mini-batch, over all ranks. lr: the rate of this training step. loss_shares: gives one loss for each
    micro-batch of a mini-batch, when it is asked for: two graphs at a time would need twice the memory.
    """
    results = []
    for micros, total in zip(micro_batches(shard, schedule), totals, strict=True):
        if total.loss_tokens == 0:
            results.append(MiniBatchResult("empty"))
            continue
        shares = Shares(total)
        for index, loss_share in enumerate(loss_shares(micros, shares)):
            engine.backward(loss_share, last=index == len(micros) - 1)
        results.append(MiniBatchResult.of(engine.step(lr), shares))
    return results


@torch.no_grad()
def forward_micro_batches(
    shard: DataProto, schedule: RankSchedule, compute: Callable[[DataProto], Mapping[str, Tensor]]
) -> DataProto:
    """What `compute` gives for the rows of each micro-batch, put together on the CPU in the shard's order."""
    results = []
    micros = chain.from_iterable(micro_batches(shard, schedule))
    for micro, size in zip(micros, chain.from_iterable(schedule.micro_sizes), strict=True):
        columns = {name: column.cpu() for name, column in compute(micro).items()}
        results.append(DataProto.from_dict(columns)[:size])  # of a row run with weight zero nothing is kept
    return DataProto.concat(results)


def micro_batches(shard: DataProto, schedule: RankSchedule) -> Iterator[list[DataProto]]:
    """For each mini-batch this rank's micro-batches, equally many on every rank.

    A rank with no row left runs one that it has with weight zero: a forward of 0 rows fails, and a forward or backward
    left out would leave the peers waiting in theirs.
    """
    filler = without_weight(shard[:1])
    minis = shard[: sum(schedule.mini_sizes)].split(schedule.mini_sizes)
    for mini, micro_sizes in zip(minis, schedule.micro_sizes, strict=True):
        yield [micro if len(micro) else filler for micro in mini.split(micro_sizes)]


def without_weight(rows: DataProto) -> DataProto:
    """The same rows without a token that counts: selected away, not multiplied by 0, which NaN would survive."""
    columns = dict(rows.batch.items())
    return DataProto.from_dict({**columns, "response_mask": torch.zeros_like(columns["response_mask"])})
