"""A short form of scripts/chaos.py: the driver, a rank and the rollout actor are killed, and the run comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"


def test_a_run_that_is_killed_three_times_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--engine", "hf", "--kills", "3", "--seed", "1",
         "--targets", "driver,actor rank,rollout actor", "--out", str(tmp_path / "table.md")],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if " hf " in line]
    assert sorted(row[2] for row in rows) == ["actor rank", "driver", "rollout actor"]
    by_target = {row[2]: row for row in rows}
    assert by_target["driver"][5] == "ended, SIGKILL"
    assert by_target["actor rank"][5] == "ended, exit 1"
    assert by_target["rollout actor"][5] == "went on"
