"""Starts, ends and failures of a run, around a stand-in for the trainer (`stub_run.py`)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from verl_lite import main_ppo
from verl_lite.distributed.cluster import check_machine
from verl_lite.distributed.watchdog import RUN_ID
from verl_lite.plan import compose_plan
from verl_lite.trainer.checkpoints import claim

MARK = "VERL_LITE_TEST"


def arguments(folder: Path) -> list[str]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no weights
    (folder / "train.jsonl").write_text('{"prompt": "1", "data_source": "s", "reward_model": {"ground_truth": "1"}}\n')
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.jsonl",
        f"trainer.run_dir={folder}/run",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
    ]


@dataclass
class Run:
    """A started run; `pids` are those it printed, `lines` all it has printed."""

    process: subprocess.Popen[str]
    folder: Path
    mark: str
    pids: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def read_until(self, beginning: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            words = line.split()
            if len(words) == 2 and words[1].isdigit():
                self.pids[words[0]] = int(words[1])
            if line.startswith(beginning):
                return
        raise AssertionError(f"the run ended before {beginning!r}: {self.lines} {self.process.communicate()}")

    def end(self, timeout_s: float) -> tuple[int, str, str]:
        """(exit code, the rest of what it printed, its errors)."""
        out, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, errors

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}"[:120])
        return found

    def none_left(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left


CLUSTER = """
import sys, ray
from pathlib import Path
from verl_lite.distributed.cluster import Watchdog
watchdog = Watchdog(Path(sys.argv[1]))
ray.init("local", num_cpus=2, include_dashboard=False, _temp_dir=str(watchdog.ray_dir), object_store_memory=200 << 20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
print(ray.available_resources()["CPU"], flush=True)
ray.shutdown()
watchdog.finish()
"""


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What leads a run to a Ray cluster not its own; in the end that must still be there, with all its CPUs."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(tmp_path_factory.mktemp("cluster"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=plain_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    yield {"RAY_ADDRESS": process.stdout.readline().strip(), "RAY_AUTH_MODE": "token"}
    assert process.communicate(timeout=60)[0].strip() == "2.0"


def plain_environment(**more: str) -> dict[str, str]:
    """Without what an outer run or cluster left there."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", RUN_ID)}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[1]), **more}


