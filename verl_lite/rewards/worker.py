"""The process that runs a reward function: samples in, one answer per sample out, over a socket to the pool.

It imports what the reward function imports and nothing else: no torch, no Ray, none of the driver's objects.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl_lite.plugins import resolve

LARGEST_SCORE = 3.4e38  # of float32, which scores become


@dataclass(frozen=True)
class RewardFunction:
    """Which function scores: `name` in the Python file `path`, or the built-in `compute_score` without a path."""

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] | None = None  # reward_kwargs: handed to every call

    def load(self) -> Callable[..., Any]:
        """Import the function and check that it can be called the way it will be. Raises `ValueError`."""
        if self.path is None:
            function = resolve("verl_lite.rewards:compute_score", key="reward.custom_reward_function")
        else:
            # Helper modules next to the user's file can be imported from it.
            sys.path.append(str(Path(self.path).expanduser().resolve().parent))
            function = resolve(f"{self.path}:{self.name}", key="reward.custom_reward_function")
        arguments = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
        try:
            inspect.signature(function).bind(**arguments, **(self.kwargs or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward.custom_reward_function: {self.name} of {self.path} cannot be called with data_source, "
                f"solution_str, ground_truth, extra_info and reward_kwargs {sorted(self.kwargs or {})}: {error}"
            ) from error
        return function


@dataclass(frozen=True)
class RewardSample:
    """What the reward function gets to see of one response: its arguments, by their names."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """What became of one sample. `score` is None when it has none: the function said so, or failed under `mask`."""

    score: float | None
    extra: dict[str, float | str | bool | None]
    error: str | None = None  # traceback of a failure
    timed_out: bool = False
    seconds: float = 0.0


def read_score(value: Any) -> tuple[float | None, dict[str, Any]]:
    """What a reward function may return, as (score, other values): a number, None, or a dict with `score`."""
    if isinstance(value, dict):
        if "score" not in value:
            raise TypeError(f"the reward function returned a dict without 'score'; its keys: {sorted(map(str, value))}")
        return _number(value["score"]), {str(k): _plain(v) for k, v in value.items() if k != "score"}
    return _number(value), {}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    value = _unwrap(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"the reward function returned {type(value).__name__} {value!r:.100}; a number, None or a dict with "
            "'score' is needed"
        )
    if not math.isfinite(value) or abs(float(value)) > LARGEST_SCORE:
        raise ValueError(f"the reward function returned {value!s:.40}; return None to leave a sample without a score")
    return float(value)


def _unwrap(value: Any) -> Any:
    # NumPy and torch scalars, without importing either; an array or tensor with dimensions is no scalar.
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _plain(value: Any) -> float | str | bool | None:
    value = _unwrap(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class _Worker:
    def __init__(self, connection: Connection, function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float):
        self._connection, self._function, self._kwargs, self._timeout_s = connection, function, kwargs, timeout_s

    def run_sync(self, chunk: list[tuple[int, RewardSample]]) -> None:
        for index, sample in chunk:
            started = self._start_clock()
            try:
                value = self._function(**vars(sample), **self._kwargs)
                result = RewardResult(*read_score(value), seconds=time.perf_counter() - started)
            except BaseException:  # sys.exit() in a reward function is a failure like any other
                result = _failure(started)
            self._connection.send((index, result))

    async def run_async(self, chunk: list[tuple[int, RewardSample]]) -> None:
        await asyncio.gather(*(self._run_coroutine(index, sample) for index, sample in chunk))

    async def _run_coroutine(self, index: int, sample: RewardSample) -> None:
        started = self._start_clock()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                value = await self._function(**vars(sample), **self._kwargs)
            result = RewardResult(*read_score(value), seconds=time.perf_counter() - started)
        except BaseException:
            result = _failure(started, timed_out=limit.expired())
        self._connection.send((index, result))

    def _start_clock(self) -> float:
        # The pool ends a sample that takes too long. This is for a process whose driver is gone while C code (a regular
        # expression) holds the interpreter lock: the kernel ends it after this much processor time.
        signal.setitimer(signal.ITIMER_VIRTUAL, (self._timeout_s + 10) * (os.cpu_count() or 1))
        return time.perf_counter()


def _failure(started: float, *, timed_out: bool = False) -> RewardResult:
    return RewardResult(None, {}, traceback.format_exc(), timed_out, time.perf_counter() - started)


def _end_with_the_driver(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)  # this process leads its session: what the reward function started goes too


def main(socket: int, driver: int) -> None:
    """Serve one pool until it hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the driver's business, also where all its descendants are signalled
    threading.Thread(target=_end_with_the_driver, args=(driver,), daemon=True).start()
    connection = Connection(socket)
    try:
        definition, timeout_s = connection.recv()
        try:
            function = definition.load()
        except BaseException as error:
            connection.send(str(error) or repr(error))
            return
        worker = _Worker(connection, function, definition.kwargs or {}, timeout_s)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        connection.send(is_async)
        with asyncio.Runner() as runner:  # one event loop for all chunks: the function may keep its sessions
            while True:
                chunk = connection.recv()
                if is_async:
                    runner.run(worker.run_async(chunk))
                else:
                    worker.run_sync(chunk)
    except (EOFError, ConnectionError):
        pass  # the pool is closed, or its process ended
