"""What ended processes have left in shared memory; what other runs on the machine have there is in use."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

import psutil

from verl_lite.distributed.watchdog import shared_memory_of

PLACE = Path("/dev/shm")


def left_in_shared_memory() -> set[Path]:
    """Segments and semaphores that no live process has mapped, folders of weights that none has locked."""
    patterns = ("psm_*", "sem.mp-*", "vllm_dist_*")
    segments = {path for pattern in patterns for path in PLACE.glob(pattern)} - shared_memory_of(psutil.pids())
    folders = {lock.parent for lock in PLACE.glob("verl_lite-weights-*/lock") if _is_free(lock)}
    return {path for path in segments | folders if path.exists()}


def _is_free(lock: Path) -> bool:
    with contextlib.suppress(OSError), lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
