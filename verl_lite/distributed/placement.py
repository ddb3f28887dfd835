"""Where processes go: one Ray bundle per slot, a slot being a GPU or, on CPU, a rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl_lite.distributed import cluster


class PlacementError(ValueError):
    """The cluster doesn't have the slots asked for."""


@dataclass(frozen=True)
class Slot:
    """One bundle: `index` counts all slots, `local_index` those of the same node. `gpu_ids` is empty on CPU."""

    index: int
    node_id: str
    node_address: str
    local_index: int
    slots_on_node: int
    group: PlacementGroup
    bundle: int
    gpu_ids: tuple[str, ...]

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Ray's way of saying: this actor in this slot."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


class ResourcePool:
    """`num_nodes` × `slots_per_node` slots held by this run; consecutive slots of a node stay together.

    Each node's slots are one strictly packed placement group, so none is ever split over two machines. Raises
    `PlacementError` when the cluster lacks them, or a node does not see one of `paths` (key → file or folder), and
    `TimeoutError` when they are there but busy for `timeout_s`.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        slots_per_node: int,
        device: str,
        timeout_s: float,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        self.device = device
        _check_cluster_has(bundle, num_nodes, slots_per_node)
        self._groups = [
            placement_group([dict(bundle) for _ in range(slots_per_node)], strategy="STRICT_PACK")
            for _ in range(num_nodes)
        ]
        self.slots: tuple[Slot, ...] = ()
        try:
            _wait_until_placed(self._groups, bundle, timeout_s)
            self.slots = _order_slots(self._groups, device, timeout_s)
            cluster.watch_nodes({slot.node_id: slot.node_address for slot in self.slots})
            self._check_paths(paths or {}, timeout_s)
        except BaseException:
            self.close()
            raise

    def _check_paths(self, paths: Mapping[str, str], timeout_s: float) -> None:
        node_of = {slot.node_id: slot.node_address for slot in self.slots}
        if len(node_of) == 1 and ray.get_runtime_context().get_node_id() in node_of:
            return
        look = ray.remote(num_cpus=0, max_retries=0)(_missing)
        asked = {
            node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(dict(paths))
            for node in node_of
        }
        for node, missing in zip(asked, ray.get(list(asked.values()), timeout=timeout_s), strict=True):
            if missing:
                what = ", ".join(f"{key}={path}" for key, path in missing.items())
                raise PlacementError(
                    f"{what}: not there on node {node_of[node]}. Put it on a file system that all nodes share, or at "
                    "the same place on each"
                )

    def close(self) -> None:
        """Give the slots back to the cluster."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


def replica_slots(
    slots: Sequence[Slot], tensor_parallel_size: int, num_replicas: int | None = None
) -> list[tuple[Slot, ...]]:
    """The slots of each rollout replica: `tensor_parallel_size` neighbours of one node.

    On GPUs there are as many replicas as the slots hold unless `num_replicas` says fewer. On CPU, where one is the
    default, a replica's threads are placed by core lists, so it takes no slot away and is named by one of its node's;
    all are on rank 0's node, where the weights lie in shared memory.
    """
    if not slots[0].gpu_ids:
        home = [slot for slot in slots if slot.node_id == slots[0].node_id]
        return [(home[i % len(home)],) for i in range(num_replicas or 1)]
    by_node: dict[str, list[Slot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node_id, []).append(slot)
    replicas = []
    for on_node in by_node.values():
        assert len(on_node) % tensor_parallel_size == 0, "the plan refuses an engine over two nodes"
        replicas += [tuple(on_node[i : i + tensor_parallel_size]) for i in range(0, len(on_node), tensor_parallel_size)]
    assert len(replicas) >= (num_replicas or 0), "the plan refuses more replicas than the GPUs hold"
    return replicas[:num_replicas]


def _check_cluster_has(bundle: Mapping[str, float], num_nodes: int, slots_per_node: int) -> None:
    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    slots = [int(min(has.get(name, 0) // amount for name, amount in bundle.items())) for _, has in nodes]
    if sum(on_node // slots_per_node for on_node in slots) >= num_nodes:
        return
    slot = " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    available = [f"{address} with {has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU" for address, has in nodes]
    if max(slots, default=0):
        most = max(slots)
        way_out = f"trainer.nnodes={slots.count(most)} trainer.n_gpus_per_node={most}"
    else:
        way_out = "trainer.device=cpu" if "GPU" in bundle else "a cluster with free CPUs"
    raise PlacementError(
        f"too few resources in the Ray cluster\n"
        f"  wanted:    trainer.nnodes={num_nodes} × trainer.n_gpus_per_node={slots_per_node} slots of {slot}\n"
        f"  available: {'; '.join(available) or 'no node'}\n"
        f"  fits:      {way_out}"
    )


def _wait_until_placed(groups: list[PlacementGroup], bundle: Mapping[str, float], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for group in groups:
        while not group.wait(timeout_seconds=1):  # seconds at a time: Ray's wait doesn't hear Ctrl-C
            cluster.check_alive("the placement of the slots")
            if time.monotonic() > deadline:
                free = {name: f"{amount:g}" for name, amount in ray.available_resources().items() if name in bundle}
                raise TimeoutError(
                    f"the slots of {len(groups) - groups.index(group)} of {len(groups)} nodes were not free within "
                    f"trainer.start_timeout_s={timeout_s:g} s; each node needs {len(group.bundle_specs)} × "
                    f"{dict(bundle)}, free in the whole cluster: {free}. Is another job running there (`ray status`)?"
                )


def _order_slots(groups: list[PlacementGroup], device: str, timeout_s: float) -> tuple[Slot, ...]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = [  # (node, group, bundle)
        (placement_group_table(group)["bundles_to_node_id"][bundle], number, bundle)
        for number, group in enumerate(groups)
        for bundle in range(len(group.bundle_specs))
    ]
    placed.sort(key=lambda place: (addresses[place[0]], *place))
    nodes = [node for node, _, _ in placed]
    slots = [
        Slot(
            index=index,
            node_id=node,
            node_address=addresses[node],
            local_index=nodes[:index].count(node),
            slots_on_node=nodes.count(node),
            group=groups[number],
            bundle=bundle,
            gpu_ids=(),
        )
        for index, (node, number, bundle) in enumerate(placed)
    ]
    if device == "cuda":
        slots = [replace(slot, gpu_ids=ids) for slot, ids in zip(slots, _gpu_ids(slots, timeout_s), strict=True)]
    return tuple(slots)


def _gpu_ids(slots: Sequence[Slot], timeout_s: float) -> list[tuple[str, ...]]:
    """Ask inside each bundle which GPU it holds: Ray tells nobody else."""
    probe = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_visible_gpus)
    asked = [probe.options(scheduling_strategy=slot.strategy).remote() for slot in slots]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    if late:
        raise TimeoutError(
            f"{len(late)} of {len(asked)} slots did not say within trainer.start_timeout_s={timeout_s:g} s which GPU "
            f"they have; the first is on node {slots[asked.index(late[0])].node_address}"
        )
    return ray.get(asked)


def _missing(paths: Mapping[str, str]) -> dict[str, str]:
    return {key: path for key, path in paths.items() if not Path(path).exists()}


def _visible_gpus() -> tuple[str, ...]:
    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])
