from __future__ import annotations

import pytest

from verl_lite.algorithms.lr_schedule import learning_rate


def rates(total: int, **options: object) -> list[float]:
    return [learning_rate(step, lr=1.0, total_steps=total, **options) for step in range(total)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [-1, 0, 1, 5])
@pytest.mark.parametrize("total", [1, 2, 10])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_no_step_is_made_with_rate_zero(schedule: str, warmup: int, total: int, floor: float) -> None:
    assert min(rates(total, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)) > 0


def test_first_step_without_warmup_has_the_full_rate() -> None:  # verl commit 80af51b60 (PR #1463)
    assert learning_rate(0, lr=1e-3, total_steps=1, schedule="constant", warmup_steps=-1, warmup_ratio=0) == 1e-3


def test_warmup_rises_evenly_to_the_full_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_warmup_ratio_counts_training_steps_and_yields_to_steps() -> None:
    assert rates(8, warmup_ratio=0.25) == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert rates(8, warmup_ratio=0.25, warmup_steps=0) == [1] * 8
    assert rates(7, warmup_ratio=0.4) == [0.5, 1, 1, 1, 1, 1, 1]  # floor(2.8) steps


# verl-project/verl#399, NovaSky-AI/SkyRL#1483, areal-project/AReaL#1289: one step of the schedule per training step
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_minimum_is_reached_in_the_last_training_step(schedule: str, warmup: int) -> None:
    values = rates(10, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)
    assert values[9] == pytest.approx(0.1)
    assert values[8] > 0.1


def test_linear_by_hand() -> None:
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]  # 0 one step after the end
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_by_hand() -> None:
    # cos 0, 60, 120, 180 degrees = 1, 1/2, -1/2, -1
    assert rates(4, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([1, 0.775, 0.325, 0.1])
    # one whole cycle: cos 0, 120, 240, 360 degrees
    assert rates(4, schedule="cosine", min_lr_ratio=0.1, num_cycles=1) == pytest.approx([1, 0.325, 0.325, 1])


def test_steps_beyond_the_end_keep_the_last_rate() -> None:
    assert learning_rate(50, lr=1.0, total_steps=10, schedule="linear", min_lr_ratio=0.1) == pytest.approx(0.1)
