"""The tiny job on two nodes, by the cluster's address and through Ray's job server: the numbers of one node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from tiny import addition_rows, tiny_model, write_parquet

from verl_lite.distributed.process_group import free_port
from verl_lite.distributed.watchdog import RUN_ID

ROOT = Path(__file__).parents[2]
JOB = [
    sys.executable, "-m", "verl_lite.main_ppo",
    "data.train_files=train.parquet", "data.train_batch_size=8", "data.max_prompt_length=8",
    "data.max_response_length=6", "actor_rollout_ref.model.path=./model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.seed=1", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2",
    "trainer.device=cpu",
]  # fmt: skip
SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "actor/entropy", "training/rollout_probs_diff_max")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    tiny_model(folder / "job" / "model")
    write_parquet(addition_rows(40), folder / "job" / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of two CPUs; the head has a job server.

    Each keeps its files in a folder of its own, as machines do: in a shared one, the second node to need a job's
    working folder puts a new copy in the place of that in which the job already runs.
    """
    started = Cluster(shutdown_at_exit=False)
    second = tempfile.mkdtemp(prefix="vl-", dir="/tmp")  # a socket's path is limited to 107 bytes
    try:
        server = {"include_dashboard": True, "dashboard_port": free_port(), "dashboard_host": "127.0.0.1"}
        started.add_node(num_cpus=2, object_store_memory=100 << 20, **server)
        started.add_node(num_cpus=2, object_store_memory=100 << 20, temp_dir=second)
        yield started
    finally:
        started.shutdown()
        shutil.rmtree(second)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", RUN_ID)}
    return {**kept, "PYTHONPATH": f"{ROOT}:{kept.get('PYTHONPATH', '')}", **more}


def run(command: list[str], folder: Path, name: str, **more: str) -> list[dict[str, float]]:
    """The steps' metrics of a job that ended with 0."""
    done = subprocess.run(
        [*command, f"trainer.run_dir={folder / name}"], cwd=folder / "job", env=environment(**more), timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_node(folder: Path) -> list[dict[str, float]]:
    return run([*JOB, "trainer.n_gpus_per_node=2"], folder, "one")


TWO_NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


def assert_same(steps: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(steps) == len(expected) == 2
    for step, other in zip(steps, expected, strict=True):
        assert {name: step[name] for name in SAME} == {name: other[name] for name in SAME}


def test_two_nodes_by_address_give_the_metrics_of_one(
    folder: Path, nodes: Cluster, one_node: list[dict[str, float]]
) -> None:
    assert_same(run([*JOB, *TWO_NODES], folder, "address", RAY_ADDRESS=nodes.address), one_node)
    assert "rank0" in " ".join(os.listdir(folder / "address" / "logs"))


def test_a_submitted_job_on_two_nodes_gives_the_metrics_of_one(
    folder: Path, nodes: Cluster, one_node: list[dict[str, float]]
) -> None:
    """Case B109: the job starts in Ray's copy of the working folder, and its relative paths are of that."""
    server = f"http://{nodes.webui_url}"
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", server, "--working-dir", "."]
    assert_same(run([*submit, "--", *JOB, *TWO_NODES], folder, "submitted"), one_node)
