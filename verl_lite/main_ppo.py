"""`python -m verl_lite.main_ppo [--config-name NAME] key=value …`: train.

Compose and check the config, print the plan, read the data while Ray starts, then `trainer.ppo.run`. Whatever ends the
run, none of its processes is left. Exit codes: 0 done, 2 refused before start, 75 stopped early by a signal with
everything saved, 130 interrupted, 1 any other failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO, cast

from verl_lite.batching import BatchPlan
from verl_lite.cli import ConfigError, open_streams, tell
from verl_lite.config import Config, flatten, redacted, secrets_of, without_secrets
from verl_lite.inputs import input_problems
from verl_lite.plan import compose_plan
from verl_lite.tracking import printable
from verl_lite.trainer.checkpoints import LOCK, claim, resume_problems
from verl_lite.trainer.stopping import StoppedEarly, StopRequest

logger = logging.getLogger(__name__)

DONE, FAILED, REFUSED, SAVED, INTERRUPTED = 0, 1, 2, 75, 130
CLEANUP_S = 25.0  # from the first Ctrl-C to the shell, at the latest
AUTO = "trainer.resume_mode=auto"
PREEMPTIONS = (signal.SIGTERM, signal.SIGUSR1)  # USR1: Slurm's warning, by custom
ECHO_S = 2.0  # `timeout`, `srun` and shells signal the process and then its group: that is one signal
BYTES_PER_TOKEN = 48  # of a batch: three columns of 8 bytes, six of 4
MIN_STORE_BYTES = 512 << 20


def main(argv: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        os.getcwd()
    except OSError as error:
        print(f"refused: the working folder cannot be read ({error}); cd to one that exists", file=sys.stderr)
        return REFUSED
    try:
        composed, plan = compose_plan(argv)
        config = composed.config
        if problems := input_problems(config) or resume_problems(config):
            raise ConfigError(problems, config)
    except ConfigError as error:
        tell(f"refused: {error}", error.config)
        return REFUSED
    for warning in composed.warnings:
        tell(f"warning: {warning}", config)
    print(plan.table(), flush=True)
    return _run(config, plan)


def _run(config: Config, plan: BatchPlan) -> int:
    # Ray, only once the config is good.
    from verl_lite.distributed.cluster import RayCluster, Watchdog, check_machine, wanted_address

    ray_init = config.ray_kwargs.ray_init
    errors, warnings = list[str](), list[str]()
    if wanted_address(ray_init.address) is None:
        errors, warnings = check_machine(config.num_slots, config.trainer.device)
    for name in ("trainer.run_dir", "trainer.default_local_dir"):
        folder = Path(flatten(config)[name])
        if "working_dir_files" in folder.parts and (name == "trainer.run_dir" or config.trainer.saves):
            warnings.append(f"{name}={folder} is in Ray's copy of the working folder, which goes with the job")
    for warning in warnings:
        tell(f"warning: {warning}", config)
    if errors:
        tell(f"refused: {'; '.join(errors)}", config)
        return REFUSED
    run_dir = Path(config.trainer.run_dir)
    log_dir, is_new = run_dir / "logs", not run_dir.exists()
    checkpoints, saving = Path(config.trainer.default_local_dir), contextlib.ExitStack()
    made_to_save = (checkpoints / LOCK, checkpoints, *checkpoints.parents) if config.trainer.saves else ()
    missing = [path for path in (*made_to_save, *run_dir.parents) if not path.exists()]
    os.umask(os.umask(0o022) | 0o022)  # whatever it was: what a run writes, others may at most read
    place = f"trainer.default_local_dir={checkpoints}"
    try:
        if config.trainer.saves:
            saving.enter_context(claim(checkpoints))
        place = f"trainer.run_dir={run_dir}"
        lock = _claim(run_dir)
        log_dir.mkdir(mode=0o700, exist_ok=True)  # workers and libraries may print anything
    except OSError as error:
        saving.close()
        _remove(missing)
        tell(f"refused: {place} cannot be used: {error}", config)
        return REFUSED
    signals = _Signals(config.trainer.preempt_grace_s, saving=config.trainer.save_freq > 0)
    with saving, lock, signals, (log_dir / "driver.log").open("a") as log:
        console = _log_to(log, secrets_of(config))
        watchdog = Watchdog(log_dir)
        cluster: RayCluster | None = None
        started = False
        try:
            cluster = RayCluster(
                num_slots=config.num_slots,
                ray_dir=watchdog.ray_dir,
                timeout_s=config.trainer.start_timeout_s,
                address=ray_init.address,
                num_cpus=ray_init.num_cpus,
                runtime_env=ray_init.runtime_env,
                object_store_bytes=_object_store_bytes(config, plan),
            )
            # Only now, while Ray starts: torch and transformers take seconds.
            from verl_lite.trainer.ppo import run
            from verl_lite.trainer.setup import load_data

            data = load_data(config)
            cluster.wait()
            from verl_lite.distributed.placement import ResourcePool

            pool = ResourcePool(
                num_nodes=config.trainer.nnodes,
                slots_per_node=config.trainer.n_gpus_per_node,
                device=config.trainer.device,
                timeout_s=config.trainer.start_timeout_s,
                paths=worker_paths(config),
            )
            # Not before: a refused run leaves what an earlier one has written here.
            (run_dir / "config.json").write_text(json.dumps(redacted(config), indent=2, default=str))
            (run_dir / "plan.json").write_text(json.dumps(plan.to_json(), indent=2, ensure_ascii=False))
            started = True
            run(config, plan, data, pool, log_dir, signals.stop)
            signals.finished(saved=config.trainer.save_freq > 0)
            code = DONE
        except BaseException as error:
            early = _stopped_early(error)
            signals.finished(saved=early is not None and early.saved is not None)
            if early is not None:
                mode = config.trainer.resume_mode
                way_on = "the same command goes on from there" + f" with {AUTO}" * (mode != "auto")
                way_on = way_on if early.saved else "trainer.save_freq is off"
                print(f"{early} ({way_on})", file=console)
                code = signals.exit_code
            elif signals.interrupting or isinstance(error, KeyboardInterrupt):
                print(f"\n{signals.reason}: ending the run's processes (again: at once)", file=console)
                code = signals.exit_code
            else:
                code = _report(error, started, console, log_dir)
        finally:
            if cluster is not None:
                cluster.close()
            watchdog.finish()
        if code == REFUSED:
            if is_new:
                shutil.rmtree(run_dir, ignore_errors=True)
            _remove(missing)
        return code


def worker_paths(config: Config) -> dict[str, str]:
    """Key → file or folder that the workers open, on whatever node they are."""
    flat = flatten(config)
    roles = {"actor_rollout_ref.model": True, "critic.model": config.needs_critic}
    roles["reward.reward_model.model"] = config.reward.reward_model.enable
    names = {f"{role}.path": flat[f"{role}.path"] for role, used in roles.items() if used}
    # A loss or engine of one's own: path/file.py:attribute
    plugins = ("actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.rollout.name")
    files = {name: flat[name].rpartition(":")[0] for name in plugins if ".py:" in flat[name]}
    if config.trainer.saves:  # what this run has put there: a folder of that name may be on each node's own disk
        files["trainer.default_local_dir"] = str(Path(config.trainer.default_local_dir, LOCK))
    return {name: path for name, path in names.items() if path and Path(path).is_dir()} | files


def _claim(run_dir: Path) -> TextIO:
    """Make the run folder and hold it as long as the file is open: the lines of two runs in one would mix."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise OSError("another run is using it; name another folder or trainer.experiment_name") from None
    return lock


