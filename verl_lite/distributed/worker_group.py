"""The driver's hands: groups of workers in Ray actors, called by method object.

One actor process per slot, the *host*, holds the workers of all training roles (actor, ref, critic, …): one torch, one
process group and one CUDA context per slot. A rollout replica has a host of its own. `WorkerGroup[W]` is the view on
one role of some hosts; a worker class is plain Python and never sees Ray.

Every wait ends: with the result, with `WorkerError` when a worker raises or its process dies, with `WorkerTimeout` that
says who is late. In the first two cases the peers are killed, so that nobody stays in a collective. Where the ranks do
not depend on each other a dead one can be spared (`Pending.outcomes`) and replaced (`WorkerGroup.respawn`).

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_lite.distributed import cluster
from verl_lite.distributed.deaths import ProcessDied, blame_memory, end_of_file, last_lines, oom_kills
from verl_lite.distributed.placement import ResourcePool, Slot, replica_slots
from verl_lite.distributed.process_group import RankContext, bind_listener, init_process_group
from verl_lite.distributed.watchdog import shared_memory_of

logger = logging.getLogger(__name__)

W = TypeVar("W")
R = TypeVar("R")
P = ParamSpec("P")

POLL_S = 1.0  # between two looks at whether Ray itself is alive
PEERS_S = 3.0  # how long the other ranks may add their own errors to the first one
# A worker that keeps a limit itself says more about what is late, so the driver waits a little longer than it.
MARGIN, MAX_MARGIN_S = 0.05, 10.0

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
    """A worker raised or died. `details` holds the worker's own traceback and the last lines of its log.

    `died`: its process, or one that it cannot do without, has ended.
    """

    def __init__(
        self, what: str, *, role: str, rank: int, node: str, pid: int, phase: str, details: str, died: bool = False
    ) -> None:
        self.role, self.rank, self.node, self.pid, self.phase, self.details = role, rank, node, pid, phase, details
        self.died = died
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
    died: bool = False  # of a `ProcessDied`
    echo: str = ""  # and its

    @property
    def lost_a_peer(self) -> bool:
        """Whether this looks like the echo of another rank's end."""
        return any(sign in self.message for sign in ("onnection closed by peer", "onnection reset", "ncclRemoteError"))

    @property
    def waited_for_a_peer(self) -> bool:
        """Whether this looks like a collective that ran out of `Limits.collective_s`."""
        return any(sign in self.message for sign in ("Timed out waiting", "imeout"))


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
        listener = self.listener if context.rank == 0 else None
        init_process_group(context, *meeting_point, timeout_s, listener=listener)
        self.context = context

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
            if isinstance(error, ProcessDied):
                failure = replace(failure, died=True, echo=error.echo)
            if starting:
                self.failed = failure
            return failure


@dataclass
class _Member:
    """A host as the driver knows it."""

    create: Callable[[], Any]  # starts its actor
    context: RankContext
    node: str
    log_path: Path | None
    pid: int = 0
    segments: set[Path] = field(default_factory=set)  # of its processes in this machine's shared memory

    def __post_init__(self) -> None:
        self.actor = self.create()

    def note_segments(self) -> None:
        with contextlib.suppress(psutil.Error):
            if self.pid and self.node in cluster.own_addresses():
                children = psutil.Process(self.pid).children(recursive=True)
                self.segments |= shared_memory_of([self.pid, *(child.pid for child in children)])

    def remove_segments(self) -> None:
        """What killed processes leave behind."""
        for segment in self.segments:
            segment.unlink(missing_ok=True)
        self.segments = set()


