from __future__ import annotations

import signal

import pytest

from verl_lite.distributed import deaths
from verl_lite.distributed.deaths import blame_memory, describe_exit, last_lines

LOG = (
    "(EngineCore pid=41) INFO 11-30 18:20:11 [core.py:10] waiting\n"
    "(EngineCore pid=41) ERROR 11-30 18:20:12 [core.py:99] Traceback\n"
    "\n"
    "Loading shards:  50%|#####     | 1/2 [00:00<00:00, 377.39it/s]\rLoading shards: 100%|##########| 2/2\n"
    '(EngineCore pid=41) ERROR 11-30 18:20:12 [core.py:99]   File "core.py", line 1\n'
    "again\n"
    "between\n"
    "again\n"
    "\x1b[31mred\x1b[0m and a bell\x07\n"
)


def test_the_last_lines_are_without_stamps_progress_repetitions_and_control_characters() -> None:
    lines = ["EngineCore: waiting", "EngineCore: Traceback", "between", "again", "red and a bell"]
    assert last_lines(LOG) == [*lines[:2], 'EngineCore:   File "core.py", line 1', *lines[2:]]
    assert last_lines(LOG, frames=False) == lines
    assert last_lines(LOG, 2) == ["again", "red and a bell"]


def test_an_exit_is_described_by_its_code_or_signal() -> None:
    assert describe_exit(3, 0) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV, 0) == "was ended by SIGSEGV"
    assert describe_exit(-signal.SIGKILL, 0).startswith("was ended by SIGKILL; ")


@pytest.mark.parametrize(("kills", "words"), [(4, "has not struck"), (5, "ran out of memory: the kernel's OOM killer")])
def test_memory_is_blamed_when_the_kernel_has_killed_since(
    kills: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "oom_kills", lambda: kills)
    assert words in blame_memory(4)
