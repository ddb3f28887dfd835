"""The order of the prompts depends on (seed, epoch) alone, and a saved place is found again."""

from __future__ import annotations

import json

import pytest

from verl_lite.data.sampler import Sampler, validation_batches


def batches(sampler: Sampler, count: int) -> list[tuple[int, list[int]]]:
    return [sampler.next() for _ in range(count)]


def test_without_shuffle_the_order_is_that_of_the_files():
    sampler = Sampler(6, 2, shuffle=False, seed=1)
    assert batches(sampler, 4) == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5]), (1, [0, 1])]


def test_same_seed_same_order_other_seed_other_order():
    first, again, other = (batches(Sampler(100, 10, True, seed), 10) for seed in (1, 1, 2))
    assert first == again != other


def test_each_epoch_gives_every_row_once_in_another_order():
    sampler = Sampler(30, 10, shuffle=True, seed=1)
    epochs = [[row for _, rows in batches(sampler, 3) for row in rows] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30))
    assert epochs[0] != epochs[1]


def test_the_partial_last_batch_is_dropped() -> None:
    sampler = Sampler(7, 3, shuffle=False, seed=1)
    assert sampler.steps_per_epoch == 2
    assert batches(sampler, 3) == [(0, [0, 1, 2]), (0, [3, 4, 5]), (1, [0, 1, 2])]


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="data.train_batch_size=8 .* 5 prompts .* left"):
        Sampler(5, 8, shuffle=True, seed=1)


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 4, 7], ids=lambda n: f"after_{n}_steps")
def test_a_resumed_sampler_goes_on_like_an_uninterrupted_one(steps_before: int):
    uninterrupted, saved, resumed = (Sampler(10, 3, True, 5) for _ in range(3))
    batches(uninterrupted, steps_before)
    batches(saved, steps_before)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert batches(resumed, 8) == batches(uninterrupted, 8)


@pytest.mark.parametrize(
    ("num_rows", "shuffle", "seed", "message"),
    [
        (12, True, 5, "num_rows was 10, is 12; use the same data.train_files"),
        (10, False, 5, "shuffle was True, is False; use the same"),
        (10, True, 6, "seed was 5, is 6; use the same"),
    ],
)
def test_a_place_in_other_data_is_refused(num_rows: int, shuffle: bool, seed: int, message: str):
    state = Sampler(10, 3, True, 5).state_dict()
    with pytest.raises(ValueError, match=message):
        Sampler(num_rows, 3, shuffle, seed).load_state_dict(state)


@pytest.mark.parametrize(
    "batch_size, expected", [(2, [[0, 1], [2, 3], [4]]), (None, [[0, 1, 2, 3, 4]]), (9, [[0, 1, 2, 3, 4]])]
)
def test_validation_takes_every_row_once_in_file_order(batch_size: int | None, expected: list[list[int]]):
    assert list(validation_batches(5, batch_size)) == expected


def test_validation_may_be_shuffled():
    rows = [row for batch in validation_batches(50, 8, shuffle=True, seed=3) for row in batch]
    assert rows != list(range(50)) and sorted(rows) == list(range(50))
