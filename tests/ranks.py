"""A few processes joined by gloo, in which tests run functions of theirs: training ranks without Ray."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from verl_lite.distributed.process_group import RankContext, bind_listener, init_process_group

TIMEOUT_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["verl_lite.workers.actor", "verl_lite.workers.critic"])  # imported once, then forked


class Ranks:
    """`with Ranks(2) as ranks: ranks.run(function, ...)` calls function(context, ...) on each, results by rank."""

    def __init__(self, world_size: int) -> None:
        with bind_listener("127.0.0.1") as listener:
            port = listener.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        # Test modules cannot be imported in another process: their functions travel by value.
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        for pipe in self.pipes:
            pipe.send_bytes(cloudpickle.dumps((function, args, kwargs)))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} gave no answer within {TIMEOUT_S:.0f} s")
            done, value = cloudpickle.loads(pipe.recv_bytes())
            (results if done else failures).append(value)
        if failures:
            raise RuntimeError("\n".join(failures))
        return results

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def all_gather(value: Any) -> list[Any]:
    """What every rank has, by rank; called on all of them."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    context = RankContext(rank, world_size, rank, world_size)
    init_process_group(context, "127.0.0.1", port, TIMEOUT_S)
    while True:
        try:
            function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = (True, function(context, *args, **kwargs))
        except Exception:
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send_bytes(cloudpickle.dumps(answer))
    dist.destroy_process_group()
