"""Where the numbers go, and that no tracker can end a run."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite import tracking
from verl_lite.tracking import Console, Tracking, check_loggers


def open_tracking(folder: Path, *loggers: str, **options: Any) -> Tracking:
    return Tracking(loggers, folder, "project", "experiment", {"trainer": {"nnodes": 1}}, **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- names ----------------------------------------------------------------------------------------------------------


def test_unknown_names_and_missing_packages_are_one_error() -> None:
    with pytest.raises(ValueError, match="'consol'; known are console.*'swanlab': run pip install swanlab first"):
        check_loggers(["consol", "swanlab"])
    check_loggers(["console", "file", "tensorboard"])


def test_a_missing_package_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install trackio"):
        open_tracking(tmp_path / "run", "console", "trackio")
    assert not (tmp_path / "run").exists()


# --- metrics.jsonl --------------------------------------------------------------------------------------------------


def test_every_kind_of_number_becomes_one_line_of_json(tmp_path: Path) -> None:
    tracking = open_tracking(tmp_path)
    metrics = {
        "float32": np.float32(0.5),
        "int64": np.int64(3),
        "torch": torch.tensor(2.5),
        "torch_vector": torch.tensor([1, 2]),
        "nan": float("nan"),
        "infinite": torch.tensor(float("inf")),
        "numpy_nan": np.float64("nan"),
        "none": None,
        "nested": [[np.int64(1), float("nan")], (2,)],
        "flag": np.bool_(True),
        "text": "a\nb",
    }
    tracking.log(metrics, 7)
    tracking.finish()
    (line,) = lines(tmp_path)
    assert abs(line.pop("time") - time.time()) < 60
    assert line == {
        "step": 7, "float32": 0.5, "int64": 3, "torch": 2.5, "torch_vector": [1, 2], "nan": None, "infinite": None,
        "numpy_nan": None, "none": None, "nested": [[1, None], [2]], "flag": True, "text": "a\nb",
    }  # fmt: skip


def test_the_file_is_valid_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom verl_lite.tracking import Tracking\n"
        "tracking = Tracking([], sys.argv[1], 'p', 'e', {})\n"
        "for step in range(10**9):\n    tracking.log({f'metric/{i}': i * 0.5 for i in range(200)}, step)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1])
    deadline = time.monotonic() + 60
    file = tmp_path / "metrics.jsonl"
    while not (file.exists() and file.stat().st_size > 100_000):
        assert time.monotonic() < deadline and process.poll() is None, "the writer wrote nothing"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert [line["step"] for line in lines(tmp_path)] == list(range(len(lines(tmp_path))))


def test_a_resumed_run_appends_and_cuts_a_torn_line_away(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "los')
    tracking = open_tracking(tmp_path)
    tracking.log({}, 2)
    tracking.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


# --- trackers that fail ---------------------------------------------------------------------------------------------


class Fake:
    """A stand-in for the trackio package."""

    def __init__(self, *, failing_steps: range = range(0), fail_start: bool = False) -> None:
        self.failing_steps, self.fail_start = failing_steps, fail_start
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.attempts: list[int] = []
        self.finished = 0

    def init(self, **options: Any) -> Fake:
        if self.fail_start:
            raise PermissionError("no key")
        self.options = options
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.attempts.append(step)
        if step in self.failing_steps:
            raise ConnectionError("gone")
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


def install(monkeypatch: pytest.MonkeyPatch, name: str, fake: Fake) -> Fake:
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    module.init, module.log, module.finish = fake.init, fake.log, fake.finish  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_a_tracker_that_raises_warns_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    fake = install(monkeypatch, "trackio", Fake(failing_steps=range(2, 4)))
    tracking = open_tracking(tmp_path, "trackio", "console")
    for step in range(1, 6):
        tracking.log({"critic/score/mean": 0.5}, step)
    tracking.finish()
    assert [record.message for record in caplog.records] == [
        "trackio could not log step 2 (ConnectionError: gone); the run goes on"
    ]
    assert [step for step, _ in fake.logged] == [1, 4, 5] and fake.finished == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_tracker_that_keeps_failing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = install(monkeypatch, "trackio", Fake(failing_steps=range(100)))
    tracking = open_tracking(tmp_path, "trackio")
    for step in range(10):
        tracking.log({}, step)
    tracking.finish()
    assert fake.attempts == [0, 1, 2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_a_tracker_that_cannot_start_warns_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "trackio", Fake(fail_start=True))
    (tmp_path / "tensorboard").write_text("not a folder")
    tracking = open_tracking(tmp_path, "trackio", "tensorboard")
    tracking.log({"x": 1}, 1)
    tracking.finish()
    tracking.finish()
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "trackio could not start",
        "tensorboard could not start",
    ]
    assert lines(tmp_path)[0]["x"] == 1


def test_a_full_disk_is_named_and_what_it_took_of_a_line_is_cut_at_the_next_start(tmp_path: Path) -> None:
    tracking = open_tracking(tmp_path)
    tracking.log({"x": 1}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large, in trainer.run_dir: '.*metrics.jsonl'"):
            tracking.log({"x": 2}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1] == '{"step": 2'
    tracking.finish()
    open_tracking(tmp_path).log({"x": 3}, 2)
    assert [line["x"] for line in lines(tmp_path)] == [1, 3]


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swanlab", "trackio"])
def test_trackers_get_names_config_and_finite_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake = install(monkeypatch, name, Fake())
    tracking = open_tracking(tmp_path, name)
    tracking.log({"val-core/x/acc/mean@1": torch.tensor(0.5), "nan": float("nan"), "text": "x", "n": np.int64(2)}, 3)
    tracking.finish()
    assert fake.logged == [(3, {"val-core/x/acc/mean@1": 0.5, "n": 2.0})] and fake.finished == 1
    assert fake.options["project"] == "project" and fake.options["config"] == {"trainer": {"nnodes": 1}}
    assert "experiment" in (fake.options.get("name"), fake.options.get("experiment_name"))


METRICS = {
    "val-core/x (y)/acc/mean@1": torch.tensor(0.5), "f32": np.float32(0.25), "n": np.int64(2), "nan": float("nan"),
    "torch_nan": torch.tensor(float("nan")), "text": "not a number",
}  # fmt: skip


def test_wandb_offline_gets_the_numbers_but_neither_command_line_nor_console(tmp_path: Path) -> None:
    code = """
