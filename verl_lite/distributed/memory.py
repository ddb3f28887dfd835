"""What processes hold: the peak of a phase (the GPU's allocator there, resident memory on a CPU), and their own now."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def reset_peak_memory(device: torch.device) -> None:
    """Start counting anew. Where the system cannot (not Linux), the peak stays that of the process's life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(PermissionError):  # some sandboxes forbid it
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def own_memory_bytes(*, children: bool) -> int:
    """Resident memory of this process (and its children) without what it shares, such as Ray's object store."""
    total, this = 0, psutil.Process()
    for process in [this, *(this.children(recursive=True) if children else [])]:
        with suppress(psutil.Error):
            memory = process.memory_info()
            total += memory.rss - getattr(memory, "shared", 0)  # Linux tells
    return total
