"""The driver's hands: groups of workers in Ray actors, called by method object.

One actor process per slot, the *host*, holds the workers of all training roles (actor, ref, critic, …): one torch, one
process group and one CUDA context per slot. A rollout replica has a host of its own. `WorkerGroup[W]` is the view on
one role of some hosts; a worker class is plain Python and never sees Ray.

Every wait ends: with the result, with `WorkerError` when a worker raises or its process dies, with `WorkerTimeout` that
says who is late. In the first two cases the peers are killed, so that nobody stays in a collective.

This module imports no torch: a host sets its environment (threads, GPUs) before the first import that needs it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_lite.distributed import cluster
from verl_lite.distributed.placement import ResourcePool, Slot, replica_slots
from verl_lite.distributed.process_group import RankContext, bind_listener, init_process_group

logger = logging.getLogger(__name__)

W = TypeVar("W")
R = TypeVar("R")
P = ParamSpec("P")

POLL_S = 1.0  # between two looks at whether Ray itself is alive
PEERS_S = 3.0  # how long the other ranks may add their own errors to the first one
LOG_LINES = 20

_phase: ContextVar[str] = ContextVar("phase", default="")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Errors inside say that they happened in `name`, e.g. `"step 3: update actor"`."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


class WorkerError(RuntimeError):
    """A worker raised or died. `details` holds the worker's own traceback, or the last lines of its log."""

    def __init__(self, what: str, *, role: str, rank: int, node: str, pid: int, phase: str, details: str) -> None:
        self.role, self.rank, self.node, self.pid, self.phase, self.details = role, rank, node, pid, phase, details
        super().__init__(f"{role} rank {rank} {what} in {phase} (node {node}, pid {pid})\n{details}".rstrip())


class WorkerTimeout(WorkerError):
    """A worker did not answer in time."""


@dataclass(frozen=True)
class RoleSpec(Generic[W]):
    """A worker class and its arguments after the `RankContext`.

    The ranks of one sequence-parallel group get the same shard from `WorkerGroup.map`, which takes and returns one
    entry per data-parallel rank.
    """

    cls: type[W]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    sequence_parallel_size: int = 1


@dataclass(frozen=True)
class Limits:
    """Seconds that things may take."""

    start_s: float = 600  # trainer.start_timeout_s: from the request until a worker is ready
    step_s: float = 3600  # trainer.step_timeout_s: one call
    collective_s: float = 1800  # trainer.collective_timeout_s: one collective


@dataclass(frozen=True)
class _Failure:
    """What a host returns in place of a result."""

    kind: str
    message: str
    traceback: str

    @property
    def lost_a_peer(self) -> bool:
        """Whether this looks like the echo of another rank's end."""
        return any(sign in self.message for sign in ("onnection closed by peer", "onnection reset", "ncclRemoteError"))


