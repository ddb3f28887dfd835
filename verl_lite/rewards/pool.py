"""Reward functions in processes of their own, with a time limit per sample.

Plain child processes rather than Ray actors: they start in 0.2 s instead of several, can be killed in the middle of a
sample, and die with the driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import BinaryIO

from verl_lite.config import num_cores
from verl_lite.rewards.worker import RewardFunction, RewardResult, RewardSample

__all__ = ["RewardError", "RewardFunction", "RewardPool", "RewardResult", "RewardSample", "check_reward_function"]

logger = logging.getLogger(__name__)

MAX_CHUNK = 32  # samples sent to a process at once
# Over the sample's own limit before its process is killed: an async function ends itself at the limit.
GRACE_S = 0.5


class RewardError(RuntimeError):
    """The reward function failed and `reward.on_error` says that this stops the run."""


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    is_async: bool = False
    deadline: float = 0.0
    outstanding: list[int] = field(default_factory=list)  # samples it has, in the order it scores them


class _Round:
    """One call of `score`: what is waiting, and what came of the rest."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.queue = deque(range(len(samples)))
        self.alone: set[int] = set()  # suspects, sent one at a time
        self.results: dict[int, RewardResult] = {}
        self.failed: list[int] = []

    def record(self, index: int, result: RewardResult) -> None:
        self.results[index] = result
        if result.error:
            self.failed.append(index)

    def report(self, index: int, what: str) -> str:
        sample = self.samples[index]
        return (
            f"{what}; sample {index} (data_source {sample.data_source!r}, response {sample.solution_str[-200:]!r}):\n"
            f"{self.results[index].error}"
        )


