"""Runs that go on with other settings than those they were saved with: what is taken over, said or refused."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_dead_keys import BASE, CHECKED, DAPO, FILTERED, PPO, A, M
from test_resume import Runs, halves, runs, workshop  # noqa: F401  (fixtures)

from verl_lite.plan import compose_plan
from verl_lite.trainer.checkpoints import read_checkpoint, resume_problems

THREE = ["trainer.save_freq=1", "trainer.total_training_steps=3"]


def go_on_from(step: int) -> list[str]:
    return [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path=checkpoints/verl_lite/default/global_step_{step}",
    ]


def refused(*overrides: str) -> list[str]:
    """What main_ppo says before anything loads."""
    composed, _ = compose_plan(overrides)
    return resume_problems(composed.config)


@pytest.mark.parametrize("base", [FILTERED, DAPO], ids=["filtered", "dapo"])
def test_filtered_groups_and_shaped_rewards_go_on_alike(runs: Runs, base: list[str]) -> None:  # noqa: F811
    whole, resumed = halves(runs, base)
    assert whole == resumed


def test_a_finished_run_ends_at_once_and_more_steps_continue_it(runs: Runs) -> None:  # noqa: F811
    runs.run(*BASE, *THREE)
    assert any("nothing left to do" in line and "step 3 of 3" in line for line in runs.run(*BASE, *THREE))
    lines = runs.run(*BASE, *THREE, "trainer.total_training_steps=4")
    assert any("step 3 of 4 is done" in line for line in lines)
    assert "changed since: trainer.total_training_steps 3 → 4" in lines  # and nothing of the critic, which is not there
    assert [line["step"] for line in runs.metrics()] == [1, 2, 3, 4]


def test_going_back_writes_the_steps_anew_and_the_next_run_follows(runs: Runs) -> None:  # noqa: F811
    """In metrics.jsonl the later lines count; tensorboard shows no others."""
    logger = "trainer.logger=[tensorboard]"
    runs.run(*BASE, *THREE, "trainer.total_training_steps=4", logger)
    lines = runs.run(*BASE, *THREE, *go_on_from(1), logger)
    assert any("step 1 of 3 is done" in line for line in lines)
    assert (runs.folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert runs.steps() == ["1", "2", "3", "4"]
    assert any(
        "global_step_3: step 3 of 4" in line for line in runs.run(*BASE, *THREE[:1], "trainer.total_training_steps=4")
    )
    assert [line["step"] for line in runs.metrics()] == [1, 2, 3, 4, 2, 3, 4]
    assert runs.metrics()[1:4] == runs.metrics()[4:]  # seeded: the same steps
    events = EventAccumulator(str(runs.workshop.folder / "outputs/verl_lite/default/tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("critic/score/mean")] == [1, 2, 3]


def test_a_validation_of_an_older_checkpoint_hides_nothing(runs: Runs) -> None:  # noqa: F811
    logger = "trainer.logger=[tensorboard]"
    runs.run(*CHECKED, *THREE, logger)
    lines = runs.run(*CHECKED, "trainer.val_only=True", *go_on_from(1), logger)
    assert any("at step 1" in line for line in lines), lines
    events = EventAccumulator(str(runs.workshop.folder / "outputs/verl_lite/default/tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("critic/score/mean")] == [1, 2, 3]
    assert runs.steps() == ["1", "2", "3"]


def test_weights_alone_go_on_with_a_new_optimizer(runs: Runs) -> None:  # noqa: F811
    runs.run(*BASE, *THREE, A + "checkpoint.save_contents=[model]")
    [problem] = refused(*BASE, *THREE)
    assert problem == (
        "actor_rollout_ref.actor.checkpoint.load_contents has extra, optimizer, but "
        f"{runs.folder / 'global_step_3'} holds model only; set it to [model]"
    )
    lines = runs.run(*BASE, *THREE, "trainer.total_training_steps=4", A + "checkpoint.load_contents=[model]")
    assert any("step 3 of 4 is done" in line for line in lines)
    state = json.loads((runs.folder / "global_step_4/trainer.json").read_text())
    assert state["contents"] == {"actor": ["model", "optimizer", "extra"]}


def test_without_weights_to_read_nothing_goes_on_and_a_copy_for_others_is_not_needed(
    runs: Runs,  # noqa: F811
) -> None:
    runs.run(*BASE, *THREE)
    [problem] = refused(*BASE, *THREE, A + "checkpoint.load_contents=[optimizer,extra]")
    assert "load_contents=['optimizer', 'extra'] has no model to go on from" in problem
    assert refused(*BASE, *THREE, A + "checkpoint.save_contents=[model,optimizer,extra,hf_model]") == []


def test_a_critic_goes_on_with_what_was_saved_of_it_or_not_at_all(runs: Runs) -> None:  # noqa: F811
    """Else its optimizer would start anew without a word."""
    runs.run(*PPO, *THREE, "critic.checkpoint.save_contents=[model]")
    [problem] = refused(*PPO, *THREE)
    assert problem == (
        "critic.checkpoint.load_contents has extra, optimizer, but "
        f"{runs.folder / 'global_step_3'} holds model only; set it to [model]"
    )


def test_a_path_that_is_near_a_checkpoint_is_answered_with_it(runs: Runs) -> None:  # noqa: F811
    runs.run(*BASE, *THREE)
    path = "trainer.resume_from_path="
    for near, step in (
        (runs.folder, 3),
        (runs.folder / "global_step_1" / "actor", 1),
        (runs.folder / "global_step_9", 3),
    ):
        [problem] = refused(*BASE, *THREE, "trainer.resume_mode=resume_path", f"{path}{near}")
        assert problem == (
            f"{path}{near} has no trainer.json: it is not a checkpoint of verl_lite, or not all of one; complete is "
            f"{path}{runs.folder / f'global_step_{step}'}"
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.train_batch_size=2"], "data.train_batch_size: was 4, is 2, and the run goes on from"),
        ([A + "ppo_mini_batch_size=4", "algorithm.adv_estimator=gae"], "critic.enable: was False, is True"),
        ([M + "override_config.num_hidden_layers=2"], "has num_hidden_layers=2, the model in"),
    ],
)
def test_what_would_be_another_run_is_refused_before_anything_loads(
    runs: Runs,  # noqa: F811
    changes: list[str],
    message: str,
) -> None:
    """NVIDIA-NeMo/RL#2519 (B089): another batch size."""
    runs.run(*BASE, *THREE)
    [problem] = refused(*BASE, *THREE, *changes)
    assert message in problem and problem.endswith("give the same value, or trainer.resume_mode=disable")