class _Hosts:
    """The hosts of one group of slots, shared by the `WorkerGroup`s of their roles."""

    def __init__(self, name: str, members: list[_Member], limits: Limits, *, collective: bool) -> None:
        self.name = name
        self.members = members
        self.limits = limits
        self.collective = collective
        self.oom_kills = oom_kills()
        self.starting: list[tuple[str, str, dict[int, Any]]] = []  # (role, phase, reference by rank) not yet waited for
        self.begin_start(range(len(members)))

    def begin_start(self, ranks: Sequence[int]) -> None:
        self.deadline = time.monotonic() + self.limits.start_s
        self.identities = {rank: self.members[rank].actor.pid.remote() for rank in ranks}

    def begin(self, role: str, what: str, references: dict[int, Any]) -> None:
        """Note a step of the start; `wait_ready` waits for it."""
        self.starting.append((role, what, references))

    def wait_ready(self) -> None:
        """Wait until every worker is built."""
        if self.identities:
            for rank, pid in self.gather(self.name, self.identities, "start the processes", starting=True).items():
                self.members[rank].pid = pid
            self.identities = {}
        while self.starting:
            role, what, references = self.starting[0]
            self.gather(role, references, what, starting=True)
            del self.starting[0]
            for rank in references:
                self.members[rank].note_segments()

    def gather(
        self, role: str, references: Mapping[int, Any], what: str, *, starting: bool = False, spared: int = 0
    ) -> dict[int, Any]:
        """The ranks' results, or the error that explains why there are none.

        Up to `spared` deaths do not end the wait for the others: such a rank's result is its `WorkerError`.
        """
        limit_s = self.limits.start_s if starting else self.limits.step_s
        deadline = self.deadline if starting else time.monotonic() + limit_s
        deadline += min(MARGIN * limit_s, MAX_MARGIN_S)
        rank_of = {reference: rank for rank, reference in references.items()}
        results: dict[int, Any] = {}
        failures: dict[int, _Failure | RayError] = {}
        fatal = False
        waiting = list(rank_of)
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
                if not isinstance(result, (_Failure, RayError)):
                    results[rank_of[reference]] = result
                    continue
                failures[rank_of[reference]] = result
                if not fatal and not (_is_death(result) and len(failures) <= spared):
                    fatal = True
                    deadline = min(deadline, time.monotonic() + (PEERS_S if self.collective else 0))
        if fatal:
            self.kill(None if self.collective else list(failures))
            raise self._error(role, failures, what, silent=[rank_of[reference] for reference in waiting])
        if waiting:
            error = self._timeout(role, references, [rank_of[reference] for reference in waiting], what, starting)
            self.kill()
            raise error
        self.kill(list(failures))
        results |= {rank: self._error(role, {rank: failure}, what) for rank, failure in failures.items()}
        return {rank: results[rank] for rank in references}

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """End the hosts at once (None: all of them)."""
        for rank in range(len(self.members)) if ranks is None else ranks:
            ray.kill(self.members[rank].actor, no_restart=True)
            self.members[rank].remove_segments()

    def _error(
        self, role: str, failures: Mapping[int, _Failure | RayError], what: str, silent: Sequence[int] = ()
    ) -> WorkerError:
        def blame(rank: int) -> tuple[bool, bool, int]:  # a death explains more than an error, and that than its echo
            failure = failures[rank]
            return isinstance(failure, _Failure), isinstance(failure, _Failure) and failure.lost_a_peer, rank

        rank = min(failures, key=blame)
        failure = failures[rank]
        others = sorted(set(failures) - {rank})
        member = self.members[rank]
        if isinstance(failure, _Failure) and not failure.died:
            happened = f"raised {failure.kind}"
            details = [failure.traceback, self._log_tail(rank, failure.traceback)]
        elif isinstance(failure, _Failure):
            happened = "lost its process"
            details = [failure.message, self._log_tail(rank, failure.echo, failure.traceback, frames=False)]
        else:
            happened = "died" if isinstance(failure, RayActorError) else f"was lost to {type(failure).__name__}"
            reason = str(failure).partition(" Some common causes")[0]  # advice about `ray stop` and other clusters
            lines = [line for line in reason.splitlines() if not line.startswith("\t")]  # ids of Ray
            details = [lines[-1], self._log_tail(rank)]
            if member.node in cluster.own_addresses():
                memory = blame_memory(self.oom_kills)
                details.insert(0, f"its process was killed, or crashed if its log says so; {memory}")
        if others:
            details.append(f"(rank {', '.join(map(str, others))} failed too)")
        if silent and isinstance(failure, _Failure) and failure.waited_for_a_peer:
            details.insert(0, f"late: {self._describe(sorted(silent))}, which it waited for in a collective")
        text = "\n".join(part.rstrip() for part in details if part)
        return WorkerError(happened, details=text, died=_is_death(failure), **self._who(role, rank, what))

    def _timeout(
        self, role: str, references: Mapping[int, Any], late: list[int], what: str, starting: bool
    ) -> WorkerTimeout:
        limit = f"trainer.start_timeout_s={self.limits.start_s:g}"
        if not starting:
            limit = f"trainer.step_timeout_s={self.limits.step_s:g}"
        late.sort()
        done = sorted(set(references) - set(late))
        member = self.members[late[0]]
        with contextlib.suppress(OSError):
            if member.pid and member.node in cluster.own_addresses():
                os.kill(member.pid, signal.SIGUSR1)  # it writes its stack to its log
                time.sleep(0.5)
        details = f"late: {self._describe(late)}; done: {', '.join(map(str, done)) or 'none'}\n"
        return WorkerTimeout(
            f"did not finish within {limit} s",
            details=details + self._log_tail(late[0]),
            **self._who(role, late[0], what),
        )

    def _describe(self, ranks: Sequence[int]) -> str:
        """E.g. "rank 1, 2 (the process of 1 is stopped, as by SIGSTOP)"."""
        stopped = []
        for rank in ranks:
            member = self.members[rank]
            with contextlib.suppress(psutil.Error):
                if member.pid and member.node in cluster.own_addresses():
                    stopped += [rank] if psutil.Process(member.pid).status() == psutil.STATUS_STOPPED else []
        names = f"rank {', '.join(map(str, ranks))}"
        return f"{names} (stopped, as by SIGSTOP: {', '.join(map(str, stopped))})" if stopped else names

    def _who(self, role: str, rank: int, what: str) -> dict[str, Any]:
        member = self.members[rank]
        return {"role": role, "rank": rank, "node": member.node, "pid": member.pid, "phase": what}

    def _log_tail(self, rank: int, *known: str, frames: bool = True) -> str:
        """The last lines of a rank's log, up to the first of these texts that it has, which is known already."""
        path = self.members[rank].log_path
        if path is None:
            return ""
        if not path.is_file():
            return f"(its log is {path} on its node)"
        text = end_of_file(path)
        cut = next((text.rindex(part) for part in known if part and part in text), len(text) + 1)
        lines = last_lines(text[: text.rfind("\n", 0, cut) + 1] if cut <= len(text) else text, frames=frames)
        return "\n".join([f"last lines of {path}:", *(f"  {line}" for line in lines)]) if lines else ""