def _remove(paths: Sequence[Path]) -> None:
    """Remove what was made for a run that was refused, unless it holds something else by now. Deepest first."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink() if path.name == LOCK else path.rmdir()


def _report(error: BaseException, started: bool, console: TextIO, log_dir: Path) -> int:
    """Say what went wrong; the traceback goes to the log when the message says it all."""
    from verl_lite.distributed.cluster import RayDied
    from verl_lite.distributed.worker_group import WorkerError
    from verl_lite.rewards.pool import RewardError
    from verl_lite.trainer.checkpoints import CheckpointError

    logger.error("the run failed", exc_info=error, extra={"log_only": True})
    if not started and isinstance(error, (ValueError, TypeError, OSError)) and not isinstance(error, TimeoutError):
        print(f"refused: {error}{_where(error)}", file=console)
        return REFUSED
    if not isinstance(error, (WorkerError, RayDied, RewardError, CheckpointError, TimeoutError)):
        traceback.print_exception(error, file=console)
    else:
        print(f"failed: {type(error).__name__}: {error}", file=console)
    print(f"logs: {log_dir}", file=console)
    return FAILED


def _where(error: BaseException) -> str:
    """The line an error of the system comes from when it names no file: of a socket, a pipe, the working folder."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return ""
    frame = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line][-1]  # not of a frozen module
    return f" (from `{frame.line}` in {frame.filename}:{frame.lineno})"


def _stopped_early(error: BaseException | None) -> StoppedEarly | None:
    """The `StoppedEarly` that `error` is, or that was on its way when `error` came between."""
    while error is not None and not isinstance(error, StoppedEarly):
        error = error.__context__
    return error


