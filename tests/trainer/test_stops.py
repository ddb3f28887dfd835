"""Asked to stop at different moments of a step: what is saved, and what the run says it has saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_dead_keys import BASE
from test_resume import Runs, runs, workshop  # noqa: F401  (fixtures)

from verl_lite.trainer.ppo import PPOTrainer
from verl_lite.trainer.stopping import StoppedEarly

FOUR = [*BASE, "trainer.total_training_steps=4"]


def ask_to_stop(monkeypatch: pytest.MonkeyPatch, method: str, step: int) -> None:
    """As a signal does that comes while `method` of that step is under way."""
    original: Callable[..., Any] = getattr(PPOTrainer, method)

    def asked(trainer: PPOTrainer, *args: Any) -> Any:
        if trainer.global_step == step:
            trainer.stop.set()
        return original(trainer, *args)

    monkeypatch.setattr(PPOTrainer, method, asked)


@pytest.mark.parametrize(
    ("method", "save_freq", "saved"),
    [("step", 100, True), ("step", 1, True), ("write_checkpoint", 2, True), ("step", -1, False)],
    ids=["off_the_frequency", "on_the_frequency", "during_the_save", "saving_is_off"],
)
def test_the_step_under_way_is_the_last_and_is_saved_where_steps_are(
    runs: Runs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    save_freq: int,
    saved: bool,
) -> None:
    """Case B114. What comes while a step is saved is heard too: the next step may be an hour."""
    ask_to_stop(monkeypatch, method, 2)
    with pytest.raises(StoppedEarly) as stopped:
        runs.run(*FOUR, f"trainer.save_freq={save_freq}")
    folder = runs.folder / "global_step_2" if saved else None
    assert (stopped.value.step, stopped.value.saved) == (2, folder)
    assert [line["step"] for line in runs.metrics()] == [1, 2]
    assert folder is None or folder.is_dir()


def test_a_run_asked_to_stop_in_its_last_step_is_a_finished_one(
    runs: Runs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler must not queue it again."""
    ask_to_stop(monkeypatch, "step", 4)
    runs.run(*FOUR, "trainer.save_freq=1")
    assert runs.steps() == ["1", "2", "3", "4"]


def test_a_step_that_was_not_logged_does_not_count_as_saved(
    runs: Runs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else metrics.jsonl would lack a line for ever: the run goes on after it."""
    log = PPOTrainer.log

    def refused(trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        if trainer.global_step == 2:
            raise OSError("the disk of the metrics is full")
        log(trainer, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "log", refused)
        assert "the disk of the metrics is full" in runs.run(*FOUR, "trainer.save_freq=1")[-1]
    assert runs.steps() == ["1"]
    runs.run(*FOUR, "trainer.save_freq=1")
    assert [line["step"] for line in runs.metrics()] == [1, 2, 3, 4]
