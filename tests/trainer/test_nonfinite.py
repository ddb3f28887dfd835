"""A loss or gradient that is not finite: nobody makes the step, and the first such mini-batch is written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from training import cut, full_weights, make_actor, make_critic, ragged_batch, update

from verl_lite.batching import Schedule
from verl_lite.data.prompts import load_tokenizer
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.trainer import nonfinite
from verl_lite.trainer.nonfinite import describe_first_skipped
from verl_lite.workers.update import MiniBatchResult, summarise_updates

MICRO_ROWS = 2


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def batch(**columns: torch.Tensor) -> DataProto:
    """8 rows, row i with uid "0-i"."""
    rows = ragged_batch()
    return DataProto.from_dict({**dict(rows.batch.items()), **columns}, {"uid": [f"0-{i}" for i in range(8)]})


def train(
    context: RankContext, path: str, role: str, rows: DataProto, spoiled: bool
) -> tuple[list[Schedule], list[list[MiniBatchResult]], bool]:
    """Two mini-batches of 4 rows; `spoiled`: NaN is added to rank 1's losses, which leaves the gradient as it is."""
    worker: Any = make_actor(context, path) if role == "actor" else make_critic(context, path)
    if spoiled and context.rank == 1:
        loss = worker._loss
        worker._loss = lambda *args: loss(*args) + float("nan")
    before = full_weights(worker)
    schedules = cut(rows, context, mini=4, micro_batch_rows=MICRO_ROWS)
    results = update(worker, rows, schedules)
    after = full_weights(worker)
    return schedules, results, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_loss_that_is_nan_on_one_rank_alone_stops_the_step_of_all(
    role: str, two_ranks: Ranks, tiny_model_path: str, tmp_path: Path
) -> None:
    (schedules, first, unmoved), (_, second, _) = two_ranks.run(train, tiny_model_path, role, batch(), True)
    assert unmoved
    assert [mini.outcome for mini in first[0] + second[0]] == ["skipped"] * 4
    assert all(0 < mini.grad_norm < float("inf") for mini in first[0]), "the gradient was finite"
    results = [[rank[0] for rank in (first, second)]]
    assert summarise_updates(results).skipped == [0, 1]

    rows, tokenizer = batch(), load_tokenizer(tiny_model_path)
    text = describe_first_skipped(results, schedules, rows, tmp_path / "step_3_actor", tokenizer)
    # Rank 1 has two of the mini-batch's four rows, and its one micro-batch holds both.
    assert text is not None and "not finite: the loss of micro-batches with 2 of 4 rows" in text
    assert "gradient" not in text
    lines = [json.loads(line) for line in (tmp_path / "step_3_actor.jsonl").read_text().splitlines()]
    mini = schedules[0].mini_batches[0]
    assert sorted(line["uid"] for line in lines if not line["loss_is_finite"]) == sorted(
        f"0-{row}" for row in mini.rank_rows[1]
    )
    assert [line["loss_is_finite"] for line in lines] == [False, False, True, True]
    tensors = load_file(tmp_path / "step_3_actor.safetensors")
    [row] = [row for row in range(8) if lines[0]["uid"] == f"0-{row}"]
    assert torch.equal(tensors["advantages"][0], rows.batch["advantages"][row])
    width = int(rows.batch["attention_mask"][row, 5:].sum())  # prompts are 5 wide
    assert lines[0]["response_ids"] == rows.batch["input_ids"][row, 5 : 5 + width].tolist()


def test_the_cause_is_named_before_its_effects(two_ranks: Ranks, tiny_model_path: str, tmp_path: Path) -> None:
    advantages = ragged_batch().batch["advantages"].clone()
    advantages[0, 0] = float("inf")
    rows = batch(advantages=advantages)
    ranks = two_ranks.run(train, tiny_model_path, "actor", rows, False)
    results = [[result[0] for _, result, _ in ranks]]
    path = tmp_path / "run" / "step_1_actor"
    text = describe_first_skipped(results, ranks[0][0], rows, path, load_tokenizer(tiny_model_path))
    assert text is not None
    places = [text.index(word) for word in ("advantages of 1 of 4 rows", "the loss of", "the gradient of")]
    assert places == sorted(places)
    [line] = [json.loads(line) for line in Path(f"{path}.jsonl").read_text().splitlines() if '"0-0"' in line]
    assert line["advantages"]["not_finite"] == 1 and line["advantages"]["max"] is not None


def test_a_dump_keeps_to_its_size_and_holds_the_bad_rows_first(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = batch()
    row_bytes = sum(column[:1].nbytes for column in rows.batch.values())
    monkeypatch.setattr(nonfinite, "MAX_BYTES", 3 * row_bytes)
    bad = [row in (5, 7) for row in range(8)]
    nonfinite.write_rows(tmp_path / "dump", rows, bad, load_tokenizer(tiny_model_path))
    lines = [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text().splitlines()]
    assert [line["uid"] for line in lines] == ["0-5", "0-7", "0-0"]
    assert len(load_file(tmp_path / "dump.safetensors")["advantages"]) == 3


def test_nothing_is_written_of_an_update_without_a_skipped_step(tmp_path: Path) -> None:
    results = [[[MiniBatchResult("done"), MiniBatchResult("empty")]]]
    schedules: Any = [type("Of", (), {"mini_batches": [None, None]})()]
    assert describe_first_skipped(results, schedules, batch(), tmp_path / "dump", None) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
