"""Reward functions run apart, with a time limit; what fails is counted, what is stuck is replaced, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_lite.rewards.pool import (
    RewardError,
    RewardFunction,
    RewardPool,
    RewardResult,
    RewardSample,
    check_reward_function,
)

ROOT = Path(__file__).parents[2]

Score = Callable[..., list[RewardResult]]


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Score responses "0", "1", … with a function of the given body; `text` is the response."""

    def run(
        body: str,
        *,
        count: int = 8,
        on_error: str = "raise",
        timeout_s: float = 30,
        is_async: bool = False,
        **kwargs: Any,
    ):
        path = tmp_path / "reward.py"
        path.write_text(
            ("async " if is_async else "")
            + "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
            + "    text = solution_str\n"
            + textwrap.indent(textwrap.dedent(body), "    ")
        )
        function = RewardFunction(str(path), kwargs=kwargs)
        with RewardPool(function, num_workers=2, timeout_s=timeout_s, on_error=on_error) as pool:
            return pool.score([RewardSample("source", str(i), "truth", {"index": i}) for i in range(count)])

    return run


def scores(results: list[RewardResult]) -> list[float | None]:
    return [result.score for result in results]


def processes_with(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_results_come_in_the_order_of_the_samples(score: Score, is_async: bool):
    results = score("return int(text) / 2 + extra_info['index']", count=100, is_async=is_async)
    assert scores(results) == [1.5 * i for i in range(100)]


def test_async_samples_wait_at_the_same_time(score: Score):
    start = time.monotonic()
    score("import asyncio; await asyncio.sleep(0.5); return 1", count=40, is_async=True)
    assert time.monotonic() - start < 10  # one after the other: 40 * 0.5 s = 20 s, half of it in each of two processes


@pytest.mark.parametrize(
    "value, expected",
    [
        ("0.0", 0.0),
        ("True", 1.0),
        ("1", 1.0),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.bool_(True)", 1.0),
        ("torch.tensor(0.5)", 0.5),
    ],
)
def test_numbers_of_every_kind_are_scores(score: Score, value: str, expected: float):
    module = value.partition(".")[0] if "(" in value else "math"
    assert scores(score(f"import {module}\nreturn {value}", count=2)) == [expected] * 2


@pytest.mark.parametrize(
    "value, message",
    [
        ("'0.5'", "returned str '0.5'"), ("[0.5]", r"returned list \[0.5\]"), ("float('nan')", "returned nan"),
        ("1e39", "returned 1e[+]39"),
        ("{'acc': 1}", r"without 'score'; its keys: \['acc'\]"), ("{'score': '1'}", "returned str '1'"),
    ],
)  # fmt: skip
def test_other_values_are_errors(score: Score, value: str, message: str):
    with pytest.raises(RewardError, match=message):
        score(f"return {value}")


def test_a_dict_gives_further_values(score: Score):
    results = score("return {'score': 0, 'acc': True, 'pred': text, 'parts': [1]}", count=2)
    assert results[1].score == 0.0
    assert results[1].extra == {"acc": True, "pred": "1", "parts": "[1]"}


def test_none_is_no_score_and_no_error(score: Score):
    results = score("return None if text == '1' else int(text)", count=3)
    assert scores(results) == [0.0, None, 2.0]
    assert results[1].error is None


def test_none_for_every_sample_is_an_error(score: Score):
    with pytest.raises(RewardError, match="none of 8 samples has a score"):
        score("return None")


FAILURES = {
    "exception": ("if text == '3': 1 / 0\nreturn 1", "ZeroDivisionError"),
    "exit": ("import sys\nif text == '3': sys.exit(1)\nreturn 1", "SystemExit"),
    "death": ("import os\nif text == '3': os._exit(7)\nreturn 1", "exited with code 7"),
    "kill": ("import os\nif text == '3': os.kill(os.getpid(), 9)\nreturn 1", "ended by SIGKILL"),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("body, reason", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("on_error, expected", [("zero", 0.0), ("mask", None)])
def test_one_failing_sample_is_scored_by_the_policy(
    score: Score, body: str, reason: str, on_error: str, expected: float | None, is_async: bool
):
    results = score(body, on_error=on_error, is_async=is_async)
    assert scores(results) == [1, 1, 1, expected, 1, 1, 1, 1]
    assert [bool(result.error) for result in results] == [False] * 3 + [True] + [False] * 4
    assert reason in (results[3].error or "") and not results[3].timed_out


@pytest.mark.parametrize("body, reason", FAILURES.values(), ids=FAILURES)
def test_one_failing_sample_stops_under_raise(score: Score, body: str, reason: str):
    with pytest.raises(RewardError, match=r"sample 3 \(data_source 'source', response '3'\)") as caught:
        score(body)
    assert reason in str(caught.value)


@pytest.mark.parametrize("on_error", ["zero", "mask"])
def test_failing_for_every_sample_always_stops(score: Score, on_error: str):
    with pytest.raises(RewardError, match="failed for every sample"):
        score("1 / 0", on_error=on_error)


STUCK = {
    "sleep": ("import time\nif text == '3': time.sleep(3600)\nreturn 1", False),
    "await": ("import asyncio\nif text == '3': await asyncio.sleep(3600)\nreturn 1", True),
    "blocked event loop": ("import time\nif text == '3': time.sleep(3600)\nreturn 1", True),
    # Holds the interpreter lock: no thread and no signal handler of the process gets a turn.
    "regular expression": ("import re\nif text == '3': re.match('(a+)+$', 'a' * 40 + 'b')\nreturn 1", False),
}


@pytest.mark.parametrize("on_error, expected", [("raise", 0.0), ("zero", 0.0), ("mask", None)])
def test_a_stuck_sample_ends_at_its_limit(score: Score, on_error: str, expected: float | None):
    start = time.monotonic()
    results = score(STUCK["sleep"][0], on_error=on_error, timeout_s=1)
    assert time.monotonic() - start < 11
    assert scores(results) == [1, 1, 1, expected, 1, 1, 1, 1]
    assert [result.timed_out for result in results] == [False] * 3 + [True] + [False] * 4


@pytest.mark.parametrize("body, is_async", STUCK.values(), ids=STUCK)
def test_every_way_of_being_stuck_ends(score: Score, body: str, is_async: bool):
    results = score(body, timeout_s=1, is_async=is_async)
    assert [result.timed_out for result in results] == [False] * 3 + [True] + [False] * 4


def test_when_all_run_out_of_time_it_stops_long_before_the_last(score: Score):
    with pytest.raises(RewardError, match="the first 4 samples all ran out of time"):
        score("import time; time.sleep(3600)", count=500, timeout_s=0.5)


def test_reward_kwargs_arrive(score: Score):
    assert scores(score("return kwargs['factor'] * int(text)", count=3, factor=2.5)) == [0.0, 2.5, 5.0]


def test_two_files_with_the_same_function_name_stay_apart(tmp_path: Path):
    found = []
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        path = tmp_path / str(value) / "reward.py"
        path.write_text(
            f"def compute_score(data_source, solution_str, ground_truth, extra_info=None): return {value}\n"
        )
        with RewardPool(RewardFunction(str(path)), num_workers=1, timeout_s=9, on_error="raise") as pool:
            found += scores(pool.score([RewardSample("", "", "", {})]))
    assert found == [1, 2]


GOOD = "def score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0): return 1\n"


@pytest.mark.parametrize(
    "source, name, kwargs, message",
    [
        (None, "score", {}, "there is no file .*reward.py"),
        (GOOD, "compute_score", {}, "no 'compute_score' in .*It defines: score"),
        ("def score(:\n", "score", {}, "syntax error in .*reward.py, line 1"),
        ("import not_there\n", "score", {}, "line 1 raised ModuleNotFoundError"),
        (GOOD, "score", {"bnus": 1}, r"score of .*reward.py cannot be called with .*reward_kwargs \['bnus'\]"),
        ("def score(text): return 1\n", "score", {}, "cannot be called with data_source, solution_str"),
        ("import os; os._exit(3)\n", "score", {}, "the process that loads .* exited with code 3"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_found_at_start(
    source: Any, name: str, kwargs: dict, message: str, tmp_path: Path
):
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ValueError, match=message):
        check_reward_function(RewardFunction(str(path), name, kwargs))


def test_a_usable_function_passes_and_its_helpers_are_found(tmp_path: Path):
    (tmp_path / "reward_helper.py").write_text("VALUE = 1\n")
    (tmp_path / "reward.py").write_text("from reward_helper import VALUE\n" + GOOD)
    check_reward_function(RewardFunction(str(tmp_path / "reward.py"), "score", {"bonus": 1}))


def test_a_function_that_never_loads_runs_into_the_start_limit(tmp_path: Path):
    (tmp_path / "reward.py").write_text("import time; time.sleep(3600)\n")
    with pytest.raises(ValueError, match="took over 1 s"):
        check_reward_function(RewardFunction(str(tmp_path / "reward.py")), start_timeout_s=1)


def test_the_process_knows_nothing_of_the_driver(score: Score):
    loaded = "import sys\nreturn sum(name in sys.modules for name in ('torch', 'ray', 'vllm', 'numpy', 'pytest'))"
    assert scores(score(loaded, count=2)) == [0.0, 0.0]


def test_what_it_prints_goes_to_the_log(tmp_path: Path):
    (tmp_path / "reward.py").write_text("print('loaded here', flush=True)\n" + GOOD)
    log = tmp_path / "reward.log"
    with RewardPool(
        RewardFunction(str(tmp_path / "reward.py"), "score"),
        num_workers=1,
        timeout_s=9,
        on_error="raise",
        log_path=str(log),
    ) as pool:
        pool.wait_ready()
    assert "loaded here" in log.read_text()


def test_never_more_processes_than_cores(tmp_path: Path):
    with RewardPool(RewardFunction(), num_workers=64, timeout_s=9, on_error="raise") as pool:
        pool.start()
        assert len(pool._workers) == min(64, len(os.sched_getaffinity(0)))


def test_closing_ends_the_processes_and_what_they_started(tmp_path: Path):
    (tmp_path / "reward.py").write_text("import subprocess; subprocess.Popen(['sleep', '3456.78'])\n" + GOOD)
    with RewardPool(
        RewardFunction(str(tmp_path / "reward.py"), "score"), num_workers=1, timeout_s=9, on_error="raise"
    ) as pool:
        pool.wait_ready()
        assert processes_with("sleep 3456.78")
        pids = [worker.process.pid for worker in pool._workers]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    deadline = time.monotonic() + 5
    while processes_with("sleep 3456.78") and time.monotonic() < deadline:
        time.sleep(0.05)  # killed; init has to collect it
    assert not [line for line in processes_with("sleep 3456.78") if "defunct" not in line]


@pytest.mark.parametrize(
    "body", ["time.sleep(3600)", "re.match('(a+)+$', 'a' * 40 + 'b')"], ids=["asleep", "holds the lock"]
)
def test_the_processes_end_with_a_killed_driver(tmp_path: Path, body: str):
    (tmp_path / "reward.py").write_text(
        f"import os, re, signal, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        # The processor time after which the kernel steps in, without waiting for it here.
        f"    signal.setitimer(signal.ITIMER_VIRTUAL, 1)\n    {body}\n"
    )
    driver = subprocess.Popen(
        [
            sys.executable, "-c",
            "from verl_lite.rewards.pool import *\n"
            f"function = RewardFunction({str(tmp_path / 'reward.py')!r})\n"
            "pool = RewardPool(function, num_workers=1, timeout_s=99, on_error='zero')\n"
            "pool.score([RewardSample('', '', '', {})])",
        ],
        cwd=ROOT,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(timeout=10)
    while _alive(worker) and time.monotonic() < deadline + 30:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_killed_between_two_batches_is_replaced_without_blame():
    samples = [RewardSample("verl_lite/addition", "1", "1", {})] * 8
    with RewardPool(RewardFunction(), num_workers=2, timeout_s=30, on_error="raise") as pool:
        pool.score(samples)
        for worker in [worker for worker in pool._workers if worker.ready]:
            worker.process.kill()
            worker.process.wait(timeout=10)
        assert scores(pool.score(samples)) == [1.0] * 8


def test_a_stopped_process_does_not_keep_the_driver_in_a_send_larger_than_the_socket_holds():
    text = "x" * 4_000_000
    with RewardPool(RewardFunction(), num_workers=1, timeout_s=1, on_error="mask") as pool:
        pool.wait_ready()
        os.kill(pool._workers[0].process.pid, signal.SIGSTOP)
        started = time.monotonic()
        first, second = pool.score([RewardSample("openai/gsm8k", text, "1", {})] * 2)
        assert first.timed_out and second.score == 0.0  # by the process that took its place
        assert time.monotonic() - started < 30
