"""Two and three nodes: Ray's cluster utilities start them as real processes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from verl_lite.distributed import cluster
from verl_lite.distributed.placement import PlacementError, ResourcePool
from verl_lite.distributed.process_group import RankContext
from verl_lite.distributed.worker_group import Limits, RoleSpec, WorkerError, spawn, spawn_rollout

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers can't import a test module

LIMITS = Limits(60, 60, 60)


class Worker:
    def __init__(self, context: RankContext) -> None:
        self.context = context

    def look(self) -> dict[str, Any]:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MINE")
        found = {name: os.environ.get(name) for name in names}
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "context": self.context, "sent": [p for p in sys.path if "_ray_pkg_" in p], **found}

    def add_up(self) -> float:
        import torch
        import torch.distributed as dist

        total = torch.tensor([self.context.rank + 1.0])
        dist.all_reduce(total)
        return float(total)

    def nap(self) -> None:
        time.sleep(120)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of two CPUs, and this process as the driver of a run on them.

    A process is in one Ray at a time: this file comes before those that use `ray_cluster`, in alphabetical order too.
    """
    assert not ray.is_initialized(), "run this file before those that use `ray_cluster`"
    watchdog = cluster.Watchdog(tmp_path_factory.mktemp("nodes"))
    started = Cluster(shutdown_at_exit=False)
    connection = None
    try:
        for _ in range(3):
            started.add_node(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
        connection = cluster.RayCluster(
            num_slots=4, ray_dir=watchdog.ray_dir, timeout_s=60, address=started.address,
            runtime_env={"env_vars": {"MINE": "7"}},
        )  # fmt: skip
        connection.wait()
        yield started
    finally:
        if connection is not None:
            connection.close()
        started.shutdown()
        watchdog.finish()


def pool_of(num_nodes: int, slots_per_node: int, **paths: str) -> ResourcePool:
    size = {"num_nodes": num_nodes, "slots_per_node": slots_per_node}
    return ResourcePool(**size, device="cpu", timeout_s=60, paths=paths)


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_ranks_are_packed_per_node_and_meet_on_the_network_they_share(num_nodes: int, nodes: Cluster) -> None:
    pool = pool_of(num_nodes, 2)
    try:
        group = spawn(pool, {"actor": RoleSpec(Worker)}, limits=LIMITS)["actor"]
        seen = group.call(Worker.look)
        at = [one["node"] for one in seen]
        assert at[0::2] == at[1::2] and len(set(at)) == num_nodes  # ranks 0 and 1 on one node, 2 and 3 on the next
        assert [one["context"].local_rank for one in seen] == [0, 1] * num_nodes
        assert {one["context"].local_world_size for one in seen} == {2}
        assert len({one["GLOO_SOCKET_IFNAME"] for one in seen}) == 1
        assert all(one["NCCL_SOCKET_IFNAME"] == one["GLOO_SOCKET_IFNAME"] for one in seen)
        ranks = 2 * num_nodes
        assert group.call(Worker.add_up) == [ranks * (ranks + 1) / 2] * ranks  # 1 + 2 + … + ranks
        group.close()
    finally:
        pool.close()


def test_code_and_environment_reach_the_nodes_and_replicas_stay_with_rank_0(nodes: Cluster) -> None:
    """Replicas on a CPU get the weights through rank 0's shared memory."""
    pool = pool_of(2, 1)
    try:
        rollout = spawn_rollout(pool, RoleSpec(Worker), limits=LIMITS, num_replicas=2)
        seen = rollout.call(Worker.look)
        assert {one["node"] for one in seen} == {pool.slots[0].node_id}
        assert {one["MINE"] for one in seen} == {"7"}
        for one in seen:  # beside what is installed here, which the nodes of a real cluster need not have
            assert [path for path in one["sent"] if (Path(path) / "verl_lite" / "main_ppo.py").is_file()]
        rollout.close()
    finally:
        pool.close()


def test_a_path_that_a_node_does_not_see_is_named(nodes: Cluster, tmp_path: Path) -> None:
    pool_of(2, 1, model=str(tmp_path)).close()
    with pytest.raises(PlacementError, match="model=/nowhere: not there on node"):
        pool_of(2, 1, model="/nowhere")


def test_a_dead_node_is_named_within_a_minute(nodes: Cluster) -> None:
    """Last: it takes a node away."""
    pool = pool_of(2, 2)
    group = spawn(pool, {"actor": RoleSpec(Worker)}, limits=LIMITS)["actor"]
    here = (nodes.head_node.node_id, ray.get_runtime_context().get_node_id())
    lost = next(slot.node_id for slot in pool.slots if slot.node_id not in here)
    pending = group.start_call(Worker.nap)
    [victim] = [node for node in nodes.worker_nodes if node.node_id == lost]
    nodes.remove_node(victim, allow_graceful=False)
    started = time.monotonic()
    with pytest.raises((WorkerError, cluster.RayDied)) as caught:
        pending.result()
    assert time.monotonic() - started < 60
    address = next(slot.node_address for slot in pool.slots if slot.node_id == lost)
    assert address in str(caught.value) and ("died" in str(caught.value))
    group.close()
    pool.close()