@contextlib.contextmanager
def run(mode: str, folder: Path, *overrides: str, **environment: str) -> Iterator[Run]:
    mark = str(folder)
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("stub_run.py")), mode, *arguments(folder), *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
        env=plain_environment(**{MARK: mark}, **environment), umask=0,
    )  # fmt: skip
    started = Run(process, folder, mark)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.total_epoch=3", ["trainer.total_epoch", "trainer.total_epochs"]),
        ("data.train_files=/nowhere/train.parquet", ["data.train_files", "/nowhere/train.parquet"]),
        ("actor_rollout_ref.model.path=/nowhere/model", ["actor_rollout_ref.model.path", "/nowhere/model"]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=3", ["ppo_mini_batch_size=3", "train_batch_size=4"]),
        ("trainer.nnodes=2", ["trainer.nnodes=2 without a cluster", "docs/clusters.md"]),
        ("ray_kwargs.ray_init.address=ray://head:10001", ["Ray's client is not supported", "HOST:6379"]),
        ("ray_kwargs.ray_init.address=http://head:8265", ["ray job submit --address http://head:8265 -- "]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    argument: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert main_ppo.main([*arguments(tmp_path), argument]) == 2
    assert time.monotonic() - started < 5
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


def test_far_more_ranks_than_cores_are_refused_and_a_few_more_are_warned_of() -> None:
    cores = len(os.sched_getaffinity(0))
    assert check_machine(cores, "cpu") == ([], [])
    errors, warnings = check_machine(cores + 1, "cpu")
    assert errors == [] and f"{cores + 1} ranks on {cores} cores" in warnings[0]
    errors, _ = check_machine(4 * cores + 1, "cpu")
    assert f"type trainer.nnodes=1 trainer.n_gpus_per_node={cores}" in errors[0]


def test_more_ranks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    errors, _ = check_machine(1, "cpu")
    assert "need at least 2.5 GiB of memory, 1.0 GiB are free" in errors[0]  # 1 rank · 0.5 + 2 for the engine


def test_a_run_ends_with_0_a_quiet_console_and_nothing_left(tmp_path: Path) -> None:
    with run("done", tmp_path) as started:
        code, out, errors = started.end(timeout_s=90)
        assert (code, errors) == (0, "")
        assert started.none_left(timeout_s=0)
    assert "Batch plan" in out
    assert out.splitlines()[-1] == "running"  # no flood of Ray, and no noise at the end
    logs = tmp_path / "run" / "logs"
    assert (logs / "train_rank1.log").read_text() == "working\n"
    assert {"driver.log", "rollout_rank0.log", "ray"} <= {path.name for path in logs.iterdir()}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trainer"]["n_gpus_per_node"] == 2
    # Nobody else may write there, whatever the umask (`run` sets 0), or read the logs.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert (modes, stat.S_IMODE((tmp_path / "run").stat().st_mode)) == ({0o644}, 0o755)
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700


def test_ctrl_c_ends_everything_with_130_and_listens_on_loopback_only_until_then(tmp_path: Path) -> None:
    with run("sleep", tmp_path) as started:
        started.read_until("running")
        listening = set()
        for process in [psutil.Process(int(line.split()[0])) for line in started.processes()]:
            connections = process.net_connections(kind="inet")
            listening |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        os.killpg(started.process.pid, signal.SIGINT)  # as the terminal does: to the whole group
        code, _, errors = started.end(timeout_s=30)
        assert (code, "Traceback" in errors) == (130, False)
        assert started.none_left(timeout_s=0)


def test_ctrl_c_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    with run("sleep", tmp_path) as started:
        started.read_until("driver")
        os.killpg(started.process.pid, signal.SIGINT)
        assert started.end(timeout_s=30)[0] == 130
        assert started.none_left(timeout_s=15)


SAVING = "trainer.save_freq=1"


@pytest.mark.parametrize(("mode", "addition"), [("auto", ""), ("disable", " with trainer.resume_mode=auto")])
def test_signals_to_the_whole_group_let_the_step_be_finished_and_saved(
    tmp_path: Path, mode: str, addition: str
) -> None:
    """Case B114. `timeout`, Slurm and shells signal every process of the group, the workers' too if they were in it."""
    with run("steps", tmp_path, SAVING, f"trainer.resume_mode={mode}") as started:
        started.read_until("step 1")
        os.killpg(started.process.pid, signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(started.process.pid, signal.SIGUSR1)  # within 2 s: the same warning
        code, out, errors = started.end(timeout_s=60)
        assert (code, out) == (75, "step 2\n")
        # Python hears them when Ray's wait returns, every second, and both at once in the order of their numbers.
        assert re.search("SIG(TERM|USR1): the step under way is finished and saved first, for at most", errors)
        assert "stopped after step 2, saved in " in errors and "Traceback" not in errors
        assert f"(the same command goes on from there{addition})" in errors
        assert started.none_left(timeout_s=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_outlives_the_reader_of_its_console(
    number: int, code: int, tmp_path: Path, running_cluster: dict[str, str]
) -> None:
    """`main_ppo … 2>&1 | tee log`: Ctrl-C, and a scheduler that signals every process, end `tee` first."""
    with run("steps", tmp_path, SAVING, **running_cluster) as started:
        started.read_until("step 1")
        for pipe in (started.process.stdout, started.process.stderr):
            assert pipe is not None
            pipe.close()
        time.sleep(2.5)  # a step takes 2 s: at least one is told to nobody
        os.kill(started.pids["driver"], number)
        assert started.process.wait(timeout=60) == code
        assert started.none_left(timeout_s=0)


def test_a_step_that_takes_longer_than_the_grace_is_given_up(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("stuck", tmp_path, SAVING, "trainer.preempt_grace_s=1", **running_cluster) as started:
        started.read_until("running")
        os.kill(started.pids["driver"], signal.SIGTERM)
        code, _, errors = started.end(timeout_s=30)
        assert code == 1
        assert "SIGTERM, and the step was not saved within trainer.preempt_grace_s=1 s" in errors
        assert started.none_left(timeout_s=0)


def test_a_second_signal_does_not_wait_for_the_step(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("stuck", tmp_path, SAVING, **running_cluster) as started:
        started.read_until("running")
        os.kill(started.pids["driver"], signal.SIGUSR1)
        time.sleep(main_ppo.ECHO_S + 1.5)  # the first is heard up to a second late
        os.kill(started.pids["driver"], signal.SIGTERM)
        assert started.end(timeout_s=3)[0] == 1
        assert started.none_left(timeout_s=15)


@pytest.mark.parametrize(("saving", "code"), [(SAVING, 75), ("trainer.save_freq=-1", 1)])
def test_before_the_first_step_a_signal_ends_the_run_at_once(
    saving: str, code: int, tmp_path: Path, running_cluster: dict[str, str]
) -> None:
    """75 says: queue me again. Nothing is lost then, where a run saves and goes on from what it saved."""
    checkpoints = tmp_path / "checkpoints/verl_lite/default"
    with run("sleep", tmp_path, saving, **running_cluster) as started:
        started.read_until("running")
        assert checkpoints.exists() == (saving == SAVING)
        if saving == SAVING:  # nobody else will save there, from the start on
            with pytest.raises(OSError, match="another run is saving there"):
                claim(checkpoints)
        os.kill(started.pids["driver"], signal.SIGTERM)
        ended, _, errors = started.end(timeout_s=30)
        assert (ended, "stopped by SIGTERM before the first step" in errors) == (code, code == 75)
        assert started.none_left(timeout_s=0)


def test_a_failure_after_the_signal_is_still_reported(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("steps", tmp_path, SAVING, **running_cluster) as started:
        started.read_until("step 1")
        os.kill(started.pids["driver"], signal.SIGTERM)
        os.kill(started.pids["rank"], signal.SIGKILL)
        code, _, errors = started.end(timeout_s=30)
        assert code == 1
        assert "failed: WorkerError: actor rank 0 died in Sleeper.work" in errors


def test_everything_ends_when_the_driver_is_killed(tmp_path: Path) -> None:
    with run("sleep", tmp_path) as started:
        started.read_until("running")
        os.kill(started.pids["driver"], signal.SIGKILL)
        assert started.none_left(timeout_s=15)
    assert "gone" in (tmp_path / "run" / "logs" / "watchdog.log").read_text()


@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_a_dead_daemon_of_ray_ends_the_run(daemon: str, tmp_path: Path) -> None:
    with run("sleep", tmp_path) as started:
        started.read_until("running")
        os.kill(started.pids[daemon], signal.SIGKILL)
        code, _, errors = started.end(timeout_s=30)
        assert code == 1
        assert f"Ray's {daemon} (pid {started.pids[daemon]}) died during actor: Sleeper.work" in errors
        assert started.none_left(timeout_s=0)


def test_a_daemon_that_dies_while_ray_starts_ends_the_run(tmp_path: Path) -> None:
    with run("sleep", tmp_path) as started:
        deadline = time.monotonic() + 60
        while not (raylets := [line for line in started.processes() if "raylet/raylet" in line]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(int(raylets[0].split()[0]), signal.SIGKILL)
        code, _, errors = started.end(timeout_s=50)
        assert code == 1
        assert "raylet" in errors and "died during" in errors
        assert started.none_left(timeout_s=0)


def test_bad_data_is_refused_by_its_message_alone(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("bad_data", tmp_path, **running_cluster) as started:
        code, _, errors = started.end(timeout_s=60)
        assert code == 2
        assert errors == "refused: data.train_files has no prompt shorter than data.max_prompt_length\n"
        assert started.none_left(timeout_s=0)


def test_a_dead_worker_ends_the_run_with_one_report(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("worker_dies", tmp_path, **running_cluster) as started:
        code, _, errors = started.end(timeout_s=60)
        assert code == 1
        assert "failed: WorkerError: actor rank 1 died in Sleeper.work" in errors
        assert "last lines of" in errors and "  working" in errors
        assert "Traceback" not in errors
        assert started.none_left(timeout_s=0)


def test_a_second_ctrl_c_ends_a_run_that_ignores_the_first_at_once(
    tmp_path: Path, running_cluster: dict[str, str]
) -> None:
    with run("deaf", tmp_path, **running_cluster) as started:
        started.read_until("running")
        os.kill(started.pids["driver"], signal.SIGINT)
        time.sleep(1)
        os.kill(started.pids["driver"], signal.SIGINT)
        assert started.end(timeout_s=3)[0] == 130
        assert started.none_left(timeout_s=15)


def test_more_slots_than_a_running_cluster_has_are_refused(tmp_path: Path, running_cluster: dict[str, str]) -> None:
    with run("done", tmp_path, "trainer.n_gpus_per_node=5", **running_cluster) as started:
        code, _, errors = started.end(timeout_s=60)
        assert code == 2
        assert "wanted:    trainer.nnodes=1 × trainer.n_gpus_per_node=5 slots of 1 CPU" in errors
        assert f"available: {running_cluster['RAY_ADDRESS'].rpartition(':')[0]} with 2 CPU" in errors
        assert "fits:      trainer.nnodes=1 trainer.n_gpus_per_node=2" in errors


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code = main_ppo.main([*arguments(tmp_path), f"trainer.run_dir={tmp_path}/file/run"])
    assert code == main_ppo.REFUSED
    assert f"trainer.run_dir={tmp_path}/file/run cannot be used" in capsys.readouterr().err


def test_a_working_folder_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main_ppo.main([]) == main_ppo.REFUSED
    assert "the working folder cannot be read ([Errno 2] No such file or directory); cd to" in capsys.readouterr().err


def test_an_error_of_the_system_without_a_file_is_shown_with_its_line(tmp_path: Path) -> None:
    """Of a socket that isn't there, Python says no more than "[Errno 2] No such file or directory"."""
    console = io.StringIO()
    try:
        socket.socket(socket.AF_UNIX).connect(str(tmp_path / "gone"))
    except OSError as error:
        assert main_ppo._report(error, False, console, tmp_path) == main_ppo.REFUSED
    assert '(from `socket.socket(socket.AF_UNIX).connect(str(tmp_path / "gone"))` in' in console.getvalue()


def test_a_run_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with main_ppo._claim(tmp_path / "run"):
        assert main_ppo.main(arguments(tmp_path)) == main_ppo.REFUSED
    assert "another run is using it" in capsys.readouterr().err


HOLD = "import sys, pathlib; from verl_lite.trainer.checkpoints import claim\nheld = claim(pathlib.Path(sys.argv[1]))\n"


def test_a_folder_in_which_another_run_will_save_is_refused_at_once_unless_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that only validates may read what another saves."""
    place = f"trainer.default_local_dir={tmp_path}/new/checkpoints"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}print(flush=True); input()", f"{tmp_path}/new/checkpoints"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert other.stdout is not None
    other.stdout.readline()
    try:
        assert main_ppo.main([*arguments(tmp_path), place, SAVING]) == main_ppo.REFUSED
        assert f"{place} cannot be used: another run is saving there; give each" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        validates = [f"data.val_files={tmp_path}/train.jsonl", "trainer.val_only=True"]
        for reads in ([], [SAVING, *validates]):  # these come as far as the run folder
            with main_ppo._claim(tmp_path / "run"):
                assert main_ppo.main([*arguments(tmp_path), place, *reads]) == main_ppo.REFUSED
            assert "trainer.run_dir=" in capsys.readouterr().err
    finally:
        other.communicate(b"\n")
    (tmp_path / "new/checkpoints/.lock").unlink()
    for folder in ("new/checkpoints", "new"):
        (tmp_path / folder).rmdir()
    with main_ppo._claim(tmp_path / "run"):
        assert main_ppo.main([*arguments(tmp_path), place, SAVING]) == main_ppo.REFUSED
    assert not (tmp_path / "new").exists()  # what was made for a run that was refused


def test_every_node_must_see_the_folder_in_which_a_run_saves(tmp_path: Path) -> None:
    def seen(*overrides: str) -> str | None:
        config = compose_plan([*arguments(tmp_path), f"trainer.default_local_dir={tmp_path}", *overrides])[0].config
        return main_ppo.worker_paths(config).get("trainer.default_local_dir")

    assert (seen(), seen(SAVING)) == (None, f"{tmp_path}/.lock")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_finished_run_is_taken_down_takes_nothing_back(number: int) -> None:
    with main_ppo._Signals(600, saving=True) as signals:
        signals.stop.in_steps = True
        signals.finished(saved=True)
        os.kill(os.getpid(), number)
        assert not signals.stop.is_set() and not signals.interrupting


def test_a_step_saved_within_the_grace_is_not_given_up_while_the_run_is_taken_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ending Ray takes seconds, in which the grace may run out: the exit code must still say that all is saved."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(main_ppo, "CLEANUP_S", 3600)  # a test that fails must not end the others
    with main_ppo._Signals(0.2, saving=True) as signals:
        signals.stop.in_steps = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.stop.is_set()
        signals.finished(saved=True)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.4)
        assert not signals.interrupting and signals.exit_code == main_ppo.SAVED
    assert [signal.getsignal(number) for number in numbers] == before
