"""Fixtures shared by all tests. Thread counts are set before torch loads: many processes on few cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from tiny import tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Qwen2 with tied embeddings and the character tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests that use it in this process: four logical CPUs, four declared GPUs that nothing touches."""
    from verl_lite.distributed.cluster import RayCluster, Watchdog

    watchdog = Watchdog(tmp_path_factory.mktemp("ray_logs"))
    cluster = RayCluster(num_slots=4, num_gpus=4, ray_dir=watchdog.ray_dir, timeout_s=60, object_store_bytes=200 << 20)
    try:
        cluster.wait()
        yield
    finally:
        cluster.close()
        watchdog.finish()