class _Signals:
    """What signals do to a run.

    SIGTERM and SIGUSR1 let the step under way be finished and saved, within `grace_s`. Before the first step, or when
    nothing is ever saved, they end the run like SIGINT and SIGHUP: by a KeyboardInterrupt, since only that passes
    through Ray's waits in one piece. A second signal ends the process at once; what it leaves, the watchdog ends.
    """

    def __init__(self, grace_s: float, *, saving: bool) -> None:
        self.stop = StopRequest()
        self._console = 2
        self.interrupting = self._saved = self._over = False
        self._grace_s, self._saving = grace_s, saving
        self._received: list[int] = []
        self._first_at = 0.0
        self._out_of_time = False
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> _Signals:
        self._console = os.dup(2)  # before standard error goes to the log
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGALRM, *PREEMPTIONS):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._console)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            self._out_of_time = True
            self._interrupt()
        known = {*self._received, number} <= set(PREEMPTIONS)
        if self._received and known and time.monotonic() - self._first_at < ECHO_S:
            return
        self._received.append(number)
        if len(self._received) > 1:
            os._exit(self.exit_code)
        self._first_at = time.monotonic()
        if self._over:
            return  # what is left is taking the run down, within limits of its own
        if not (known and self._saving and self.stop.in_steps):
            self._interrupt()
        self.stop.set()
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        text = f"{self._name}: the step under way is finished and saved first, for at most"
        # Not `print`: the handler may have come in the middle of one. Last: whoever should read it may have stopped.
        with contextlib.suppress(OSError):
            os.write(self._console, f"\n{text} trainer.preempt_grace_s={self._grace_s:g} s (again: at once)\n".encode())

    def finished(self, *, saved: bool) -> None:
        """The last step is over, and what it was worth is `saved` or not."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._saved, self._over = saved, True

    def _interrupt(self) -> NoReturn:
        self.interrupting = True
        # A library may swallow the exception, or hang while the run is taken down.
        limit = threading.Timer(CLEANUP_S, os._exit, (self.exit_code,))
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt

    @property
    def _name(self) -> str:
        return signal.Signals(self._received[0] if self._received else signal.SIGINT).name

    @property
    def reason(self) -> str:
        if self._out_of_time:
            return f"{self._name}, and the step was not saved within trainer.preempt_grace_s={self._grace_s:g} s"
        before = " before the first step" if self.exit_code == SAVED else ""
        return f"stopped by {self._name}{before}"

    @property
    def exit_code(self) -> int:
        """SAVED where nothing that was done is lost: also before the first step, if a run that saves is asked to go."""
        if self._saved:
            return SAVED
        if not self._received or signal.SIGINT in self._received:
            return INTERRUPTED
        waiting = self._saving and not self.stop.in_steps
        return SAVED if waiting and len(self._received) == 1 and self._received[0] in PREEMPTIONS else FAILED


def _log_to(log: TextIO, secrets: Sequence[str]) -> TextIO:
    """Send standard error, of libraries in C too, and all logging to `log`; return the console's standard error.

    Lines that this package logs also go to the console. Neither shows secrets or control characters.
    """
    console = cast(TextIO, _CleanStream(os.fdopen(os.dup(2), "w", buffering=1), secrets))
    if not sys.stdout.isatty():
        sys.stdout = cast(TextIO, _LastingStream(sys.stdout))
    sys.stderr.flush()
    os.dup2(log.fileno(), 2)
    logging.captureWarnings(True)
    logging.basicConfig(
        stream=_CleanStream(log, secrets),
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )
    ours = logging.getLogger("verl_lite")
    ours.handlers = [_ConsoleHandler(secrets)]
    return console


class _ConsoleHandler(logging.Handler):
    """Prints through `sys.stdout` as it is at that moment: a progress bar puts itself there."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        if "log_only" not in record.__dict__:
            prefix = "warning: " if record.levelno >= logging.WARNING else ""
            print(prefix + _clean(record.getMessage(), self._secrets), flush=True)


class _LastingStream(io.TextIOBase):
    """Writes to `stream` while somebody reads it: signals that ask a run to save end the `| tee` behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # rich asks what it can show
        return self._stream.encoding

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()


class _CleanStream(_LastingStream):
    """Writes to `stream`, but neither secrets nor what a terminal would obey."""

    def __init__(self, stream: TextIO, secrets: Sequence[str]) -> None:
        super().__init__(stream)
        self._secrets = secrets

    def write(self, text: str) -> int:
        return super().write(_clean(text, self._secrets))


def _clean(text: str, secrets: Sequence[str]) -> str:
    return printable(without_secrets(text, secrets))


def _object_store_bytes(config: Config, plan: BatchPlan) -> int:
    """Room for a few copies of a step's batch at its longest."""
    tokens = plan.actor.sequences * (config.data.max_prompt_length + config.data.max_response_length)
    return max(MIN_STORE_BYTES, 6 * tokens * BYTES_PER_TOKEN)


if __name__ == "__main__":
    open_streams()
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)  # at once: what libraries do at exit can hang or fail after the work is done
