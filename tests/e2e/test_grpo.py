"""The whole job as people run it: a command line, the real Ray, FSDP2 on gloo, the real engine, files in a folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from leftovers import left_in_shared_memory
from tiny import addition_rows, tiny_model, write_parquet

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Run:
    """What a finished job left."""

    code: int
    output: str
    steps: list[dict[str, float]]  # metrics.jsonl without the validation before the first step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the jobs are started: the command lines name what lies in it by relative paths."""
    folder = tmp_path_factory.mktemp("job")
    tiny_model(folder / "model", vocab_size=96)  # more ids than the tokenizer has: neither side may use them
    write_parquet(addition_rows(40), folder / "train.parquet")
    write_parquet(addition_rows(5, seed=1), folder / "val.parquet")
    return folder


SIZES = (
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=8",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.seed=1",
    "trainer.total_training_steps=2",
)
GRPO = (
    *SIZES,
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=2",
)


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "verl_lite.main_ppo", *overrides]


def finished(args: list[str], folder: Path, name: str) -> Run:
    done = subprocess.run(
        [*args, f"trainer.experiment_name={name}"],
        cwd=folder,
        env=dict(os.environ, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    [metrics] = folder.glob(f"outputs/*/{name}/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run(done.returncode, done.stdout + done.stderr, [line for line in lines if line["step"] > 0])


def processes_of(folder: Path) -> list[psutil.Process]:
    """Whatever was started in the job's folder and still runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def shared_memory_before() -> set[Path]:
    return left_in_shared_memory()


@pytest.fixture(scope="module")
def listening() -> set[str]:
    """Addresses that some process of the `grpo` job was seen to listen on."""
    return set()


@pytest.fixture(scope="module")
def grpo(folder: Path, shared_memory_before: set[Path], listening: set[str]) -> Run:
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            for process in processes_of(folder):
                with contextlib.suppress(psutil.Error):
                    connections = process.net_connections(kind="inet")
                    listening.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        secret = "ray_kwargs.ray_init.runtime_env.env_vars.JUDGES_API_KEY=hunter2-hunter2"
        return finished(command(*GRPO, secret), folder, "grpo")
    finally:
        ended.set()
        looking.join(timeout=10)


def test_every_process_of_a_run_listens_on_loopback_only(grpo: Run, listening: set[str]) -> None:
    assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_secret_of_the_command_line_is_in_no_file_of_the_run(grpo: Run, folder: Path) -> None:
    [run_dir] = folder.glob("outputs/*/grpo")
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert run_dir / "config.json" in written and run_dir / "logs" / "driver.log" in written
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []


def test_a_run_from_another_folder_ends_with_0_and_leaves_nothing(
    grpo: Run, folder: Path, shared_memory_before: set[Path]
) -> None:
    assert grpo.code == 0, grpo.output
    assert len(grpo.steps) == 2
    assert processes_of(folder) == []
    assert left_in_shared_memory() <= shared_memory_before


def test_the_console_shows_the_plan_one_line_a_step_and_no_flood(grpo: Run) -> None:
    lines = grpo.output.splitlines()
    assert "Batch plan" in lines
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 0/2", "step 1/2", "step 2/2"]
    assert sum("updates 4/4" in line for line in lines) == 2
    # Ray's and vLLM's own lines carry their process id or a logger's time stamp.
    assert not [line for line in lines if "INFO" in line or "pid=" in line or "WARNING" in line]


def test_every_step_makes_the_planned_updates_and_they_move_the_weights(grpo: Run) -> None:
    for step in grpo.steps:
        # 8 prompts in mini-batches of 2
        assert step["training/optimizer_steps"] == 4
        assert step["training/skipped_steps"] == step["training/empty_steps"] == 0
        assert step["actor/grad_norm"] > 0
    # Equal weights at the start: the KL to the reference grows only through the updates.
    assert grpo.steps[0]["actor/kl_loss"] > 0
    assert grpo.steps[1]["actor/kl_loss"] > grpo.steps[0]["actor/kl_loss"]


def test_the_engine_has_the_weights_of_the_actor_at_every_step(grpo: Run) -> None:
    """At lr 1e-2 a single step changes probabilities by far more than this."""
    for step in grpo.steps:
        assert step["training/rollout_probs_diff_max"] < 1e-3
        assert abs(step["actor/ppo_kl_first"]) < 1e-4


def test_validation_scores_every_row_before_and_after(grpo: Run, folder: Path) -> None:
    name = "val-core/verl_lite/addition/reward/mean@1"
    assert name in grpo.steps[-1] and name not in grpo.steps[0]
    first = json.loads((folder / "outputs/verl_lite/grpo/metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and name in first
    # 5 rows: every mean is a multiple of 0.2
    assert round(grpo.steps[-1][name] * 5, 6) in range(6)


def test_one_rank_gives_the_gradient_of_two(grpo: Run, folder: Path) -> None:
    """One update over the whole batch, so that the first gradient is that of the same weights and the same samples."""
    whole = ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    one, two = (
        finished(
            command(*GRPO, *whole, "trainer.val_before_train=False", f"trainer.n_gpus_per_node={ranks}"),
            folder,
            f"ranks{ranks}",
        ).steps[0]
        for ranks in (1, 2)
    )
    assert one["training/optimizer_steps"] == two["training/optimizer_steps"] == 1
    assert one["critic/score/mean"] == two["critic/score/mean"]
    assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-6)


def test_the_classic_launch_script_runs_with_tiny_sizes(folder: Path) -> None:
    """Every key of the 8-GPU example, two engine ranks (tensor parallel) included; only sizes and paths replaced."""
    script = ["bash", str(ROOT / "examples" / "grpo_8gpu.sh"), *SIZES]
    run = finished(
        [*script, "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1", "trainer.test_freq=-1"],
        folder, "classic",
    )  # fmt: skip
    assert run.code == 0, run.output
    [step] = run.steps
    assert step["training/optimizer_steps"] == 4
    assert step["training/rollout_probs_diff_max"] < 1e-3


def test_ctrl_c_during_training_ends_everything_within_30_seconds(folder: Path) -> None:
    """With the transformers engine, which gets its end-to-end run here."""
    job = subprocess.Popen(
        command(*GRPO, "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1000"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    output = []
    for line in job.stdout:
        output.append(line)
        if line.startswith("step 2/"):
            break
    job.send_signal(signal.SIGINT)
    asked = time.monotonic()
    output.append(job.communicate(timeout=60)[0])
    assert job.returncode == 130, "".join(output)
    assert time.monotonic() - asked < 30
    assert processes_of(folder) == []
