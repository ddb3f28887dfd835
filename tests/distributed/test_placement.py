from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle

from verl_lite.distributed.placement import PlacementError, ResourcePool, Slot, replica_slots
from verl_lite.distributed.process_group import RankContext
from verl_lite.distributed.worker_group import Limits, RoleSpec, spawn, spawn_rollout

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers can't import a test module

LIMITS = Limits(start_s=60, step_s=60)


class Witness:
    """Tells what a worker sees of its place."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    def look(self) -> dict[str, Any]:
        granted = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return {"granted": granted, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "context": self.context}


def slots_of(*gpus_per_node: int) -> list[Slot]:
    """Slots as a pool orders them, without Ray."""
    return [
        Slot(0, f"node{node}", f"10.0.0.{node}", index, gpus, None, index, (str(index),))  # type: ignore[arg-type]
        for node, gpus in enumerate(gpus_per_node)
        for index in range(gpus)
    ]


def cpu_pool(num_nodes: int, slots_per_node: int, timeout_s: float = 30) -> ResourcePool:
    return ResourcePool(num_nodes=num_nodes, slots_per_node=slots_per_node, device="cpu", timeout_s=timeout_s)


@pytest.fixture(scope="module")
def gpu_pool(ray_cluster: None) -> Iterator[ResourcePool]:
    pool = ResourcePool(num_nodes=1, slots_per_node=4, device="cuda", timeout_s=60)
    yield pool
    pool.close()


def test_a_replica_takes_neighbouring_gpus_of_one_node() -> None:
    replicas = replica_slots(slots_of(4, 4), tensor_parallel_size=2)
    assert [[(s.node_id, s.local_index) for s in replica] for replica in replicas] == [
        [("node0", 0), ("node0", 1)],
        [("node0", 2), ("node0", 3)],
        [("node1", 0), ("node1", 1)],
        [("node1", 2), ("node1", 3)],
    ]


def test_on_cpu_there_is_one_replica_unless_more_are_asked_for() -> None:
    slots = [dataclasses.replace(slot, gpu_ids=()) for slot in slots_of(2)]
    assert [len(replica_slots(slots, 2, wanted)) for wanted in (None, 1, 3)] == [1, 1, 3]


def test_slots_are_counted_per_node_and_given_back(ray_cluster: None) -> None:
    for _ in range(2):  # the second pool finds what the first gave back
        pool = cpu_pool(num_nodes=2, slots_per_node=2)
        assert [(slot.index, slot.local_index, slot.slots_on_node) for slot in pool.slots] == [
            (0, 0, 4), (1, 1, 4), (2, 2, 4), (3, 3, 4)  # both "nodes" are this machine
        ]  # fmt: skip
        pool.close()


def test_a_cluster_that_is_too_small_says_what_fits(ray_cluster: None) -> None:
    with pytest.raises(PlacementError) as caught:
        ResourcePool(num_nodes=2, slots_per_node=8, device="cuda", timeout_s=60)
    message = str(caught.value)
    assert "trainer.nnodes=2 × trainer.n_gpus_per_node=8 slots of 1 CPU + 1 GPU" in message
    assert "127.0.0.1 with 4 CPU, 4 GPU" in message
    assert "trainer.nnodes=1 trainer.n_gpus_per_node=4" in message


def test_waiting_for_busy_slots_ends(ray_cluster: None) -> None:
    pool = cpu_pool(num_nodes=1, slots_per_node=3)
    try:
        with pytest.raises(TimeoutError, match=r"trainer.start_timeout_s=1 s; each node needs 2 × .*free.*'CPU': '1'"):
            cpu_pool(num_nodes=1, slots_per_node=2, timeout_s=1)
    finally:
        pool.close()


def test_trainers_hold_the_gpus_and_replicas_see_those_of_their_slots(gpu_pool: ResourcePool) -> None:
    trainer = spawn(gpu_pool, {"actor": RoleSpec(Witness)}, limits=LIMITS, process_group=False)["actor"]
    rollout = spawn_rollout(gpu_pool, RoleSpec(Witness), limits=LIMITS, tensor_parallel_size=2)
    try:
        trained = trainer.call(Witness.look)
        assert sorted(seen["visible"] for seen in trained) == ["0", "1", "2", "3"]
        assert [seen["granted"] for seen in trained] == [[seen["visible"]] for seen in trained]
        replicas = rollout.call(Witness.look)  # while the trainers hold all four GPUs
        assert [seen["granted"] for seen in replicas] == [[], []]
        assert [seen["visible"].split(",") for seen in replicas] == [
            [trained[0]["visible"], trained[1]["visible"]],
            [trained[2]["visible"], trained[3]["visible"]],
        ]
        assert [seen["context"].local_rank for seen in replicas] == [0, 1]
    finally:
        trainer.close()
        rollout.close()
