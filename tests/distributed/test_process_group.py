from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from verl_lite.distributed.process_group import bind_listener, free_port, interface_of

RANK = """
import json, socket, sys, time
rank, world_size, port, fileno, timeout_s = map(int, sys.argv[1:])
from verl_lite.distributed.process_group import RankContext, init_process_group
listener = socket.socket(fileno=fileno) if fileno >= 0 else None
context = RankContext(rank, world_size, rank, world_size)
init_process_group(context, "127.0.0.1", port, timeout_s, listener=listener)
import torch, torch.distributed as dist
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
print(json.dumps([context.rank, context.world_size, context.local_rank, str(context.torch_device), total.item()]))
"""


def start_rank(rank: int, world_size: int, port: int, *, listener: socket.socket | None = None, timeout_s: int = 60):
    fileno = -1 if listener is None else listener.fileno()
    arguments = [str(value) for value in (rank, world_size, port, fileno, timeout_s)]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        pass_fds=[] if listener is None else [fileno], env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_two_ranks_meet_at_a_port_nobody_else_can_take() -> None:
    with bind_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        ranks = [start_rank(0, 2, port, listener=listener), start_rank(1, 2, port)]
    results = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert results == [[0, 2, 0, "cpu", 3.0], [1, 2, 1, "cpu", 3.0]]  # all_reduce: 1 + 2


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_the_limit() -> None:
    started = time.monotonic()
    rank = start_rank(0, 2, free_port(), timeout_s=2)
    _, errors = rank.communicate(timeout=60)
    assert rank.returncode != 0
    assert "imeout" in errors or "imed out" in errors
    assert time.monotonic() - started < 40


def test_a_listener_is_bound_to_its_address_only() -> None:
    with bind_listener("127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(OSError):
            bind_listener("127.0.0.1", port)


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_ranks_on_one_host_use_loopback() -> None:
    assert interface_of("127.0.0.1", remote=False) == "lo"
    assert interface_of("127.0.0.1", remote=True) == "lo"  # asks the routing table