class _Host:
    """The actor of one slot. Runs in the worker process; everything it raises comes back as a `_Failure`."""

    def __init__(self, env: Mapping[str, str], sharers: int, log_path: str | None) -> None:
        """sharers: hosts of this kind on the node, which share its cores out."""
        # More threads than cores, waiting actively, make a step up to 50 times slower. Counted here: the node may have
        # other cores than the driver's, and this process may be kept to some of them.
        threads = str(max(1, cluster.num_cores() // sharers))
        os.environ.update(env, OMP_NUM_THREADS=threads, OMP_WAIT_POLICY="PASSIVE")
        if log_path is not None:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        faulthandler.register(signal.SIGUSR1, file=2)  # the driver asks a late rank where it stands
        self.context = RankContext(0, 1)
        self.workers: dict[str, Any] = {}
        self.failed: _Failure | None = None  # a start that went wrong; later calls return it again

    def pid(self) -> int:
        return os.getpid()

    def set_context(self, context: RankContext) -> None:
        self.context = context

    def listen(self, address: str) -> tuple[str, int]:
        self.listener = bind_listener(address)
        return address, self.listener.getsockname()[1]

    def join(self, context: RankContext, meeting_point: tuple[str, int] | _Failure, timeout_s: float) -> Any:
        if isinstance(meeting_point, _Failure):
            return meeting_point
        return self._guard(self._join, context, meeting_point, timeout_s, starting=True)

    def _join(self, context: RankContext, meeting_point: tuple[str, int], timeout_s: float) -> None:
        self.context = init_process_group(
            context.rank,
            context.world_size,
            *meeting_point,
            context.device,
            timeout_s,
            local_rank=context.local_rank,
            local_world_size=context.local_world_size,
            listener=self.listener if context.rank == 0 else None,
        )

    def build(self, role: str, spec: bytes) -> Any:
        """`spec` comes pickled, so that the class is imported here, inside the guard and after the environment."""
        return self._guard(self._build, role, spec, starting=True)

    def _build(self, role: str, spec: bytes) -> None:
        cls, kwargs = cloudpickle.loads(spec)
        self.workers[role] = cls(self.context, **kwargs)

    def run(self, role: str, method: str, names: tuple[str, ...], *values: Any) -> Any:
        """Call a worker's method; the last of `values` are its keyword arguments `names`."""
        positional = values[: len(values) - len(names)]
        keywords = dict(zip(names, values[len(positional) :], strict=True))
        return self._guard(lambda: getattr(self.workers[role], method)(*positional, **keywords))

    def _guard(self, function: Callable[..., Any], *args: Any, starting: bool = False) -> Any:
        if self.failed is not None:
            return self.failed
        try:
            return function(*args)
        except Exception as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
                frames = frames.tb_next
            text = "".join(traceback.format_exception(type(error), error, frames))
            print(text, file=sys.stderr, flush=True)
            failure = _Failure(type(error).__name__, str(error), text)
            if starting:
                self.failed = failure
            return failure


@dataclass(frozen=True)
class _Member:
    """A host as the driver knows it."""

    actor: Any
    rank: int
    node: str
    log_path: Path | None


class _Hosts:
    """The hosts of one group of slots, shared by the `WorkerGroup`s of their roles."""

    def __init__(self, name: str, members: list[_Member], limits: Limits, *, collective: bool) -> None:
        self.name = name
        self.members = members
        self.limits = limits
        self.collective = collective
        self.deadline = time.monotonic() + limits.start_s
        self.identities = [member.actor.pid.remote() for member in members]
        self.starting: list[tuple[str, str, list[Any]]] = []  # (role, phase, a reference per rank) not yet waited for
        self.pids = [0] * len(members)

    def begin(self, role: str, what: str, references: list[Any]) -> None:
        """Note a step of the start; `wait_ready` waits for it."""
        self.starting.append((role, what, references))

    def wait_ready(self) -> None:
        """Wait until every worker is built."""
        if self.identities:
            self.pids = self.gather(self.name, self.identities, "start the processes", starting=True)
            self.identities = []
        while self.starting:
            role, what, references = self.starting[0]
            self.gather(role, references, what, starting=True)
            del self.starting[0]

    def gather(self, role: str, references: Sequence[Any], what: str, *, starting: bool = False) -> list[Any]:
        """The results in order of `references` (one per rank), or the error that explains why there are none."""
        limit_s = self.limits.start_s if starting else self.limits.step_s
        deadline = self.deadline if starting else time.monotonic() + limit_s
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        failures: dict[int, _Failure | RayError] = {}
        waiting = list(references)
        while waiting:
            cluster.check_alive(f"{role}: {what}")
            timeout_s = min(POLL_S, deadline - time.monotonic())
            if timeout_s <= 0:
                break
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s, fetch_local=False)
            for reference in ready:
                try:
                    result = ray.get(reference, timeout=max(POLL_S, deadline - time.monotonic()))
                except GetTimeoutError:
                    waiting.append(reference)
                    continue
                except RayError as lost:
                    result = lost
                if isinstance(result, (_Failure, RayError)):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + (PEERS_S if self.collective else 0))
                    failures[rank_of[reference]] = result
                else:
                    results[rank_of[reference]] = result
        if failures:
            self.kill(None if self.collective else list(failures))
            raise self._error(role, failures, what)
        if waiting:
            error = self._timeout(role, [rank_of[reference] for reference in waiting], what, limit_s, starting)
            self.kill()
            raise error
        return [results[rank] for rank in range(len(references))]

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """End the hosts at once (None: all of them)."""
        for rank in range(len(self.members)) if ranks is None else ranks:
            ray.kill(self.members[rank].actor, no_restart=True)

    def _error(self, role: str, failures: Mapping[int, _Failure | RayError], what: str) -> WorkerError:
        def blame(rank: int) -> tuple[bool, bool, int]:  # a death explains more than an error, and that than its echo
            failure = failures[rank]
            return isinstance(failure, _Failure), isinstance(failure, _Failure) and failure.lost_a_peer, rank

        rank = min(failures, key=blame)
        failure = failures[rank]
        others = sorted(set(failures) - {rank})
        if isinstance(failure, _Failure):
            happened = f"raised {failure.kind}"
            details = failure.traceback
        else:
            happened = "died" if isinstance(failure, RayActorError) else f"was lost to {type(failure).__name__}"
            reason = str(failure).partition(" Some common causes")[0]  # advice about `ray stop` and other clusters
            reason = "\n".join(line for line in reason.splitlines() if not line.startswith("\t"))
            details = f"{reason}\n{self._log_tail(rank)}"
        if others:
            details = f"{details.rstrip()}\n(rank {', '.join(map(str, others))} failed too)"
        return WorkerError(happened, details=details, **self._who(role, rank, what))

    def _timeout(self, role: str, late: list[int], what: str, limit_s: float, starting: bool) -> WorkerTimeout:
        key = "trainer.start_timeout_s" if starting else "trainer.step_timeout_s"
        late.sort()
        done = [rank for rank in range(len(self.members)) if rank not in late]
        with contextlib.suppress(OSError):
            if self.pids[late[0]] and self.members[late[0]].node in cluster.own_addresses():
                os.kill(self.pids[late[0]], signal.SIGUSR1)  # it writes its stack to its log
                time.sleep(0.5)
        details = f"late: rank {', '.join(map(str, late))}; done: {', '.join(map(str, done)) or 'none'}\n"
        return WorkerTimeout(
            f"did not finish within {key}={limit_s:g} s",
            details=details + self._log_tail(late[0]),
            **self._who(role, late[0], what),
        )

    def _who(self, role: str, rank: int, what: str) -> dict[str, Any]:
        member = self.members[rank]
        return {"role": role, "rank": rank, "node": member.node, "pid": self.pids[rank], "phase": what}

    def _log_tail(self, rank: int) -> str:
        path = self.members[rank].log_path
        if path is None or not path.is_file():
            return f"(its log is {path} on its node)" if path is not None else ""
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"last lines of {path}:", *(f"  {line}" for line in lines)])


