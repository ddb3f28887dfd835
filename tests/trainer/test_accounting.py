"""Optimizer steps are counted against the plan: what was made, skipped and empty must add up, or the run stops."""

from __future__ import annotations

import types
from typing import Any

import pytest

from verl_lite.config import Config, TrainerConfig
from verl_lite.trainer.ppo import PPOTrainer
from verl_lite.workers.update import MiniBatchResult

DONE, SKIPPED, EMPTY = MiniBatchResult("done"), MiniBatchResult("skipped", float("nan")), MiniBatchResult("empty")


def trainer(*, planned: int, max_skipped: int = 10) -> Any:
    """A trainer of which only the counting is used."""
    made = PPOTrainer.__new__(PPOTrainer)
    made.config = Config(trainer=TrainerConfig(max_skipped_steps=max_skipped))
    made.global_step, made.skipped_in_a_row, made.first_skipped = 7, {"actor": 0, "critic": 0}, ""
    plan: Any = types.SimpleNamespace(actor=types.SimpleNamespace(optimizer_steps=planned), critic=None)
    made.plan = plan
    return made


def one_rank(*minis: MiniBatchResult) -> list[list[list[MiniBatchResult]]]:
    return [[list(minis)]]


def test_done_skipped_and_empty_steps_add_up_to_the_plan() -> None:
    metrics = trainer(planned=4).account("actor", one_rank(DONE, SKIPPED, EMPTY, DONE), 1e-6)
    assert (
        metrics["training/optimizer_steps"], metrics["training/skipped_steps"], metrics["training/empty_steps"]
    ) == (2, 1, 1)  # fmt: skip
    assert metrics["actor/lr"] == 1e-6


@pytest.mark.parametrize("made", [1, 3, 5])
def test_a_mini_batch_size_that_is_not_used_stops_the_run(made: int) -> None:
    """One update for the whole batch instead of four is the fault most reported of such systems."""
    with pytest.raises(RuntimeError, match=rf"step 7.*made {made} optimizer steps.*the plan says 4"):
        trainer(planned=4).account("actor", one_rank(*[DONE] * made), 1e-6)


def test_too_many_skipped_updates_in_a_row_stop_the_run_and_a_good_one_starts_the_count_anew() -> None:
    counting = trainer(planned=2, max_skipped=2)
    counting.account("actor", one_rank(SKIPPED, SKIPPED), 1e-6)
    counting.first_skipped = "step 6, actor: not finite: the loss; its rows are in run/nonfinite/step_6_actor.jsonl"
    with pytest.raises(RuntimeError, match="max_skipped_steps=2") as caught:
        counting.account("actor", one_rank(SKIPPED, SKIPPED), 1e-6)
    for words in (
        counting.first_skipped, "actor/grad_norm", "lower actor_rollout_ref.actor.optim.lr=1e-06",
        "a wider dtype than actor_rollout_ref.actor.fsdp_config.dtype=",
    ):  # fmt: skip
        assert words in str(caught.value)
    counting = trainer(planned=2, max_skipped=2)
    for _ in range(3):
        counting.account("actor", one_rank(SKIPPED, DONE), 1e-6)
