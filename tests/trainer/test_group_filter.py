"""Dynamic sampling: which prompts make a batch, when the search ends, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_lite.config import FilterGroupsConfig
from verl_lite.protocol import DataProto
from verl_lite.trainer.group_filter import RETURNED, GroupFilter

Filter = Callable[..., GroupFilter]


def scored(groups: dict[str, list[float | None]], *, width: int = 2, **returned: list[Any]) -> DataProto:
    """A round: per prompt the scores of its responses, None for one without."""
    rows = [(uid, score) for uid, scores in groups.items() for score in scores]
    has_score = torch.tensor([score is not None for _, score in rows])
    scores = torch.zeros(len(rows), width)
    scores[:, width - 1] = torch.tensor([score or 0.0 for _, score in rows])
    ids = torch.ones(len(rows), width, dtype=torch.int64)
    prompts = torch.ones(len(rows), 1, dtype=torch.int64)
    tensors = {
        "prompts": prompts,
        "responses": ids,
        "input_ids": torch.cat([prompts, ids], 1),
        "attention_mask": torch.ones(len(rows), 1 + width, dtype=torch.int64),
        "position_ids": torch.arange(1 + width).repeat(len(rows), 1),
        "response_mask": ids * has_score[:, None],
        "token_level_scores": scores,
    }
    return DataProto.from_dict(
        tensors, {"uid": [uid for uid, _ in rows], **{RETURNED + k: v for k, v in returned.items()}}
    )


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


@pytest.fixture
def groups() -> Filter:
    def make(num_prompts: int = 2, rounds_per_epoch: int = 3, **settings: Any) -> GroupFilter:
        return GroupFilter(
            FilterGroupsConfig(enable=True, **settings),
            num_prompts=num_prompts, rounds_per_epoch=rounds_per_epoch, pad_token_id=0,
        )  # fmt: skip

    return make


def test_groups_that_differ_are_kept_in_order_until_the_batch_is_full(groups: Filter) -> None:
    search = groups(num_prompts=3)
    search.add(scored({"a": [0, 0], "b": [0, 1], "c": [1, 1]}), {})
    assert not search.complete
    search.add(scored({"d": [1, 0], "e": [2, 0], "f": [0, 3]}, width=4), {})
    assert search.complete
    batch, metrics = search.result()
    assert uids(batch) == ["b", "b", "d", "d", "e", "e"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0, 1, 1, 0, 2, 0]
    assert batch.batch["responses"].shape == (6, 4)  # as wide as the widest round
    counts = [metrics[f"training/{name}"] for name in ("num_gen_batches", "filtered_prompts", "surplus_prompts")]
    assert counts == [2, 2, 1]  # rounds; a and c; f
    # (0+0+0+1+1+1)/6 = 0.5 and (1+0+2+0+0+3)/6 = 1 of the responses generated, of the batch (0+1+1+0+2+0)/6 = 0.67
    assert metrics["training/generated_score/mean"] == 0.75


def test_a_full_first_round_is_the_batch(groups: Filter) -> None:
    search = groups()
    round_ = scored({"a": [0, 1], "b": [1, 0]})
    search.add(round_, {"reward/errors": 1.0})
    batch, metrics = search.result()
    assert search.complete and batch == round_
    assert metrics["training/filtered_prompts"] == metrics["training/surplus_prompts"] == 0


def test_responses_without_a_score_make_no_difference(groups: Filter) -> None:
    search = groups(num_prompts=1)
    search.add(scored({"a": [1, None], "b": [None, None], "c": [0, None, 1]}), {})
    assert uids(search.result()[0]) == ["c", "c", "c"]


def test_another_value_of_the_reward_function_may_be_what_differs(groups: Filter) -> None:
    search = groups(num_prompts=1, metric="acc")
    search.add(scored({"a": [0.1, 0.9], "b": [0.5, 0.5]}, acc=[1, 1, False, True]), {})
    assert uids(search.result()[0]) == ["b", "b"]


@pytest.mark.parametrize("metric", ["acc", "uid"])
def test_a_metric_that_the_reward_does_not_give_is_an_error_naming_those_it_gives(metric: str, groups: Filter) -> None:
    with pytest.raises(ValueError, match=f"filter_groups.metric={metric} is not among .*: reward, style, words"):
        groups(metric=metric).add(scored({"a": [0, 1]}, words=[3, 4], style=["x", "y"]), {})


def test_rounds_that_return_other_columns_fit_together(groups: Filter) -> None:
    search = groups()
    search.add(scored({"a": [0, 1]}, words=[3, 4]), {})
    search.add(scored({"b": [0, 1]}), {})
    assert search.result()[0].non_tensor_batch[RETURNED + "words"].tolist() == [3, 4, None, None]


def test_counts_of_the_rounds_add_up_and_means_are_averaged(groups: Filter) -> None:
    search = groups()
    search.add(scored({"a": [0, 1]}), {"reward/errors": 1.0, "reward/p99_s": 0.25, "reward/acc": 0.5})
    search.add(scored({"b": [0, 1]}), {"reward/errors": 2.0, "reward/p99_s": 0.125, "reward/acc": 1.0})
    _, metrics = search.result()
    assert (metrics["reward/errors"], metrics["reward/p99_s"], metrics["reward/acc"]) == (3.0, 0.25, 0.75)


def test_at_the_limit_of_rounds_too_few_prompts_are_an_error_with_the_numbers(groups: Filter) -> None:
    search = groups(max_num_gen_batches=2)
    search.add(scored({"a": [0, 1], "b": [1, 1]}), {})
    assert not search.complete
    with pytest.raises(RuntimeError, match="only 1 of data.train_batch_size=2 .*max_num_gen_batches=2.*on_limit=fill"):
        search.add(scored({"c": [0, 0], "d": [1, 1]}), {})


def test_a_batch_that_is_full_at_the_limit_is_none(groups: Filter) -> None:
    search = groups(max_num_gen_batches=2)
    search.add(scored({"a": [0, 1], "b": [1, 1]}), {})
    search.add(scored({"c": [0, 1], "d": [1, 1]}), {})
    assert uids(search.result()[0]) == ["a", "a", "c", "c"]


def test_fill_takes_the_first_prompts_that_were_dropped(groups: Filter, caplog: pytest.LogCaptureFixture) -> None:
    search = groups(num_prompts=3, max_num_gen_batches=2, on_limit="fill")
    search.add(scored({"a": [0, 0], "b": [1, 1], "c": [2, 2]}), {})
    search.add(scored({"d": [0, 1], "e": [1, 1], "f": [2, 2]}), {})
    assert search.complete
    with caplog.at_level(logging.WARNING):
        batch, metrics = search.result()
    assert uids(batch) == ["d", "d", "a", "a", "b", "b"]
    assert metrics["training/filtered_prompts"] == 3  # c, e and f
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "only 1 of data.train_batch_size=3" in warning


def test_without_a_limit_an_epoch_without_a_single_group_ends_the_search(groups: Filter) -> None:
    search = groups(rounds_per_epoch=12)
    for number in range(11):
        search.add(scored({f"{number}": [1, 1]}), {})
    search.add(scored({"found": [0, 1]}), {})  # slow, but not in vain: the count starts again
    for number in range(11):
        search.add(scored({f"again {number}": [1, 1]}), {})
        assert not search.complete
    with pytest.raises(RuntimeError, match="only 1 of data.train_batch_size=2 .* after 12 rounds in a row without one"):
        search.add(scored({"last": [1, 1]}), {})
