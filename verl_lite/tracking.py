"""Where a run's numbers go: `metrics.jsonl` always, and the trackers named in `trainer.logger`.

A tracker that fails warns once and the run goes on; a tracker whose package is missing is refused before the run starts
(`check_loggers`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

logger = logging.getLogger(__name__)

# Logger name → the package it needs. "file" is metrics.jsonl, which is always written.
PACKAGES: dict[str, str | None] = {
    "console": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}

# What MLflow keeps a local store with; a server's address in MLFLOW_TRACKING_URI needs none of it.
MLFLOW_STORE = ("sqlalchemy", "alembic")
START_S, LOG_S, FINISH_S = 60.0, 10.0, 60.0
"""Longest waits for a tracker that talks to a server: a dead network must not hold up training, nor its end."""

FAILURES_IN_A_ROW = 3
"""After so many a tracker is left alone: one that times out at every step would slow the run down."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise one ValueError for all the names of `trainer.logger` that are unknown or lack their package."""
    problems = []
    for name in names:
        if name not in PACKAGES:
            problems.append(f"trainer.logger has {name!r}; known are {', '.join(PACKAGES)}")
        elif (package := PACKAGES[name]) is not None and importlib.util.find_spec(package) is None:
            problems.append(f"trainer.logger has {name!r}: run pip install {package} first, or leave it out")
        elif name == "mlflow" and (lacking := _lacking_for_mlflow()):
            problems.append(
                f"trainer.logger has 'mlflow', whose local store needs {' and '.join(lacking)}: run pip install "
                f"{' '.join(lacking)}, or name a server in MLFLOW_TRACKING_URI"
            )
    if problems:
        raise ValueError("; ".join(problems))


def _lacking_for_mlflow() -> list[str]:
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return []
    return [needed for needed in MLFLOW_STORE if importlib.util.find_spec(needed) is None]