@pytest.mark.parametrize(
    ("changes", "message"),
    [(["data.train_files=other.jsonl"], "other prompts"), (["data.seed=2"], "seed was 1, is 2")],
)
def test_other_data_or_another_order_is_refused(runs: Runs, changes: list[str], message: str) -> None:  # noqa: F811
    """NVIDIA-NeMo/RL#2519 (B089): no silent skip, no StopIteration."""
    runs.run(*BASE, *THREE)
    error = runs.run(*BASE, *THREE, "trainer.total_training_steps=4", *changes)[-1]
    assert error.startswith("ValueError") and message in error and "trainer.resume_mode=disable" in error


def test_each_role_keeps_as_many_as_asked_and_the_newest_is_whole(runs: Runs) -> None:  # noqa: F811
    keep = ["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=3"]
    runs.run(*PPO, *THREE, "trainer.total_training_steps=4", *keep)
    parts = {
        str(path.relative_to(runs.folder)) for role in ("actor", "critic") for path in runs.folder.glob(f"*/{role}")
    }
    assert parts == {"global_step_4/actor", *(f"global_step_{step}/critic" for step in (2, 3, 4))}
    [problem] = refused(*PPO, *THREE, *go_on_from(3))
    assert "global_step_3 lacks actor/" in problem and problem.endswith("global_step_4")
    assert ", and all else of it (trainer.max_actor_ckpt_to_keep?);" in problem
    state = read_checkpoint(runs.folder / "global_step_3", "critic").state  # as for an export
    assert state["step"] == 3
    next((runs.folder / "global_step_3/critic/model").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="lacks critic/model/"):
        read_checkpoint(runs.folder / "global_step_3", "critic")
    assert any("step 4 of 5" in line for line in runs.run(*PPO, *THREE, "trainer.total_training_steps=5", *keep))