class Pending(Generic[R]):
    """A call under way."""

    def __init__(self, hosts: _Hosts, role: str, references: list[Any], what: str, every: int) -> None:
        self._hosts, self._role, self._references, self._what, self._every = hosts, role, references, what, every

    def result(self) -> list[R]:
        """Wait for it: one result per rank for `call`, one per data-parallel rank for `map`."""
        return self._hosts.gather(self._role, self._references, self._what)[:: self._every]


class WorkerGroup(Generic[W]):
    """The workers of one role, one per rank. Made by `spawn` and `spawn_rollout`."""

    def __init__(self, hosts: _Hosts, role: str, spec: RoleSpec[W]) -> None:
        self._hosts, self.role, self._spec = hosts, role, spec

    @property
    def world_size(self) -> int:
        return len(self._hosts.members)

    @property
    def dp_size(self) -> int:
        return self.world_size // self._spec.sequence_parallel_size

    def wait_ready(self) -> None:
        """Wait until the workers are built; the first call does so too."""
        self._hosts.wait_ready()

    def rebuild(self, **kwargs: Any) -> None:
        """Put new workers of the same class, with these arguments, in the place of the old ones, in the same processes.

        Returns at once; the next call waits.
        """
        self._hosts.deadline = time.monotonic() + self._hosts.limits.start_s
        _start_workers(self._hosts, self.role, RoleSpec(self._spec.cls, kwargs))

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank with the same arguments; one result per rank."""
        return self.start_call(method, *args, **kwargs).result()

    def start_call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """`call` without waiting for it."""
        return self._start(method, [args] * self.world_size, kwargs, every=1)

    def map(self, method: Callable[Concatenate[W, P], R], *shards: Sequence[Any], **same: Any) -> list[R]:
        """As the builtin: each positional argument has one entry per data-parallel rank; one result per such rank.

        Keyword arguments are the same for all.
        """
        return self.start_map(method, *shards, **same).result()

    def start_map(self, method: Callable[Concatenate[W, P], R], *shards: Sequence[Any], **same: Any) -> Pending[R]:
        """`map` without waiting for it."""
        for shard in shards:
            if len(shard) != self.dp_size:
                raise ValueError(f"{self.role}: {len(shard)} shards for {self.dp_size} data-parallel ranks")
        every = self._spec.sequence_parallel_size
        arguments = [tuple(shard[rank // every] for shard in shards) for rank in range(self.world_size)]
        return self._start(method, arguments, same, every=every)

    def close(self, method: Callable[[W], Any] | None = None, timeout_s: float = 15.0) -> None:
        """Let every rank run `method` for at most `timeout_s`, then end the processes (of all roles they hold)."""
        if method is not None:
            references = self._start(method, [()] * self.world_size, {}, every=1)._references
            _, late = ray.wait(references, num_returns=len(references), timeout=timeout_s, fetch_local=False)
            if late:
                logger.warning(
                    "%d of %d %s workers did not close within %g s", len(late), len(references), self.role, timeout_s
                )
        self._hosts.kill()

    def _start(
        self, method: Callable[..., Any], arguments: list[tuple[Any, ...]], same: Mapping[str, Any], *, every: int
    ) -> Pending[Any]:
        name = method.__name__
        if not any(vars(base).get(name) is method for base in self._spec.cls.__mro__):
            raise TypeError(f"{method.__qualname__} is not a method of {self._spec.cls.__qualname__} ({self.role})")
        self.wait_ready()
        what = _phase.get() or method.__qualname__
        shared = _put_shared([*arguments, *([tuple(same.values())] * self.world_size)])
        references = [
            member.actor.run.remote(
                self.role, name, tuple(same), *(shared.get(id(value), value) for value in (*positional, *same.values()))
            )
            for member, positional in zip(self._hosts.members, arguments, strict=True)
        ]
        return Pending(self._hosts, self.role, references, what, every)


def _put_shared(arguments: list[tuple[Any, ...]]) -> dict[int, Any]:
    """Object-store references, by id, of the values that go to more than one rank: stored once, not once per rank."""
    seen: set[int] = set()
    repeated: dict[int, Any] = {}
    for values in arguments:
        for value in values:
            if id(value) in seen and not isinstance(value, (int, float, str, bytes, type(None))):
                repeated[id(value)] = value
            seen.add(id(value))
    return {key: ray.put(value) for key, value in repeated.items()}


def spawn(
    pool: ResourcePool,
    roles: Mapping[str, RoleSpec[Any]],
    *,
    limits: Limits,
    log_dir: str | Path | None = None,
    process_group: bool = True,
    name: str = "train",
) -> dict[str, WorkerGroup[Any]]:
    """Start one host per slot that builds the workers of `roles`, in this order; rank = slot index.

    Returns at once: `WorkerGroup.wait_ready`, or the first call, waits. Logs go to `log_dir/{name}_rank{r}.log` on the
    host's node.
    """
    members = []
    for slot in pool.slots:
        options = {
            "num_cpus": 1,
            "num_gpus": 1 if pool.device == "cuda" else 0,
            "scheduling_strategy": slot.strategy,
        }
        host = f"{name}_rank{slot.index}"
        members.append(_start_host(slot, slot.index, host, options, {}, slot.slots_on_node, log_dir))
    hosts = _Hosts(name, members, limits, collective=True)
    contexts = [
        RankContext(slot.index, len(members), slot.local_index, slot.slots_on_node, pool.device) for slot in pool.slots
    ]
    one_node = len({slot.node_id for slot in pool.slots}) == 1
    if process_group:
        address = "127.0.0.1" if one_node else pool.slots[0].node_address
        meeting_point = members[0].actor.listen.remote(address)
        joining = [
            member.actor.join.remote(context, meeting_point, limits.collective_s)
            for member, context in zip(members, contexts, strict=True)
        ]
        hosts.begin(name, "form the process group", joining)
    else:
        _set_contexts(hosts, contexts)
    return {role: _build(hosts, role, spec) for role, spec in roles.items()}


def spawn_rollout(
    pool: ResourcePool,
    spec: RoleSpec[W],
    *,
    limits: Limits,
    tensor_parallel_size: int = 1,
    num_replicas: int | None = None,
    log_dir: str | Path | None = None,
    name: str = "rollout",
) -> WorkerGroup[W]:
    """Start one host per rollout replica (see `placement.replica_slots`); rank = replica.

    A replica asks Ray for nothing, since an actor in one bundle would see one GPU: it is put on the node of its slots
    and gets their GPUs by `CUDA_VISIBLE_DEVICES`. Returns at once, like `spawn`.
    """
    replicas = replica_slots(pool.slots, tensor_parallel_size, num_replicas)
    nodes = [slots[0].node_id for slots in replicas]
    members, contexts = [], []
    for rank, slots in enumerate(replicas):
        on_node = nodes.count(nodes[rank])
        gpus = ",".join(gpu for slot in slots for gpu in slot.gpu_ids)
        env = {"CUDA_VISIBLE_DEVICES": gpus} if pool.device == "cuda" else {}
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[rank], soft=False),
        }
        members.append(_start_host(slots[0], rank, f"{name}_rank{rank}", options, env, on_node, log_dir))
        contexts.append(RankContext(rank, len(replicas), nodes[:rank].count(nodes[rank]), on_node, pool.device))
    hosts = _Hosts(name, members, limits, collective=False)
    _set_contexts(hosts, contexts)
    return _build(hosts, name, spec)


def _start_host(
    slot: Slot,
    rank: int,
    name: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    sharers: int,
    log_dir: str | Path | None,
) -> _Member:
    log_path = None if log_dir is None else Path(log_dir).absolute() / f"{name}.log"
    actor = (
        ray.remote(_Host)
        .options(max_restarts=0, max_task_retries=0, **options)
        .remote(dict(env), sharers, None if log_path is None else str(log_path))
    )
    return _Member(actor, rank, slot.node_address, log_path)


def _set_contexts(hosts: _Hosts, contexts: list[RankContext]) -> None:
    setting = [
        member.actor.set_context.remote(context) for member, context in zip(hosts.members, contexts, strict=True)
    ]
    hosts.begin(hosts.name, "start the processes", setting)


def _build(hosts: _Hosts, role: str, spec: RoleSpec[W]) -> WorkerGroup[W]:
    if len(hosts.members) % spec.sequence_parallel_size:
        raise ValueError(
            f"{role}: sequence_parallel_size={spec.sequence_parallel_size} does not divide {len(hosts.members)} ranks"
        )
    _start_workers(hosts, role, spec)
    return WorkerGroup(hosts, role, spec)


def _start_workers(hosts: _Hosts, role: str, spec: RoleSpec[Any]) -> None:
    pickled = ray.put(cloudpickle.dumps((spec.cls, dict(spec.kwargs))))
    hosts.begin(role, "start", [member.actor.build.remote(role, pickled) for member in hosts.members])
