"""When a run validates and saves: whole runs in one process (`Workshop`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_dead_keys import BASE, Workshop, open_workshop


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("frequencies")) as workshop:
        yield workshop


def seen(workshop: Workshop, *overrides: str) -> tuple[list[int], list[int]]:
    """(steps at which it validated, steps it saved)."""
    run = workshop.run([*BASE, "data.val_files=val.jsonl", *overrides])
    assert run["error"] == ""
    [metrics] = [rows for path, rows in run["files"].items() if path.endswith("metrics.jsonl")]
    validated = [row["step"] for row in metrics if any(key.startswith("val-core/") for key in row)]
    saved = {int(found[1]) for path in run["files"] if (found := re.search(r"global_step_(\d+)/", str(Path(path))))}
    return validated, sorted(saved)


@pytest.mark.parametrize(
    ("frequency", "steps"), [(-1, []), (0, []), (1, [1, 2, 3]), (2, [2, 3]), (1000, [3])], ids=str
)  # fmt: skip
def test_a_frequency_of_n_means_every_nth_step_and_the_last_one_below_1_never(
    workshop: Workshop, frequency: int, steps: list[int]
) -> None:
    """AReaL commit 86a4e69d0; verl-project/verl#4534 (B095)."""
    both = (f"trainer.save_freq={frequency}", f"trainer.test_freq={frequency}")
    run = seen(workshop, "trainer.total_training_steps=3", "trainer.val_before_train=False", *both)
    assert run == (steps, steps)


def test_the_last_step_is_saved_and_validated_once(workshop: Workshop) -> None:
    """verl commit 3165d9889 (PR #409) (B084)."""
    run = seen(workshop, "trainer.total_training_steps=4", "trainer.save_freq=3", "trainer.test_freq=2")
    assert run == ([0, 2, 4], [3, 4])
