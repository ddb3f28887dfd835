"""Ray for one run: connect to a running cluster, or start one on this machine and end it without a trace."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from verl_lite.config import num_cores
from verl_lite.distributed import watchdog

logger = logging.getLogger(__name__)

GIB = 1 << 30
RANK_GIB = 0.5  # a rank that has imported torch
ENGINE_GIB = 2.0  # a small engine beside them
RANKS_PER_CORE = 4
SHUTDOWN_S = 15.0

NODES_S = 5.0  # between two looks at which nodes of a cluster are alive

_daemons: dict[str, int] = {}  # name → pid of the Ray daemons this process started
_nodes: dict[str, str] = {}  # id → address of the cluster's nodes this run needs
_looked_at = 0.0


class RayDied(RuntimeError):
    """A Ray daemon is gone; by itself Ray would leave the driver waiting."""


def check_alive(phase: str) -> None:
    """Raise `RayDied` when a daemon of the embedded Ray, or a node this run needs, has ended.

    `phase` is what was waited for.
    """
    for name, pid in _daemons.items():
        try:
            ended = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # dead, and nobody has asked for its exit code
        except psutil.NoSuchProcess:
            ended = True
        if ended:
            raise RayDied(f"Ray's {name} (pid {pid}) died during {phase}; its logs will be in logs/ray")
    global _looked_at
    if _nodes and time.monotonic() - _looked_at > NODES_S:
        _looked_at = time.monotonic()
        for node in ray.nodes():
            if node["NodeID"] in _nodes and not node["Alive"]:
                raise RayDied(f"the Ray node {_nodes[node['NodeID']]} died during {phase}; the others are still there")


def object_store_used_bytes() -> float:
    """Of all nodes, a second or so ago; 0 without Ray."""
    if not ray.is_initialized():
        return 0.0
    name = "object_store_memory"
    return max(0.0, ray.cluster_resources().get(name, 0.0) - ray.available_resources().get(name, 0.0))


def watch_nodes(nodes: Mapping[str, str]) -> None:
    """Let `check_alive` look after these nodes (id → address) and the driver's own."""
    if _daemons:  # the embedded Ray is looked after more closely
        return
    here = ray.get_runtime_context().get_node_id()
    _nodes.update(nodes)
    _nodes.setdefault(here, "of the driver")


def wanted_address(address: str | None) -> str | None:
    """The running cluster to connect to: `ray_kwargs.ray_init.address`, else RAY_ADDRESS; None: an embedded Ray."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def _log_ray_message(message: Mapping[str, Any], *_: Any, **__: Any) -> None:
    logging.getLogger("ray").info("%s: %s", message["pid"], "\n".join(message["lines"]))


def _start_daemon(*args: Any, **options: Any) -> subprocess.Popen[Any]:
    """As Ray starts its daemons, but outside the driver's process group.

    A signal to the whole group (Ctrl-C at a terminal; SIGTERM from `timeout` or Slurm) would end the workers in the
    middle of the step that the driver wants to save.
    """
    return subprocess.Popen(*args, start_new_session=True, **options)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray's library makes SIGTERM abort the process, unseen by Python, which could undo it in its main thread only."""
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(256)  # a struct sigaction is at most 152 bytes
    libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, action, None)


def own_addresses() -> set[str]:
    """The network addresses of this machine."""
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def check_machine(num_slots: int, device: str) -> tuple[list[str], list[str]]:
    """(errors, warnings) of running `num_slots` ranks on this machine's CPU; a GPU's slots are checked by Ray."""
    if device != "cpu":
        return [], []
    cores, free_gib = num_cores(), psutil.virtual_memory().available / GIB
    wanted_gib = num_slots * RANK_GIB + ENGINE_GIB
    asked = f"trainer.n_gpus_per_node × trainer.nnodes = {num_slots} ranks"
    reasons, warnings, fitting = [], [], cores
    if num_slots > RANKS_PER_CORE * cores:
        reasons.append(f"at most {RANKS_PER_CORE} ranks a core")
    elif num_slots > cores:
        warnings.append(f"{asked} on {cores} cores: they take turns; trainer.n_gpus_per_node={cores} is faster")
    if wanted_gib > free_gib:
        fitting = max(1, min(cores, int((free_gib - ENGINE_GIB) / RANK_GIB)))
        reasons.append(f"they need at least {wanted_gib:.1f} GiB of memory, {free_gib:.1f} GiB are free")
    advice = f"type trainer.nnodes=1 trainer.n_gpus_per_node={fitting}"
    errors = [f"{asked} on {cores} cores: {'; '.join(reasons)}; {advice}"] if reasons else []
    return errors, warnings


