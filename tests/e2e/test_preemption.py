"""Asked to stop in mid-step, as schedulers ask: what is saved, and that the run goes on as if undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import addition_rows, tiny_model, write_parquet
from training import everything_in

from verl_lite.distributed.watchdog import RUN_ID

ROOT = Path(__file__).parents[2]
STEPS = 6
JOB = [
    "data.train_files=train.parquet", "data.train_batch_size=8", "data.max_prompt_length=8",
    "data.max_response_length=6", "actor_rollout_ref.model.path=./model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.seed=1", "algorithm.adv_estimator=grpo", f"trainer.total_training_steps={STEPS}",
    "trainer.device=cpu", "trainer.save_freq=100", "trainer.logger=[console]",
]  # fmt: skip
COMMAND = [sys.executable, "-m", "verl_lite.main_ppo", *JOB, "trainer.n_gpus_per_node=2"]
NEVER_THE_SAME = ("time", "timing", "perf/", "reward/p99_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preemption")
    tiny_model(folder / "model")
    write_parquet(addition_rows(40), folder / "train.parquet")
    return folder


def start(command: list[str], folder: Path, name: str, **more: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", RUN_ID)}
    return subprocess.Popen(
        [*command, f"trainer.run_dir={name}", f"trainer.default_local_dir={name}/checkpoints"], cwd=folder, text=True,
        env={**kept, "PYTHONPATH": str(ROOT), **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], code: int) -> str:
    output = process.communicate(timeout=200)[0]
    assert process.returncode == code, output
    return output


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError("".join(seen))


def steps(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of each step, without times and memory."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(NEVER_THE_SAME)} for line in lines]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[dict[str, float]]:
    finished(start(COMMAND, folder, "undisturbed"), 0)
    return steps(folder, "undisturbed")


def test_sigterm_in_mid_step_saves_and_the_same_command_ends_as_if_undisturbed(
    folder: Path, undisturbed: list[dict[str, float]]
) -> None:
    first = start(COMMAND, folder, "disturbed")
    read_until(first, "step 1/")
    first.send_signal(signal.SIGTERM)
    assert "the same command goes on from there" in finished(first, 75)
    done = len(steps(folder, "disturbed"))
    assert 1 < done < STEPS  # the step under way was finished
    assert (folder / "disturbed/checkpoints/latest_checkpointed_iteration.txt").read_text() == str(done)
    finished(start(COMMAND, folder, "disturbed"), 0)
    assert len(undisturbed) == STEPS and steps(folder, "disturbed") == undisturbed
    wanted, found = (
        everything_in(folder / f"{name}/checkpoints/global_step_{STEPS}") for name in ("undisturbed", "disturbed")
    )
    assert wanted.keys() == found.keys() and [n for n in wanted if ":" in n and wanted[n] != found[n]] == []
