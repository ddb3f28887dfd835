"""PPO with a critic learns: the recipe of configs/quickstart_ppo.yaml as people run it, from the preparation on.

The accuracy alone would not show it: it also rises with a critic that explains nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VALIDATION = "val-core/verl_lite/addition/reward/mean@1"
WINDOW = 10  # steps averaged at the end (5 at the start): one step's explained variance moves by ±0.04


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The lines of metrics.jsonl: the validation before the first step, then 40 steps."""
    folder = tmp_path_factory.mktemp("ppo")
    environment = dict(os.environ, VERL_LITE_HOME=str(folder / "home"))
    for args in (
        [str(ROOT / "scripts" / "prepare_quickstart.py"), "--critic"],
        ["-m", "verl_lite.main_ppo", "--config-name", "quickstart_ppo", "trainer.test_freq=40"],
    ):
        done = subprocess.run(
            [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "outputs" / "quickstart" / "ppo" / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, float]] = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == list(range(41))
    return steps


def mean(steps: list[dict[str, float]], name: str) -> float:
    return sum(step[name] for step in steps) / len(steps)


def test_the_accuracy_rises_by_0_15_in_40_steps(steps: list[dict[str, float]]) -> None:
    assert steps[-1][VALIDATION] - steps[0][VALIDATION] >= 0.15


def test_the_critic_comes_to_explain_the_returns(steps: list[dict[str, float]]) -> None:
    """Its head starts at 0, and every batch's values are of before the update with that batch."""
    name = "critic/vf_explained_var"
    assert steps[1][name] == pytest.approx(0, abs=1e-6)
    assert mean(steps[-WINDOW:], name) > 0.3


def test_the_value_loss_falls(steps: list[dict[str, float]]) -> None:
    assert mean(steps[-WINDOW:], "critic/vf_loss") < mean(steps[1:6], "critic/vf_loss")
