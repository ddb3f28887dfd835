from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle

from verl_lite.distributed import cluster
from verl_lite.distributed.placement import ResourcePool
from verl_lite.distributed.process_group import RankContext
from verl_lite.distributed.worker_group import (
    Limits,
    RoleSpec,
    WorkerError,
    WorkerGroup,
    WorkerTimeout,
    phase,
    spawn,
    spawn_rollout,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers can't import a test module


class Worker:
    def __init__(self, context: RankContext, *, offset: int = 0, fails_on: int | None = None) -> None:
        self.rank = context.rank
        self.offset = offset
        if fails_on == self.rank:
            raise ValueError("no such model")

    def add(self, value: int, *, factor: int = 1) -> int:
        return (value + self.offset) * factor

    def identity(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def environment(self) -> tuple[int, str, str]:
        return os.nice(0), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"]

    def zeros(self, rows: int) -> np.ndarray:
        return np.zeros(rows)

    def is_shared(self, array: np.ndarray) -> bool:
        return not array.flags.writeable  # mapped from the object store, so not a copy

    def nap(self, seconds: float, rank: int | None = None) -> float:
        if rank in (None, self.rank):
            time.sleep(seconds)
        return time.time()

    def raise_on(self, rank: int) -> None:
        if self.rank == rank:
            print("before the error", flush=True)
            raise KeyError("lost_key")
        time.sleep(60)

    def die_on(self, rank: int, seconds: float = 60) -> str:
        if self.rank == rank:
            print("my last words", flush=True)
            os.kill(os.getpid(), 9)
        time.sleep(seconds)
        return "alive"

    def meet(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def die_in_a_collective(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if self.rank == rank:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1))


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[ResourcePool]:
    """For the tests that start workers of their own and end them."""
    pool = ResourcePool(num_nodes=1, slots_per_node=2, device="cpu", timeout_s=60)
    yield pool
    pool.close()


def start(pool: ResourcePool, *, process_group: bool = False, **kwargs: Any) -> WorkerGroup[Worker]:
    roles = {"actor": RoleSpec(Worker, kwargs)}
    return spawn(pool, roles, limits=Limits(60, 60, 60), process_group=process_group)["actor"]


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[dict[str, WorkerGroup[Worker]]]:
    """Three roles on the same two ranks, for the tests that break nothing."""
    pool = ResourcePool(num_nodes=1, slots_per_node=2, device="cpu", timeout_s=60)
    roles = {
        "actor": RoleSpec(Worker, {"offset": 10}),
        "ref": RoleSpec(Worker, {"offset": 20}),
        "parallel": RoleSpec(Worker, {"offset": 0}, sequence_parallel_size=2),
    }
    groups = spawn(pool, roles, limits=Limits(60, 60, 60), process_group=False)
    yield groups
    groups["actor"].close()
    pool.close()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_call_gives_one_result_per_rank_in_order(groups: dict[str, WorkerGroup[Worker]]) -> None:
    assert groups["actor"].call(Worker.add, 1, factor=2) == [22, 22]  # (1 + 10) · 2
    assert [rank for rank, _ in groups["actor"].call(Worker.identity)] == [0, 1]


def test_map_gives_each_rank_its_shard_and_all_the_same_keywords(groups: dict[str, WorkerGroup[Worker]]) -> None:
    assert groups["actor"].map(Worker.add, [1, 2], factor=3) == [33, 36]  # (1 + 10) · 3, (2 + 10) · 3


def test_ranks_of_one_sequence_parallel_group_get_the_same_shard(groups: dict[str, WorkerGroup[Worker]]) -> None:
    assert groups["parallel"].dp_size == 1
    assert groups["parallel"].map(Worker.add, [5]) == [5]


def test_a_wrong_number_of_shards_is_refused(groups: dict[str, WorkerGroup[Worker]]) -> None:
    with pytest.raises(ValueError, match="actor: 3 shards for 2 data-parallel ranks"):
        groups["actor"].map(Worker.add, [1, 2, 3])


def test_rebuilt_workers_take_the_place_of_the_old_ones_in_the_same_processes(pool: ResourcePool) -> None:
    group = start(pool, offset=10)
    before = group.call(Worker.identity)
    group.rebuild(offset=20)
    assert group.call(Worker.add, 1) == [21, 21]
    assert group.call(Worker.identity) == before
    group.close()


def test_a_method_of_another_class_is_refused(groups: dict[str, WorkerGroup[Worker]]) -> None:
    with pytest.raises(TypeError, match="dict.keys is not a method of Worker"):
        groups["actor"].call(dict.keys)  # type: ignore[arg-type]


def test_roles_of_a_slot_share_one_process(groups: dict[str, WorkerGroup[Worker]]) -> None:
    pids = {role: [pid for _, pid in group.call(Worker.identity)] for role, group in groups.items()}
    assert pids["actor"] == pids["ref"] == pids["parallel"]
    assert groups["ref"].call(Worker.add, 0) == [20, 20]


def test_arrays_cross_without_a_copy(groups: dict[str, WorkerGroup[Worker]]) -> None:
    assert groups["actor"].call(Worker.is_shared, np.zeros(100_000)) == [True, True]
    assert not groups["actor"].call(Worker.zeros, 100_000)[0].flags.writeable


def test_a_started_call_runs_while_the_driver_does_other_things(groups: dict[str, WorkerGroup[Worker]]) -> None:
    pending = groups["actor"].start_call(Worker.nap, 0.2)
    time.sleep(1.0)
    asked = time.time()
    assert max(pending.result()) < asked


def test_workers_share_the_cores_out_and_do_not_spin(groups: dict[str, WorkerGroup[Worker]]) -> None:
    threads = str(max(1, cluster.num_cores() // 2))  # two slots on this machine
    assert groups["actor"].call(Worker.environment) == [(os.nice(0), threads, "PASSIVE")] * 2


def test_workers_live_as_long_as_a_view_on_them(pool: ResourcePool) -> None:
    limits = Limits(60, 60, 60)
    groups = spawn(pool, {"actor": RoleSpec(Worker), "ref": RoleSpec(Worker)}, limits=limits, process_group=False)
    ref = groups.pop("ref")
    del groups
    gc.collect()
    assert ref.call(Worker.add, 3) == [3, 3]
    pids = [pid for _, pid in ref.call(Worker.identity)]
    ref.close()
    assert all(gone(pid) for pid in pids)


def test_an_exception_arrives_with_role_rank_phase_and_its_own_traceback(pool: ResourcePool) -> None:
    group = start(pool)
    pids = [pid for _, pid in group.call(Worker.identity)]
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught, phase("step 3: update actor"):
        group.call(Worker.raise_on, 1)
    error = caught.value
    assert (error.role, error.rank, error.pid, error.phase) == ("actor", 1, pids[1], "step 3: update actor")
    assert 'raise KeyError("lost_key")' in str(error)
    assert "_guard" not in str(error)  # only the worker's own frames
    assert all(gone(pid) for pid in pids)  # rank 0 would have slept for a minute
    assert time.monotonic() - started < 10


def test_a_killed_worker_is_reported_with_the_end_of_its_log(pool: ResourcePool, tmp_path: Path) -> None:
    roles = {"critic": RoleSpec(Worker)}
    group = spawn(pool, roles, limits=Limits(60, 60, 60), log_dir=tmp_path, process_group=False)["critic"]
    group.wait_ready()
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"critic rank 0 died in Worker.die_on (?s:.*)my last words"):
        group.call(Worker.die_on, 0)
    assert time.monotonic() - started < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_rank0.log", "train_rank1.log"]


def test_a_death_in_a_collective_is_blamed_on_the_dead_rank(pool: ResourcePool) -> None:
    group = start(pool, process_group=True)
    with pytest.raises(WorkerError) as caught:
        group.call(Worker.die_in_a_collective, 1)
    assert caught.value.rank == 1  # rank 0 raises too: the connection to its peer is closed
    assert "rank 0 failed too" in str(caught.value)


def test_a_constructor_that_raises_is_reported_by_the_first_wait(pool: ResourcePool) -> None:
    group = start(pool, fails_on=1)
    with pytest.raises(WorkerError, match=r"actor rank 1 raised ValueError in start (?s:.*)no such model"):
        group.wait_ready()


def test_a_late_worker_is_named_with_the_line_it_is_at(pool: ResourcePool, tmp_path: Path) -> None:
    limits = Limits(60, 1.0, 60)
    group = spawn(pool, {"actor": RoleSpec(Worker)}, limits=limits, log_dir=tmp_path, process_group=False)["actor"]
    with pytest.raises(WorkerTimeout) as caught:
        group.call(Worker.nap, 30, rank=1)
    message = str(caught.value)
    assert "did not finish within trainer.step_timeout_s=1 s" in message
    assert "late: rank 1; done: 0" in message
    assert "in nap" in message  # where rank 1 stands


def test_a_stopped_worker_is_named_as_such(pool: ResourcePool) -> None:
    group = start(pool)
    group._hosts.limits = Limits(60, 1.0, 60)
    pids = [pid for _, pid in group.call(Worker.identity)]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"late: rank 1 \(stopped, as by SIGSTOP: 1\); done: 0"):
        group.call(Worker.add, 1)
    assert gone(pids[0])
    os.kill(pids[1], signal.SIGKILL)


def test_a_collective_that_runs_out_of_time_names_the_rank_it_waited_for(pool: ResourcePool) -> None:
    group = spawn(pool, {"actor": RoleSpec(Worker)}, limits=Limits(60, 60, 2))["actor"]
    pids = [pid for _, pid in group.call(Worker.identity)]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"late: rank 1 \(stopped, as by SIGSTOP: 1\), which it waited for in a coll"):
        group.call(Worker.meet)
    assert gone(pids[0])
    os.kill(pids[1], signal.SIGKILL)


def test_the_log_up_to_the_traceback_stands_below_it(pool: ResourcePool, tmp_path: Path) -> None:
    roles = {"actor": RoleSpec(Worker)}
    group = spawn(pool, roles, limits=Limits(60, 60, 60), log_dir=tmp_path, process_group=False)["actor"]
    with pytest.raises(WorkerError) as caught:
        group.call(Worker.raise_on, 0)
    traceback, log = str(caught.value).split("last lines of")
    assert traceback.count("lost_key") == 2  # the line of code, and the message
    assert "lost_key" not in log and "before the error" in log


def test_a_dead_rank_is_spared_and_replaced_where_the_others_do_not_need_it(pool: ResourcePool) -> None:
    limits = Limits(60, 60, 60)
    group = spawn_rollout(pool, RoleSpec(Worker, {"offset": 10}), limits=limits, num_replicas=2)
    before = group.call(Worker.identity)
    outcomes = group.start_call(Worker.die_on, 1, seconds=2).outcomes(spared=1)
    assert outcomes[0] == "alive"  # it was waited for
    assert isinstance(outcomes[1], WorkerError) and outcomes[1].died and outcomes[1].rank == 1
    group.only([1]).respawn()
    assert group.map(Worker.add, [1, 2]) == [11, 12]  # offset 10
    after = group.call(Worker.identity)
    assert after[0] == before[0] and after[1][0] == 1 and after[1] != before[1]
    with pytest.raises(WorkerError, match="rollout rank 0 died"):
        group.start_call(Worker.die_on, 0).outcomes(spared=0)
    group.close()


def test_an_error_is_not_spared_as_a_death_is(pool: ResourcePool) -> None:
    group = spawn_rollout(pool, RoleSpec(Worker), limits=Limits(60, 60, 60), num_replicas=2)
    with pytest.raises(WorkerError, match="rollout rank 1 raised KeyError") as caught:
        group.start_call(Worker.raise_on, 1).outcomes(spared=2)
    assert not caught.value.died
    group.close()


def test_importing_the_module_does_not_load_torch() -> None:
    code = "import sys, verl_lite.distributed.worker_group; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