def printable(text: str) -> str:
    """The text with control characters spelled out: what data or a model wrote must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class Tracker(Protocol):
    """One place that metrics go to. `log` gets finite numbers only."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class Tracking:
    """Sends each step's metrics to `run_dir/metrics.jsonl` and to the named trackers.

    `config` is what trackers store beside the run; secrets must be redacted already. `total_steps` and
    `updates_per_step` (the plan's optimizer steps) are what the console shows progress against. `first_step`:
    what was logged from that step on, by a run that went back since, is not to be shown any more; None: all is.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        run_dir: str | os.PathLike[str],
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        *,
        total_steps: int | None = None,
        updates_per_step: int | None = None,
        first_step: int | None = None,
    ) -> None:
        check_loggers(loggers)
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = JsonLines(folder / "metrics.jsonl")
        builders: dict[str, Callable[[], Tracker]] = {
            "console": lambda: Console(total_steps, updates_per_step),
            "tensorboard": lambda: TensorBoard(folder / "tensorboard", first_step),
            "wandb": lambda: InThread(lambda: _wandb(folder, project_name, experiment_name, config)),
            "mlflow": lambda: InThread(lambda: MLflow(folder, project_name, experiment_name, config)),
            "swanlab": lambda: InThread(lambda: _swanlab(folder, project_name, experiment_name, config)),
            "trackio": lambda: InThread(lambda: _trackio(project_name, experiment_name, config)),
        }
        self._trackers: dict[str, Tracker] = {}
        self._warned: set[str] = set()
        self._failures: dict[str, int] = {}
        for name in dict.fromkeys(loggers):
            if name == "file":
                continue
            try:
                self._trackers[name] = builders[name]()
            except Exception as error:
                self._warn(name, "start", error)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the metrics of one step. Numbers may be plain, NumPy's or torch's; NaN and infinity become null."""
        plain = {key: _plain(value) for key, value in metrics.items()}
        self._jsonl.log(plain, step)
        numbers = {key: float(v) for key, v in plain.items() if isinstance(v, int | float)}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, step)
                self._failures[name] = 0
            except Exception as error:
                self._warn(name, f"log step {step}", error)
                self._failures[name] = self._failures.get(name, 0) + 1
                if self._failures[name] >= FAILURES_IN_A_ROW:
                    logger.warning("%s failed %d times in a row: left out from now on", name, FAILURES_IN_A_ROW)
                    del self._trackers[name]

    def finish(self) -> None:
        """Close every tracker, in at most `FINISH_S` together. May be called more than once."""
        closing = {
            name: threading.Thread(target=self._finish, args=(name, tracker), daemon=True)
            for name, tracker in self._trackers.items()
        }
        self._trackers = {}
        for thread in closing.values():
            thread.start()
        deadline = time.monotonic() + FINISH_S
        for name, thread in closing.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._warn(name, "finish", TimeoutError(f"not within {FINISH_S:g} s"))
        self._jsonl.finish()

    def _finish(self, name: str, tracker: Tracker) -> None:
        try:
            tracker.finish()
        except Exception as error:
            self._warn(name, "finish", error)

    def _warn(self, name: str, doing: str, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s could not %s (%s: %s); the run goes on", name, doing, type(error).__name__, error)


def _plain(value: Any) -> Any:
    """Python's own numbers, strings, lists and None; NaN and infinity become None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    # NumPy scalars and arrays and torch tensors, without importing torch for a question.
    to_list = getattr(value, "tolist", None)
    return _plain(to_list()) if to_list is not None else str(value)


class JsonLines:
    """One JSON object per step: `{"step": 3, "time": 1712.5, "<metric>": value, ...}`.

    A resumed run appends. Where the step goes back, the run went back, and the lines above with that step or a later
    one do not count any more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            # A full disk or a crash of the machine tore the last line.
            content = os.pread(self._file, size, 0)
            os.ftruncate(self._file, content.rfind(b"\n") + 1)

    def log(self, plain: Mapping[str, Any], step: int) -> None:
        line = json.dumps({"step": step, "time": round(time.time(), 3), **plain}, allow_nan=False) + "\n"
        # One write of the whole line: whatever kills the process, the file holds whole lines. Only a full disk takes a
        # part, and says so when it is given the rest.
        rest = line.encode()
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, in trainer.run_dir", str(self._path)) from error

    def finish(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Console:
    """One readable line a step; on a terminal also a progress bar with the remaining time.

    `step 12/40  reward 0.734  updates 4/4  kl 0.0012  entropy 1.230  grad 0.84  length 3.5  1.2 s  eta 0:34`, and
    `val acc 0.812` where there was a validation.
    """

    def __init__(
        self, total_steps: int | None = None, updates_per_step: int | None = None, stream: TextIO | None = None
    ) -> None:
        self._total_steps = total_steps
        self._updates_per_step = updates_per_step
        self._recent_s: deque[float] = deque(maxlen=10)
        self._last_log: float | None = None
        self._console = RichConsole(file=stream)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[eta]}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=total_steps, eta="")
            self._bar.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = time.monotonic()
        if self._last_log is not None:
            self._recent_s.append(now - self._last_log)
        self._last_log = now
        eta = ""
        if self._recent_s and self._total_steps and step < self._total_steps:
            eta = f"eta {_duration(sum(self._recent_s) / len(self._recent_s) * (self._total_steps - step))}"
        parts = [*self._training_parts(metrics, step), eta, *_validation_parts(metrics)]
        # Names are the user's: no markup. soft_wrap: a step stays one line, whatever the width.
        line = printable("  ".join(part for part in parts if part))
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, eta=eta)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _training_parts(self, metrics: Mapping[str, float], step: int) -> Iterator[str]:
        yield f"step {step}/{self._total_steps}" if self._total_steps else f"step {step}"
        planned = f"/{self._updates_per_step}" if self._updates_per_step else ""
        to_ref = "actor/kl_loss" if "actor/kl_loss" in metrics else "actor/reward_kl_penalty"
        kl = ("kl {}", to_ref, _short) if to_ref in metrics else ("ppo_kl {}", "actor/ppo_kl", _short)
        for text, key, shown in (
            ("reward {}", "critic/score/mean", "{:.3f}".format),
            (f"updates {{}}{planned}", "training/optimizer_steps", "{:g}".format),
            ("skipped {}", "training/skipped_steps", "{:g}".format),
            ("empty {}", "training/empty_steps", "{:g}".format),
            kl,
            ("entropy {}", "actor/entropy", "{:.3f}".format),
            ("grad {}", "actor/grad_norm", "{:.3g}".format),
            ("length {}", "response_length/mean", "{:.1f}".format),
            ("{} s", "timing_s/step", "{:.1f}".format),
        ):
            if key in metrics and (metrics[key] or not key.endswith(("skipped_steps", "empty_steps"))):
                yield text.format(shown(metrics[key]))


