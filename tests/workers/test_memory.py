"""The most reported fault, a mini-batch size that is set and not used: steps are counted, and memory is measured.

Each update runs in a fresh process through the driver's `update` and the real worker, on 64 sequences.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.memory_vs_batch import Measured, Setting, Sizes, apart, make_model, measure


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    return str(apart(make_model, str(folder)))


def update_64_rows(model_path: str, *, mini: int, micro: int, epochs: int = 1) -> Measured:
    measured: Measured = apart(measure, Sizes(train=64, mini=mini, micro=micro), Setting(model_path, epochs=epochs))
    return measured


def test_memory_follows_the_micro_batch_and_steps_follow_the_mini_batch(model_path: str) -> None:
    small, whole = (update_64_rows(model_path, mini=size, micro=size) for size in (16, 64))
    assert (small.optimizer_steps, whole.optimizer_steps) == (4, 1)  # 64 / 16, 64 / 64
    assert small.peak_bytes < 0.5 * whole.peak_bytes  # a quarter of the rows, and gradients that are always there


def test_memory_does_not_follow_the_mini_batch(model_path: str) -> None:
    two_epochs = update_64_rows(model_path, mini=16, micro=8, epochs=2)
    one_step = update_64_rows(model_path, mini=64, micro=8)
    assert (two_epochs.optimizer_steps, one_step.optimizer_steps) == (8, 1)  # 64 / 16 · 2, 64 / 64
    # Resident memory of equal work differs by up to 6 % between processes; 64 rows at once would be five times this.
    assert two_epochs.peak_bytes == pytest.approx(one_step.peak_bytes, rel=0.15)
