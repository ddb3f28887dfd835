"""What is known of a process that has ended: how, whether memory ran out, and the useful end of its log."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

import psutil

LOG_LINES = 15
LOG_BYTES = 1 << 18
_NOISE = re.compile(r"\d+%\||\bit/s\b|\bs/it\b|\[shutdown\]")  # tqdm's bars; how vLLM takes itself down
_FRAME = re.compile(r"(\w+: )?(\s|\^)")  # of a traceback
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# (EngineCore pid=1) INFO 11-30 18:20:11 [core.py:10] …, as vLLM writes
_STAMP = re.compile(r"\((\w+) pid=\d+\) (?:\w+ [\d-]+ [\d:]+ \[[^\]]*\] )?")


class ProcessDied(RuntimeError):
    """A process that a worker cannot do without, its engine's for one, has ended; the worker is of no use any more.

    `echo`: from the log line with this text on, the worker's log says nothing new.
    """

    def __init__(self, message: str, echo: str = "") -> None:
        super().__init__(message)
        self.echo = echo


def oom_kills() -> int:
    """Processes on this machine that its kernel has ended for want of memory since it started; 0 where it's unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def describe_exit(code: int | None, oom_kills_before: int) -> str:
    """How a process on this machine ended, e.g. "was ended by SIGKILL; …"; `code` as in `Popen.returncode`."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    text = f"was ended by {signal.Signals(-code).name}"
    return f"{text}; {blame_memory(oom_kills_before)}" if code == -signal.SIGKILL else text


def blame_memory(oom_kills_before: int) -> str:
    """What a process of this machine that was killed from outside may have died of."""
    memory = psutil.virtual_memory()
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB are free now"
    if oom_kills() > oom_kills_before:
        return f"this machine ran out of memory: the kernel's OOM killer has struck since the run began ({free})"
    return f"the kernel's OOM killer has not struck ({free}), so perhaps a memory limit of the job, or somebody"


def last_lines(text: str, count: int = LOG_LINES, *, frames: bool = True) -> list[str]:
    """The last useful lines of a log: no progress bars, empty lines, repetitions, stamps or control characters.

    frames: with those of tracebacks; without, what led to an error has room.
    """
    useful: dict[str, None] = {}
    for raw in text.splitlines():
        line = _STAMP.sub(r"\1: ", _COLOUR.sub("", raw).expandtabs(4)).rstrip()
        line = "".join(character for character in line if character.isprintable())
        if line and not _NOISE.search(line) and (frames or not _FRAME.match(line)):
            useful.pop(line, None)
            useful[line] = None
    return list(useful)[-count:]


def end_of_file(path: Path) -> str:
    """The last quarter of a megabyte of a text file."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - LOG_BYTES))
        return file.read().decode(errors="replace")
