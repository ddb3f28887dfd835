"""examples/slurm.sbatch with stand-ins for Slurm, Ray and the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples/slurm.sbatch"
COMMANDS = {
    "scontrol": 'case $1 in show) echo one;; *) echo "$*" >> "$LOG";; esac',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "ray": "exec sleep 60",
    "python": """
if [[ $1 == - ]]; then cat > /dev/null; exit; fi
echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*" >> "$LOG"; exit "$CODE"
""",
}


@pytest.mark.parametrize(("restarts", "addition"), [("0", ""), ("2", " trainer.resume_mode=auto")])
@pytest.mark.parametrize(("code", "queued"), [(75, ["requeue 7"]), (1, [])])
def test_a_job_that_was_queued_again_goes_on_from_what_it_has_saved(
    tmp_path: Path, restarts: str, addition: str, code: int, queued: list[str]
) -> None:
    """With trainer.resume_mode=disable it would make the same steps for ever."""
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "one", "SLURM_JOB_ID": "7"}
    more = {"SLURM_RESTART_COUNT": restarts, "VERL_LITE_BIN": str(tmp_path), "LOG": str(log), "CODE": str(code)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "trainer.resume_mode=disable"],
        env={**os.environ, **slurm, **more, "PATH": path}, capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == code
    address = "ray_kwargs.ray_init.address=10.0.0.1:20007"
    started = f"token 64 -m verl_lite.main_ppo {address} trainer.nnodes=1 trainer.resume_mode=disable{addition}"
    assert log.read_text().splitlines() == [started, *queued]
