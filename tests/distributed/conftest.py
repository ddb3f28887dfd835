"""One Ray for all tests of this folder: four logical CPUs and four declared GPUs that nothing here touches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_lite.distributed.cluster import RayCluster, Watchdog


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    watchdog = Watchdog(tmp_path_factory.mktemp("ray_logs"))
    cluster = RayCluster(num_slots=4, num_gpus=4, ray_dir=watchdog.ray_dir, timeout_s=60, object_store_bytes=200 << 20)
    try:
        cluster.wait()
        yield
    finally:
        cluster.close()
        watchdog.finish()
