"""The collective group of the training ranks: gloo on CPU, nccl on GPU.

torch is imported inside the functions: a worker process sets its thread counts first, and torch reads them once, at
its first import.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankContext:
    """Who a worker is; the first argument of every worker class."""

    rank: int
    world_size: int
    local_rank: int = 0  # its place among the workers of its group on the same node
    local_world_size: int = 1
    device: str = "cpu"  # "cuda" | "cpu"

    @property
    def torch_device(self) -> torch.device:
        """A worker sees only its own slot's GPU, so on CUDA this is always the first one."""
        import torch

        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")


def init_process_group(
    context: RankContext, address: str, port: int, timeout_s: float, *, listener: socket.socket | None = None
) -> None:
    """Join the default process group of the ranks that meet at rank 0's `address:port`.

    `listener` is rank 0's socket when it was bound before (see `bind_listener`).
    `timeout_s` limits the meeting and later every collective.
    """
    import torch
    import torch.distributed as dist

    # By itself gloo listens where the host's name resolves to, which in containers is often nowhere.
    remote = context.local_world_size < context.world_size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address, remote=remote))
    if remote:  # nccl's own guess may be a network that the nodes do not share
        os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    timeout = timedelta(seconds=timeout_s)
    on_gpu = context.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    if context.rank == 0 and listener is None:
        listener = bind_listener(address, port)  # the store by itself would listen on every interface
    store = dist.TCPStore(
        address,
        port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()) if listener is not None else None,
    )
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("verl_lite", store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=context.torch_device if on_gpu else None,
    )


def bind_listener(address: str, port: int = 0) -> socket.socket:
    """A socket listening on `address` only, by default on a free port, kept so that nobody else can take the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(1024)
    return listener


def free_port(address: str = "127.0.0.1") -> int:
    """A port that is free now; another process may take it before you do (`bind_listener` has no such gap)."""
    with bind_listener(address) as listener:
        return int(listener.getsockname()[1])


def interface_of(address: str, *, remote: bool) -> str:
    """The network interface through which this host talks to `address`; loopback when all ranks are on one host."""
    if not remote:
        return "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing: asks the routing table
        own = probe.getsockname()[0]
    interfaces = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if own not in interfaces:
        raise RuntimeError(f"no network interface has this host's address {own}; set GLOO_SOCKET_IFNAME to one")
    return interfaces[own]
