"""A short form of scripts/bench/soak.py: no process of a run grows from step to step, nor Ray's object store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "soak.py"
# 128 rows of up to 40 tokens: what one step sends lies in the object store, where a single reference kept would show.
SIZES = [
    "data.train_batch_size=8",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
]


def test_memory_is_level_from_step_to_step() -> None:
    """Case B118: references to batches that the driver keeps, and what workers and reward processes keep."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--engine", "hf", "--steps", "120", "--settled", "60", *SIZES],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("driver", "actor rank", "rollout actor", "reward worker", "raylet", "object store"):
        assert f"\n| {name}" in done.stdout, done.stdout
