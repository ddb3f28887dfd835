"""Whole runs in one process (`Workshop`): what goes on from a checkpoint ends where an uninterrupted run does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_dead_keys import ADAPTIVE, BASE, CHECKED, KL, PPO, Workshop, open_workshop

SAVING = ["trainer.save_freq=1", "trainer.total_training_steps=4"]


class Runs:
    """Command lines run one after the other in a folder; each leaves its files for the next."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.folder = workshop.folder / "checkpoints/verl_lite/default"

    def run(self, *overrides: str) -> list[str]:
        """The lines it printed; an error is one of them."""
        self.workshop.events.clear()
        seen = self.workshop.run(overrides, keep=True)
        return [*(line for line in seen["lines"] if line.strip()), *[seen["error"]] * bool(seen["error"])]

    def steps(self) -> list[str]:
        return sorted(path.name.removeprefix("global_step_") for path in self.folder.glob("global_step_*"))

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, without times and memory."""
        lines = (self.workshop.folder / "outputs/verl_lite/default/metrics.jsonl").read_text().splitlines()
        skipped = ("time", "timing", "perf/", "reward/p99_s")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(skipped)} for line in lines]

    def tensors(self, step: int) -> dict[str, Any]:
        """Every tensor of a checkpoint as bytes, and the driver's state."""
        folder = self.folder / f"global_step_{step}"
        found: dict[str, Any] = {
            f"{path.relative_to(folder)}:{name}": tensor.numpy().tobytes()
            for path in folder.rglob("*.safetensors")
            for name, tensor in load_file(path).items()
        }
        state = json.loads((folder / "trainer.json").read_text())
        kept = ("step", "sampler", "data", "kl_controller", "skipped_in_a_row", "best")
        return found | {name: state[name] for name in kept}

    def clear(self) -> None:
        shutil.rmtree(self.workshop.folder / "checkpoints", ignore_errors=True)
        shutil.rmtree(self.workshop.folder / "outputs", ignore_errors=True)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("resume")) as workshop:
        yield workshop


@pytest.fixture
def runs(workshop: Workshop) -> Iterator[Runs]:
    runs = Runs(workshop)
    runs.clear()
    yield runs
    runs.clear()


def halves(runs: Runs, base: Sequence[str]) -> tuple[Any, Any]:
    """(metrics, tensors of step 4) of 4 steps at once and of 2 + resume + 2."""
    runs.run(*base, *SAVING)
    whole = runs.metrics(), runs.tensors(4)
    shutil.rmtree(runs.folder / "global_step_3")
    shutil.rmtree(runs.folder / "global_step_4")
    (runs.folder / "latest_checkpointed_iteration.txt").write_text("2")
    path = Path(runs.workshop.folder / "outputs/verl_lite/default/metrics.jsonl")
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-2]))
    lines = runs.run(*base, *SAVING)
    assert any("step 2 of 4 is done" in line for line in lines), lines
    return whole, (runs.metrics(), runs.tensors(4))


RECIPES = {
    "grpo": BASE,
    "kl_loss": KL,
    "ppo_adaptive_kl": ADAPTIVE,
    "unseeded": [*BASE, "actor_rollout_ref.rollout.seed=null"],  # this engine draws from its process's random state
    "critic_warmup": [*PPO, "trainer.critic_warmup=3"],  # the actor's first step is the last
    "validated": [*CHECKED, "trainer.test_freq=2"],  # before step 1 and after 2 and 4, all of them kept
}


@pytest.mark.parametrize("base", RECIPES.values(), ids=RECIPES)
def test_two_steps_resumed_for_two_more_are_four(runs: Runs, base: list[str]) -> None:
    """verl-project/verl#5725 (B079): of 8 prompts 4 a step, an epoch ends exactly where the run is resumed."""
    (metrics, tensors), (resumed_metrics, resumed_tensors) = halves(runs, base)
    assert metrics == resumed_metrics
    assert tensors == resumed_tensors


def test_skipped_updates_are_counted_on(runs: Runs) -> None:
    """Else a run that is stopped again and again never reaches trainer.max_skipped_steps."""
    warming = [*PPO, "trainer.critic_warmup=3", "trainer.save_freq=1"]
    runs.run(*warming, "trainer.total_training_steps=1")
    file = runs.folder / "global_step_1/trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"skipped_in_a_row": {"actor": 7, "critic": 0}}))
    runs.run(*warming, "trainer.total_training_steps=2")
    assert runs.tensors(2)["skipped_in_a_row"]["actor"] == 7  # no update of the actor was made that could end the row