def _validation_parts(metrics: Mapping[str, float]) -> Iterator[str]:
    matches = ((re.fullmatch(r"val-core/(.+)/([^/]+)/mean@\d+", key), value) for key, value in metrics.items())
    found = [(match[1], match[2], value) for match, value in matches if match]
    for source, name, value in found:
        yield f"val {name} {value:.3f}" if len(found) == 1 else f"val {source} {name} {value:.3f}"


def _short(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TensorBoard:
    """Scalars in `run_dir/tensorboard`; what former processes logged from `first_step` on is shown no more."""

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class InThread:
    """A tracker whose calls run in one thread of its own, each with a time limit."""

    def __init__(self, build: Callable[[], Tracker]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._running: Future[Any] | None = None
        threading.Thread(target=self._serve, daemon=True, name="tracker").start()
        self._tracker: Tracker = self._call(build, START_S)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call(lambda: self._tracker.log(metrics, step), LOG_S)

    def finish(self) -> None:
        self._call(self._tracker.finish, FINISH_S)

    def _call(self, function: Callable[[], Any], limit_s: float) -> Any:
        if self._running is not None and not self._running.done():
            raise TimeoutError("still busy with the call before")
        self._running = Future()
        self._calls.put((function, self._running))
        try:
            return self._running.result(limit_s)
        except TimeoutError:
            if self._running.done():
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from None

    def _serve(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class _Run:
    """wandb, swanlab and trackio end alike: a `log(dict, step=)` and a `finish()`."""

    def __init__(self, log: Callable[..., Any], finish: Callable[[], Any]) -> None:
        self._log, self._finish = log, finish

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._log(dict(metrics), step=step)

    def finish(self) -> None:
        self._finish()


def _wandb(folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> Tracker:
    import wandb

    # Neither the command line nor what is printed: both may hold secrets and the data's text.
    settings = wandb.Settings(x_disable_meta=True, console="off", init_timeout=START_S)
    run = wandb.init(project=project, name=experiment, config=dict(config), dir=str(folder), settings=settings)
    return _Run(run.log, run.finish)


def _swanlab(folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> Tracker:
    import swanlab

    swanlab.init(project=project, experiment_name=experiment, config=dict(config), logdir=str(folder / "swanlab"))
    return _Run(swanlab.log, swanlab.finish)


def _trackio(project: str, experiment: str, config: Mapping[str, Any]) -> Tracker:
    import trackio

    trackio.init(project=project, name=experiment, config=dict(config))
    return _Run(trackio.log, trackio.finish)


class MLflow:
    """A run in the experiment `project`, on the server of MLFLOW_TRACKING_URI, else in `run_dir/mlflow.db`."""

    NAME_REFUSED = re.compile(r"[^\w\-. :/]")
    PARAMS_PER_CALL, METRICS_PER_CALL, PARAM_LENGTH = 100, 1000, 500  # limits of MLflow's REST interface

    def __init__(self, folder: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        known = self._client.get_experiment_by_name(project)
        experiment_id = known.experiment_id if known else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment_id, run_name=experiment).info.run_id
        params = [Param(key, value[: self.PARAM_LENGTH]) for key, value in _flat(config)]
        for start in range(0, len(params), self.PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + self.PARAMS_PER_CALL])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        points = [self._metric(self._name(key), value, now_ms, step) for key, value in metrics.items()]
        for start in range(0, len(points), self.METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=points[start : start + self.METRICS_PER_CALL])

    def _name(self, key: str) -> str:
        """Neither @ nor brackets, and no part between slashes that a file system would drop: "", "." or ".."."""
        name = self.NAME_REFUSED.sub("_", key.replace("@", "_at_"))
        return "/".join(part if part.strip(".") else part + "_" for part in name.split("/"))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