import sys
from test_tracking import METRICS, open_tracking
tracking = open_tracking(sys.argv[1], "wandb")
for step in (1, 2):
    print("what a model wrote")
    tracking.log(METRICS, step)
tracking.finish()
"""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path), "trainer.secret=hunter2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "could not" not in done.stderr
    (store,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"hunter2" not in written and b"what a model wrote" not in written
    stored = store.read_bytes()
    assert all(name in stored for name in (b"val-core/x (y)/acc/mean@1", b"f32", b"nnodes"))
    assert b"torch_nan" not in stored
    assert [line["n"] for line in lines(tmp_path)] == [2, 2] and lines(tmp_path)[0]["nan"] is None


def test_mlflow_writes_into_a_store_of_its_own_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = open_tracking(tmp_path, "mlflow")
    tracking.log(METRICS, 1)
    tracking.log({**METRICS, "f32": 0.75, "val-core/http://./../x/acc/mean@1": 1.0}, 2)
    tracking.finish()
    assert "could not" not in caplog.text
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    # Its names may hold neither @ nor parentheses.
    strange = {"val-core/http:/_/._/.._/x/acc/mean_at_1": 1.0}
    assert run.data.metrics == {"val-core/x _y_/acc/mean_at_1": 0.5, "f32": 0.75, "n": 2.0} | strange
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "f32")] == [(1, 0.25), (2, 0.75)]
    assert run.data.params == {"trainer.nnodes": "1"}
    assert (run.info.run_name, run.info.status) == ("experiment", "FINISHED")


def test_mlflow_without_its_local_store_is_refused_unless_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "alembic" else there(name))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="'mlflow', whose local store needs alembic: run pip install alembic"):
        check_loggers(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    check_loggers(["mlflow"])


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    fake = install(monkeypatch, "trackio", Fake())
    monkeypatch.setattr(tracking, "LOG_S", 0.2)
    tracker = open_tracking(tmp_path, "trackio")
    monkeypatch.setattr(sys.modules["trackio"], "log", lambda metrics, step: released.wait(30))
    tracker._trackers["trackio"]._tracker._log = sys.modules["trackio"].log  # type: ignore[attr-defined]
    started = time.monotonic()
    for step in range(5):
        tracker.log({"x": 1}, step)
    tracker.finish()
    assert time.monotonic() - started < 2  # one wait of 0.2 s; the steps after it find the tracker busy
    released.set()
    assert "trackio could not log step 0 (TimeoutError: no answer within 0.2 s); the run goes on" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4] and fake.finished == 0


def test_tensorboard_keeps_the_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = open_tracking(tmp_path, "tensorboard")
    tracking.log({"val-core/x/acc/mean@1": 0.5}, 4)
    tracking.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("val-core/x/acc/mean@1")] == [(4, 0.5)]


# --- console --------------------------------------------------------------------------------------------------------

STEP = {
    "critic/score/mean": 0.7344,
    "training/optimizer_steps": 4.0,
    "training/skipped_steps": 0.0,
    "training/empty_steps": 0.0,
    "actor/kl_loss": 0.0012,
    "actor/ppo_kl": 0.5,
    "actor/entropy": 1.23,
    "actor/grad_norm": 0.8412,
    "response_length/mean": 3.52,
    "timing_s/step": 1.24,
    "val-core/add/acc/mean@1": 0.8125,
}


def test_a_step_is_one_readable_line() -> None:
    stream = io.StringIO()
    console = Console(total_steps=40, updates_per_step=4, stream=stream)
    console.log(STEP, 12)
    console.finish()
    assert stream.getvalue() == (
        "step 12/40  reward 0.734  updates 4/4  kl 0.0012  entropy 1.230  grad 0.841  length 3.5  1.2 s  "
        "val acc 0.812\n"
    )


def test_the_line_shows_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(total_steps=40, updates_per_step=4, stream=stream)
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console.log({"val-core/add/acc/mean@1": 0.5, "val-core/b/reward/mean@4": 0.25, "val-aux/b/x/mean@4": 1.0}, 0)
    console.log({"actor/ppo_kl": 1e-5, "training/optimizer_steps": 3, "training/skipped_steps": 1}, 1)
    assert stream.getvalue().splitlines() == [
        "step 0/40  val add acc 0.500  val b reward 0.250",
        "step 1/40  updates 3/4  skipped 1  ppo_kl 1.0e-05  eta 1:57",  # 39 steps · 3 s
    ]


def test_names_are_not_read_as_markup() -> None:
    stream = io.StringIO()
    Console(stream=stream).log({"val-core/[red]:smile:/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.5}, 1)
    assert stream.getvalue() == "step 1  val [red]:smile: acc 0.500  val b acc 0.500\n"


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    stream = Terminal()
    console = Console(total_steps=2, stream=stream)
    console.log(STEP, 1)
    console.log(STEP, 2)
    console.finish()
    assert "step 1/2  reward" in stream.getvalue() and "2/2" in stream.getvalue() and "━" in stream.getvalue()


def test_folders_and_files_are_not_writable_by_others(tmp_path: Path) -> None:
    open_tracking(tmp_path / "run").finish()
    for path in (tmp_path / "run", tmp_path / "run" / "metrics.jsonl"):
        assert os.stat(path).st_mode & 0o002 == 0


def test_a_tracker_that_does_not_finish_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    tracker: Any = types.SimpleNamespace(finish=release.wait)
    monkeypatch.setattr(tracking, "FINISH_S", 0.2)
    run = Tracking([], tmp_path, "project", "experiment", {})
    run._trackers["wandb"] = tracker
    started = time.monotonic()
    run.finish()
    assert time.monotonic() - started < 5
    assert "wandb could not finish (TimeoutError: not within 0.2 s)" in caplog.text
    release.set()
