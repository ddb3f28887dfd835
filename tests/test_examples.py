"""The launch scripts in examples/: what they start, and what the plan says of their sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plan import CLASSIC

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))


def run(script: Path, *arguments: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan_of(name: str, *arguments: str, folder: Path) -> dict[str, Any]:
    script, entry = ROOT / "examples" / name, {"VERL_LITE_ENTRY": "verl_lite.plan", "PYTHON": sys.executable}
    plan: dict[str, Any] = json.loads(run(script, "--json", *arguments, folder=folder, **entry))
    return plan


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_starts_a_run_and_passes_its_arguments_on(script: Path, tmp_path: Path) -> None:
    words = run(script, "trainer.total_epochs=2", "a=b c", folder=tmp_path, PYTHON="echo").split()
    submitted = script.name == "ray_job_submit.sh"
    start = words.index("--") + 2 if submitted else 0  # after Ray's own arguments: -- python
    assert words[start : start + 2] == ["-m", "verl_lite.main_ppo"]
    assert words[-3:] == ["trainer.total_epochs=2", "a=b", "c"]


def test_the_grpo_script_has_exactly_the_classic_keys(tmp_path: Path) -> None:
    words = run(ROOT / "examples" / "grpo_8gpu.sh", folder=tmp_path, PYTHON="echo", DATA_DIR=".", MODEL="m").split()
    paths = {"data.train_files", "data.val_files", "actor_rollout_ref.model.path", "trainer.project_name",
             "trainer.experiment_name"}  # fmt: skip
    here = dict(word.split("=", 1) for word in words[2:])
    classic = dict(word.split("=", 1) for word in CLASSIC)
    assert here.keys() == classic.keys()
    assert {key: here[key] for key in here.keys() - paths} == {key: classic[key] for key in classic.keys() - paths}


def test_the_sizes_of_the_grpo_script(tmp_path: Path) -> None:
    plan = plan_of("grpo_8gpu.sh", folder=tmp_path)
    assert plan["sequences_per_step"] == 5120  # 1024 prompts · 5 responses
    assert (plan["mini_batch_prompts"], plan["mini_batch_sequences"]) == (256, 1280)  # 256 · 5
    assert plan["optimizer_steps_per_training_step"] == 4  # 5120 / 1280
    assert (plan["rows_per_rank"], plan["mini_batch_rows_per_rank"]) == (640, 160)  # 5120 / 8, 1280 / 8
    assert (plan["micro_batch_rows"], plan["gradient_accumulation_steps"]) == ([80, 80], 2)
    in_sequences = plan_of("grpo_8gpu.sh", "actor_rollout_ref.actor.ppo_mini_batch_unit=sequence", folder=tmp_path)
    assert in_sequences["optimizer_steps_per_training_step"] == 20  # 5120 / 256


def test_the_sizes_of_the_ppo_script(tmp_path: Path) -> None:
    plan = plan_of("ppo_8gpu.sh", folder=tmp_path)
    assert plan["optimizer_steps_per_training_step"] == 4  # 1024 / 256
    assert plan["critic"]["optimizer_steps_per_training_step"] == 4  # follows the actor
    assert (plan["micro_batch_max_tokens"], plan["critic"]["micro_batch_max_tokens"]) == (24576, 32768)
    assert (plan["mini_batch_rows_per_rank"], plan["micro_batch_rows"]) == (32, None)  # 256 / 8; cut by tokens