class RewardPool:
    """Scores samples in up to `num_workers` processes, never more than this process may use cores.

    A failure of one sample (exception, wrong type, NaN, death of its process) follows `on_error`: `raise` stops with
    its traceback, `zero` scores 0, `mask` leaves it without a score. A sample that takes longer than `timeout_s` has
    its process killed and replaced; it counts as a failure too, but scores 0 under `raise`: it is most often the
    response's doing. Whatever the policy, a function that fails for every sample stops the run.
    """

    def __init__(
        self, function: RewardFunction, *, num_workers: int, timeout_s: float, on_error: str,
        start_timeout_s: float = 120.0, log_path: str | None = None,
    ) -> None:  # fmt: skip
        self._function, self._timeout_s, self._on_error = function, timeout_s, on_error
        self._num_workers = min(num_workers, num_cores())
        self._start_timeout_s = start_timeout_s
        self._log: BinaryIO | None = open(log_path, "ab") if log_path else None  # noqa: SIM115
        self._workers: list[_Process] = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and return at once; they import the reward function meanwhile."""
        while len(self._workers) < self._num_workers:
            self._workers.append(self._spawn())

    def wait_ready(self) -> None:
        """Return when a process has loaded the reward function. Raises `ValueError` when it cannot be loaded."""
        self.start()
        while not any(worker.ready for worker in self._workers):
            self._receive(_Round([]))

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result per sample, in order. Raises `RewardError` as `on_error` says."""
        self.start()
        current = _Round(samples)
        try:
            while len(current.results) < len(samples):
                self._dispatch(current)
                self._receive(current)
                self._stop_if_hopeless(current)
        except BaseException:
            self._discard_busy()
            raise
        return self._apply_policy(current)

    def close(self) -> None:
        """End the processes and everything they started."""
        while self._workers:
            _end(self._workers.pop())
        if self._log:
            self._log.close()
            self._log = None

    def _spawn(self) -> _Process:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from verl_lite.rewards.worker import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log,
                stderr=self._log, start_new_session=True, env={"OMP_NUM_THREADS": "1", **os.environ},
            )  # fmt: skip
        # A process that is stopped reads nothing, and may have written half an answer.
        limit = struct.pack("ll", int(self._timeout_s + GRACE_S) + 1, 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        connection = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # it died at once: _receive will see that
            connection.send((self._function, self._timeout_s))
        return _Process(process, connection, deadline=time.monotonic() + self._start_timeout_s)

    def _dispatch(self, current: _Round) -> None:
        queue, alone = current.queue, current.alone
        for place, worker in enumerate(self._workers):
            if worker.ready and not worker.outstanding and worker.process.poll() is not None:
                _end(worker)  # something outside killed it while it had nothing to do: no sample is to blame
                worker = self._workers[place] = self._spawn()
            if not worker.ready or worker.outstanding or not queue:
                continue
            # Ever smaller chunks, so that the processes finish together.
            size = max(1, min(MAX_CHUNK, len(queue) // (2 * len(self._workers))))
            chunk = [queue.popleft()]
            while len(chunk) < size and queue and chunk[0] not in alone and queue[0] not in alone:
                chunk.append(queue.popleft())
            worker.outstanding = chunk
            worker.deadline = time.monotonic() + self._timeout_s + GRACE_S
            try:
                worker.connection.send([(index, current.samples[index]) for index in chunk])
            except ConnectionError:
                pass  # it died: _receive will see that
            except BlockingIOError:
                worker.deadline = 0.0  # it does not read

    def _receive(self, current: _Round) -> None:
        """Wait for answers, deaths or the next deadline, and record what came of them."""
        busy = [worker for worker in self._workers if worker.outstanding or not worker.ready]
        limit = min(worker.deadline for worker in busy) - time.monotonic()
        wait([worker.connection for worker in busy], max(limit, 0))
        for worker in busy:
            try:
                while worker.connection.poll():
                    self._take(worker, worker.connection.recv(), current)
            except (EOFError, ConnectionError):
                self._replace(worker, current, ending=_ending(worker.process.wait(timeout=10)))
                continue
            except BlockingIOError:
                worker.deadline = 0.0  # it stopped in the middle of an answer
            if time.monotonic() > worker.deadline and (worker.outstanding or not worker.ready):
                self._replace(worker, current, ending=None)

    def _take(self, worker: _Process, message: tuple[int, RewardResult] | str | bool, current: _Round) -> None:
        if isinstance(message, str):
            raise ValueError(message)
        if isinstance(message, bool):
            worker.ready, worker.is_async = True, message
            return
        index, result = message
        worker.outstanding.remove(index)
        worker.deadline = time.monotonic() + self._timeout_s + GRACE_S
        current.record(index, result)

    def _replace(self, worker: _Process, current: _Round, *, ending: str | None) -> None:
        """A process died, or was late (`ending` None): name the sample to blame, and put the others back."""
        if not worker.ready:
            raise ValueError(
                f"reward.custom_reward_function: the process that loads {self._function.path} "
                + (ending or f"took over {self._start_timeout_s:g} s (trainer.start_timeout_s)")
            )
        _end(worker)
        self._workers[self._workers.index(worker)] = self._spawn()
        left = worker.outstanding
        if worker.is_async and len(left) > 1:
            current.alone.update(left)  # any of them may be the one: all again, each alone
        elif left:
            late = f"no score after {self._timeout_s:g} s (reward.timeout_s)"
            error = f"the process that scored it {ending}" if ending else late
            current.record(left.pop(0), RewardResult(None, {}, error, timed_out=not ending, seconds=self._timeout_s))
        current.queue.extendleft(reversed(left))

    def _stop_if_hopeless(self, current: _Round) -> None:
        late = [index for index in current.failed if current.results[index].timed_out]
        raising = [index for index in current.failed if index not in late]
        if raising and self._on_error == "raise":
            raise RewardError(current.report(raising[0], "the reward function failed"))
        if len(late) >= max(4, 2 * self._num_workers) and len(late) == len(current.results):
            raise RewardError(current.report(late[0], f"the first {len(late)} samples all ran out of time"))

    def _apply_policy(self, current: _Round) -> list[RewardResult]:
        count, failed = len(current.samples), sorted(current.failed)
        results = [current.results[i] for i in range(count)]
        if len(failed) == count > 1:
            raise RewardError(current.report(0, "the reward function failed for every sample"))
        if count > 1 and all(result.score is None for result in results):
            raise RewardError(f"none of {count} samples has a score: the reward function returned None or failed")
        if failed:
            logger.warning(current.report(failed[0], f"{len(failed)} of {count} samples failed"))
            score = None if self._on_error == "mask" else 0.0
            results = [replace(result, score=score) if result.error else result for result in results]
        return results

    def _discard_busy(self) -> None:
        for worker in [worker for worker in self._workers if worker.outstanding or not worker.ready]:
            self._workers.remove(worker)
            _end(worker)


def check_reward_function(function: RewardFunction, *, start_timeout_s: float = 120.0) -> None:
    """Load the function once, in a process of its own. Raises `ValueError` that says what is wrong with it."""
    with RewardPool(function, num_workers=1, timeout_s=60, on_error="raise", start_timeout_s=start_timeout_s) as pool:
        pool.wait_ready()


def _end(worker: _Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # both mean dead; macOS says the second of a zombie
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait(timeout=10)
    worker.connection.close()


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
