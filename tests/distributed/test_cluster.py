"""Whether Ray's daemons live, asked of the system; starting and ending Ray is in test_main_ppo.py."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_lite.distributed import cluster
from verl_lite.distributed.watchdog import shared_memory_of


def test_a_daemon_that_ended_is_noticed_whether_or_not_somebody_has_waited_for_it(monkeypatch: pytest.MonkeyPatch):
    daemon = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(cluster, "_daemons", {"raylet": daemon.pid})
    cluster.check_alive("step 1: gen")

    daemon.kill()
    deadline = time.monotonic() + 10
    while psutil.Process(daemon.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(cluster.RayDied, match=rf"Ray's raylet \(pid {daemon.pid}\) died during step 1: gen"):
        cluster.check_alive("step 1: gen")

    daemon.communicate()  # takes the exit code: the process is gone altogether
    with pytest.raises(cluster.RayDied):
        cluster.check_alive("step 1: gen")


def test_a_semaphore_is_found_though_it_was_mapped_under_another_name() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    path = Path("/dev/shm", f"sem.{semaphore._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    assert path.exists()
    assert path in shared_memory_of([os.getpid()])
    assert shared_memory_of([]) == set()


def test_local_and_nothing_mean_the_embedded_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert cluster.wanted_address(None) == "head:6379"
    assert cluster.wanted_address("other:6379") == "other:6379"
    assert cluster.wanted_address("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert cluster.wanted_address(None) is None


def test_the_drivers_code_goes_to_the_nodes_unless_the_job_has_sent_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LITE_RUN_ID", "7")
    package = str(Path(cluster.__file__).parents[1])
    env = cluster._runtime_env({"env_vars": {"MINE": "1"}, "py_modules": ["other"]})
    assert env == {"env_vars": {"MINE": "1", "VERL_LITE_RUN_ID": "7"}, "py_modules": ["other", package]}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"py_modules": ["gcs://x.zip"]}}')
    assert "py_modules" not in cluster._runtime_env({})