def _is_death(failure: _Failure | RayError) -> bool:
    return failure.died if isinstance(failure, _Failure) else isinstance(failure, RayActorError)


class Pending(Generic[R]):
    """A call under way."""

    def __init__(self, hosts: _Hosts, role: str, references: dict[int, Any], what: str, every: int) -> None:
        self._hosts, self._role, self._references, self._what, self._every = hosts, role, references, what, every

    def result(self) -> list[R]:
        """Wait for it: one result per rank for `call`, one per data-parallel rank for `map`."""
        return [value for value in self.outcomes(0) if not isinstance(value, WorkerError)]

    def outcomes(self, spared: int) -> list[R | WorkerError]:
        """`result`, but up to `spared` ranks may die: theirs is the error, and the others are waited for."""
        results = self._hosts.gather(self._role, self._references, self._what, spared=spared)
        return list(results.values())[:: self._every]


class WorkerGroup(Generic[W]):
    """The workers of one role, one per rank. Made by `spawn` and `spawn_rollout`."""

    def __init__(self, hosts: _Hosts, role: str, spec: RoleSpec[W], ranks: Sequence[int] | None = None) -> None:
        self._hosts, self.role, self._spec = hosts, role, spec
        self._ranks = range(len(hosts.members)) if ranks is None else ranks

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def dp_size(self) -> int:
        return self.world_size // self._spec.sequence_parallel_size

    def only(self, ranks: Sequence[int]) -> WorkerGroup[W]:
        """A view on some of the ranks; of no use where a call is a collective."""
        return WorkerGroup(self._hosts, self.role, self._spec, ranks)

    def wait_ready(self) -> None:
        """Wait until the workers are built; the first call does so too."""
        self._hosts.wait_ready()

    def rebuild(self, **kwargs: Any) -> None:
        """Put new workers of the same class, with these arguments, in the place of the old ones, in the same processes.

        Returns at once; the next call waits.
        """
        self._hosts.deadline = time.monotonic() + self._hosts.limits.start_s
        _start_workers(self._hosts, self.role, RoleSpec(self._spec.cls, kwargs), self._ranks)

    def respawn(self) -> None:
        """End the processes of these ranks and start new ones in their place. Returns at once; the next call waits."""
        assert not self._hosts.collective, "a process group cannot take a new rank in"
        self._hosts.kill(self._ranks)
        for rank in self._ranks:
            self._hosts.members[rank].actor = self._hosts.members[rank].create()
        self._hosts.begin_start(self._ranks)
        _set_contexts(self._hosts, self._ranks)
        _start_workers(self._hosts, self.role, self._spec, self._ranks)

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
        if method is not None and not self._hosts.starting:
            references = list(self._start(method, [()] * self.world_size, {}, every=1)._references.values())
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
        references = {
            rank: self._hosts.members[rank].actor.run.remote(
                self.role, name, tuple(same), *(shared.get(id(value), value) for value in (*positional, *same.values()))
            )
            for rank, positional in zip(self._ranks, arguments, strict=True)
        }
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
        context = RankContext(slot.index, len(pool.slots), slot.local_index, slot.slots_on_node, pool.device)
        members.append(_member(slot, context, f"{name}_rank{slot.index}", options, {}, log_dir))
    hosts = _Hosts(name, members, limits, collective=True)
    one_node = len({slot.node_id for slot in pool.slots}) == 1
    if process_group:
        address = "127.0.0.1" if one_node else pool.slots[0].node_address
        meeting_point = members[0].actor.listen.remote(address)
        joining = {
            rank: member.actor.join.remote(member.context, meeting_point, limits.collective_s)
            for rank, member in enumerate(members)
        }
        hosts.begin(name, "form the process group", joining)
    else:
        _set_contexts(hosts, range(len(members)))
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
    members = []
    for rank, slots in enumerate(replicas):
        on_node = nodes.count(nodes[rank])
        gpus = ",".join(gpu for slot in slots for gpu in slot.gpu_ids)
        env = {"CUDA_VISIBLE_DEVICES": gpus} if pool.device == "cuda" else {}
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[rank], soft=False),
        }
        context = RankContext(rank, len(replicas), nodes[:rank].count(nodes[rank]), on_node, pool.device)
        members.append(_member(slots[0], context, f"{name}_rank{rank}", options, env, log_dir))
    hosts = _Hosts(name, members, limits, collective=False)
    _set_contexts(hosts, range(len(members)))
    return _build(hosts, name, spec)


