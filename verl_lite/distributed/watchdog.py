"""A small process beside the driver that ends the run's processes when the driver is gone, even by kill -9.

Ray's daemons and an engine's children can outlive their driver by minutes. Every process of a run inherits
`VERL_LITE_RUN_ID`; when the driver closes the pipe or dies, whoever carries this run's id is killed, Ray's own logs
move to the run's folder and its temporary folder goes. Run by path, not as a module: only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

RUN_ID = "VERL_LITE_RUN_ID"
POLL_S = 0.5
SWEEP_LIMIT_S = 20.0


def processes_of(run_id: str) -> Iterator[tuple[int, str]]:
    """(pid, command) of every live process that carries the run's id, this one excepted."""
    mark = f"{RUN_ID}={run_id}"
    if not Path("/proc/self/environ").exists():
        import psutil  # no /proc on macOS

        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(RUN_ID) == run_id and process.pid != os.getpid():
                    yield process.pid, " ".join(process.cmdline())
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    yield int(folder.name), command.strip()


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Segments and semaphores of multiprocessing and vLLM that these processes have mapped: killed, they leave them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # no /proc, or gone meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    inodes.add(int(line.split()[4]))  # a semaphore was mapped under another name than it has now
    held = set()
    for path in Path("/dev/shm").glob("*") if inodes else []:
        with contextlib.suppress(OSError):
            if path.name.startswith(("psm_", "sem.mp-", "vllm_dist_")) and path.stat().st_ino in inodes:
                held.add(path)
    return held


def sweep(run_id: str) -> dict[int, str]:
    """Kill the run's processes until none is left; those that were."""
    ended: dict[int, str] = {}
    segments: set[Path] = set()
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while time.monotonic() < deadline and (found := dict(processes_of(run_id))):
        ended |= found
        segments |= shared_memory_of(found)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for segment in segments:
        segment.unlink(missing_ok=True)
    return ended


def main(run_id: str, driver: int, ray_dir: Path, log_dir: Path) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    # A forked child of the driver may hold the pipe open, so its end isn't the only sign.
    while os.getppid() == driver and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    ended = sweep(run_id)
    alive = os.getppid() == driver  # asked late: a dying process closes its pipes first
    if ended:
        with contextlib.suppress(OSError), open(log_dir / "watchdog.log", "a") as log:
            print(time.strftime("%F %T"), f"driver {driver}", "closing" if alive else "gone", file=log)
            log.writelines(f"  ended {pid}: {command[:200]}\n" for pid, command in sorted(ended.items()))
    with contextlib.suppress(OSError, shutil.Error):
        for session in ray_dir.glob("session_[0-9]*"):
            shutil.copytree(session / "logs", log_dir / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)
    shutil.rmtree(ray_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