class Watchdog:
    """Marks this process's children-to-be as one run and ends them all: at `finish`, or when this process dies.

    `ray_dir` is where the embedded Ray may keep its sockets: private, and short, because a socket's path is limited to
    107 bytes.
    """

    def __init__(self, log_dir: Path) -> None:
        self.run_id = secrets.token_hex(8)
        os.environ[watchdog.RUN_ID] = self.run_id
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp"
        self.ray_dir = Path(tempfile.mkdtemp(prefix="vl-", dir=short))
        self._process = subprocess.Popen(
            [sys.executable, "-I", watchdog.__file__, self.run_id, str(os.getpid()), str(self.ray_dir), str(log_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is not for it
            env={name: value for name, value in os.environ.items() if name != watchdog.RUN_ID},
        )

    def finish(self) -> None:
        """End whatever is left of the run and wait until it is."""
        assert self._process.stdin is not None, "opened above"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on by itself
            self._process.wait(timeout=watchdog.SWEEP_LIMIT_S + 10)


def _runtime_env(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the workers on other nodes need beside what the user asks for: this very code, and the mark of the run."""
    env = dict(asked)
    env["env_vars"] = {**env.get("env_vars", {}), watchdog.RUN_ID: os.environ[watchdog.RUN_ID]}
    of_job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env", {})
    if "py_modules" not in of_job:  # Ray refuses to join two lists
        env["py_modules"] = [*env.get("py_modules", []), str(Path(__file__).parents[1])]
    return env


@contextlib.contextmanager
def _no_job_server(embedded: bool) -> Iterator[None]:
    """Start an embedded Ray as if `ray[default]` were not installed: its agents would serve HTTP, and run what is sent.

    Ray has no setting for it.
    """
    installed = ray_utils.get_dashboard_dependency_error
    if embedded:
        ray_utils.get_dashboard_dependency_error = lambda: ImportError("not wanted")
    try:
        yield
    finally:
        ray_utils.get_dashboard_dependency_error = installed


class RayCluster:
    """A connection to Ray, made in the background; `wait` says when it stands.

    With an `address` (or `RAY_ADDRESS`) it is that cluster's, of which `close` stops nothing but this run's actors.
    Else an embedded Ray: on loopback, no dashboard, its files in `ray_dir`, `num_cpus` or `num_slots` logical CPUs and
    `num_gpus` or the GPUs Ray finds.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        ray_dir: Path,
        timeout_s: float,
        address: str | None = None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        object_store_bytes: int = GIB,
    ) -> None:
        self.address = wanted_address(address)
        self._timeout_s = timeout_s
        self._error: BaseException | None = None
        self._connected, self._closing = threading.Event(), threading.Event()
        self._started_at = time.monotonic()
        options: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": False,
            "runtime_env": dict(runtime_env) if runtime_env else None,
        }
        if self.address is None:
            # The daemons inherit them; handed to Ray, they would stand in its logs.
            env_vars = (options["runtime_env"] or {}).pop("env_vars", {})
            options["runtime_env"] = options["runtime_env"] or None
            os.environ.update({str(name): str(value) for name, value in env_vars.items()})
            os.environ.update(
                RAY_USAGE_STATS_ENABLED="0",
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # any system: else Ray turns loopback into the host's address
                RAY_worker_niceness="0",  # else workers start at nice 15, behind whoever shares the machine
                RAY_enable_metrics_collection="0",
                RAY_task_events_report_interval_ms="0",  # else gcs_server keeps a record of every call: 60 KiB a step
                SPT_NOENV="1",  # else a process that Ray renames shows its name in place of the run's id
                RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # a rollout replica asks Ray for no GPU but has some
            )
            ray_constants.ENABLE_RAY_CLUSTER = False  # the same for this process, which has read the variable already
            options |= {
                "address": "local",
                "num_cpus": num_cpus or num_slots,
                "num_gpus": num_gpus,
                "include_dashboard": False,
                "object_store_memory": min(object_store_bytes, int(psutil.virtual_memory().total * 0.3)),
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(ray_dir),
            }
        else:
            options |= {"address": self.address, "runtime_env": _runtime_env(runtime_env or {})}
        self._thread = threading.Thread(target=self._hold, args=(options,), name="ray", daemon=True)
        self._thread.start()

    def _hold(self, options: Mapping[str, Any]) -> None:
        # One thread from the start to the end: Ray's daemons ask the kernel to end with the thread that made them.
        # Ray has no setting for either.
        ray_worker.print_to_stdstream = _log_ray_message  # keeps its workers' lines off the console
        services.ConsolePopen = _start_daemon
        try:
            with _sigterm_kept(), _no_job_server(self.address is None):
                ray.init(**options)
        except BaseException as error:  # re-raised in `wait`
            self._error = error
        self._connected.set()
        self._closing.wait()
        ray.shutdown()

    def wait(self) -> None:
        """Wait until connected, at most `timeout_s` from the start."""
        while not self._connected.wait(0.2):
            self._note_daemons()
            check_alive("the start of Ray")
            if time.monotonic() - self._started_at > self._timeout_s:
                where = self.address or "on this machine"
                raise TimeoutError(f"Ray {where} did not answer within trainer.start_timeout_s={self._timeout_s:g} s")
        if self._error is not None:
            where = f"at {self.address}" if self.address else "on this machine"
            root = self._error
            while root.__cause__ is not None:
                root = root.__cause__
            reason = str(root).strip().rpartition("\n")[2]  # the lines before it are a traceback
            raise ConnectionError(f"Ray {where} cannot be used: {self._error}: {reason}") from self._error
        self._note_daemons()
        logger.info("Ray ready after %.1f s", time.monotonic() - self._started_at)

    def _note_daemons(self) -> None:
        for child in psutil.Process().children() if self.address is None else []:
            with contextlib.suppress(psutil.Error):
                if child.name() in ("raylet", "gcs_server"):
                    _daemons[child.name()] = child.pid

    def close(self) -> None:
        """Disconnect, and end an embedded Ray; a daemon that doesn't end in time is left to the watchdog."""
        _daemons.clear()
        _nodes.clear()
        self._closing.set()
        self._thread.join(SHUTDOWN_S)
