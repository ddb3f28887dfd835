"""The critic on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from training import cut, forward_pass, make_critic, ragged_batch, update

from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.workers.update import summarise_updates


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def learn(context: RankContext, path: str, epochs: int) -> tuple[DataProto, Any, DataProto]:
    batch = ragged_batch(8)
    critic = make_critic(context, path, cliprange_value=100.0)
    start = forward_pass(critic.compute_values, batch, context, micro_batch_rows=3)
    batch = batch.pop(["values"])[1].union(start)
    results = update(critic, batch, cut(batch, context, epochs=epochs, micro_batch_rows=3), lr=3e-3)
    return start, results, forward_pass(critic.compute_values, batch, context, micro_batch_rows=3)


def test_values_start_at_zero_and_move_towards_the_returns(two_ranks: Ranks, tiny_model_path: str) -> None:
    by_rank = two_ranks.run(learn, tiny_model_path, 12)
    start, _, end = by_rank[0]
    batch = ragged_batch(8)
    mask, returns = batch.batch["response_mask"].bool(), batch.batch["returns"]
    assert not start.batch["values"].any()
    errors = [(values.batch["values"] - returns)[mask].square().mean() for values in (start, end)]
    assert errors[1] < 0.5 * errors[0]
    assert torch.equal(end.batch["values"] == 0, ~mask)

    summary = summarise_updates(list(zip(*(results for _, results, _ in by_rank), strict=True)))
    assert summary.done == 12
    # The first loss is that of values 0: half the mean square of the returns.
    assert summary.first["vf_loss"] == pytest.approx(0.5 * returns[mask].square().mean().item(), rel=1e-5)
    assert summary.first["vpred_mean"] == 0


def test_every_epoch_makes_its_steps(two_ranks: Ranks, tiny_model_path: str) -> None:
    _, results, _ = two_ranks.run(learn, tiny_model_path, 3)[0]
    assert [[mini.outcome for mini in epoch] for epoch in results] == [["done"]] * 3