def _member(
    slot: Slot,
    context: RankContext,
    name: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    log_dir: str | Path | None,
) -> _Member:
    log_path = None if log_dir is None else Path(log_dir).absolute() / f"{name}.log"

    def create() -> Any:
        host = ray.remote(_Host).options(max_restarts=0, max_task_retries=0, **options)
        return host.remote(dict(env), context.local_world_size, None if log_path is None else str(log_path))

    return _Member(create, context, slot.node_address, log_path)


def _set_contexts(hosts: _Hosts, ranks: Sequence[int]) -> None:
    members = hosts.members
    setting = {rank: members[rank].actor.set_context.remote(members[rank].context) for rank in ranks}
    hosts.begin(hosts.name, "start the processes", setting)


def _build(hosts: _Hosts, role: str, spec: RoleSpec[W]) -> WorkerGroup[W]:
    if len(hosts.members) % spec.sequence_parallel_size:
        raise ValueError(
            f"{role}: sequence_parallel_size={spec.sequence_parallel_size} does not divide {len(hosts.members)} ranks"
        )
    _start_workers(hosts, role, spec, range(len(hosts.members)))
    return WorkerGroup(hosts, role, spec)


def _start_workers(hosts: _Hosts, role: str, spec: RoleSpec[Any], ranks: Sequence[int]) -> None:
    pickled = ray.put(cloudpickle.dumps((spec.cls, dict(spec.kwargs))))
    hosts.begin(role, "start", {rank: hosts.members[rank].actor.build.remote(role, pickled) for rank in ranks})
