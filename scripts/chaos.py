"""Kill a run's processes, one after another, and see that it comes back as if nothing had happened.

    python scripts/chaos.py [--kills 20] [--seed 0] [--engine hf|vllm|both] [--targets driver,raylet,…] [--out FILE]

A short recipe (a tiny model on two ranks, seeded sampling, a checkpoint after every step) is first run undisturbed.
Then the same command runs again, and for every kill the seed chooses a process and a moment: a random one of the start,
of a step or of a save. Each kill must show: the run goes on by itself, or ends within 60 s, leaves no process 60 s
later, and goes on from its newest checkpoint when started again; every checkpoint written equals the undisturbed run's
of that step to the bit. Prints a Markdown table; exit code 1 if anything of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "scripts")]
from leftovers import left_in_shared_memory  # noqa: E402
from tiny import addition_rows, tiny_model, write_jsonl  # noqa: E402

MARK = "VERL_LITE_CHAOS"  # in the environment of every process of a run
LIMIT_S = 60.0
RUN_LIMIT_S = 180.0  # of a start, or of two steps
STEP_LIMIT_S = 10.0
TARGETS = ("driver", "actor rank", "rollout actor", "engine child", "reward worker", "raylet", "gcs_server", "any")
MOMENTS = ("step", "save", "start")


@dataclass
class Trial:
    """One kill and what came of it."""

    target: str
    moment: str
    process: str = ""
    step: int = 0
    ended: str = ""
    exit_s: float | None = None  # None: the run went on
    gone_s: float | None = None
    resumed_from: int | None = None
    problems: list[str] = field(default_factory=list)

    def row(self, number: int, engine: str) -> str:
        exit_s, gone_s = ("–" if s is None else f"{s:.1f} s" for s in (self.exit_s, self.gone_s))
        cells = [
            number, engine, self.target, self.moment, self.step, self.ended, exit_s, gone_s,
            "–" if self.resumed_from is None else self.resumed_from, "; ".join(self.problems) or "equal",
        ]  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| # | engine | killed | moment | step | the run | exit after | none left | goes on from | checkpoints |\n"
    "|--:|---|---|---|--:|---|--:|--:|--:|---|"
)


class Job:
    """The recipe in a folder of its own, and the process that runs it."""

    def __init__(self, folder: Path, engine: str, steps: int, *overrides: str) -> None:
        self.folder, self.engine, self.steps, self.overrides = folder, engine, steps, overrides
        self.checkpoints = folder / "checkpoints"
        self.process: subprocess.Popen[bytes] | None = None
        self.mark = str(folder)

    def start(self) -> None:
        command = [
            sys.executable, "-m", "verl_lite.main_ppo",
            f"data.train_files={self.folder.parent}/train.jsonl",
            "data.train_batch_size=4", "data.max_prompt_length=8", "data.max_response_length=8",
            f"actor_rollout_ref.model.path={self.folder.parent}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"actor_rollout_ref.rollout.name={self.engine}",
            "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.seed=1",
            f"reward.custom_reward_function.path={self.folder.parent}/reward.py", "reward.num_workers=2",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu", "trainer.n_gpus_per_node=2",
            f"trainer.total_training_steps={self.steps}", "trainer.save_freq=1",
            f"trainer.default_local_dir={self.checkpoints}", f"trainer.run_dir={self.folder}/run", *self.overrides,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS",)}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env={**environment, MARK: self.mark, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def find(self, target: str) -> list[psutil.Process]:
        """The live processes that a target's name means."""
        found = [(process, self.kind(process)) for process in self.processes()]
        return [process for process, kind in found if kind == target or (target == "any" and kind != "watchdog")]

    def kind(self, process: psutil.Process) -> str:
        """One of the targets, or "watchdog": what ends everything when the driver cannot."""
        assert self.process is not None
        try:
            command = " ".join(process.cmdline())
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
            if process.pid == self.process.pid:
                return "driver"
            if process.name() in ("raylet", "gcs_server"):
                return process.name()
        except (psutil.Error, OSError):
            return "any"
        if "watchdog.py" in command:
            return "watchdog"
        if "rewards.worker" in command:
            return "reward worker"
        if log.startswith("train_rank"):
            return "actor rank"
        if log.startswith("rollout_rank") and "resource_tracker" not in command:
            return "rollout actor" if command.startswith("ray::") else "engine child"
        return "any"

    def saved(self) -> dict[int, Path]:
        """The checkpoints that have their name, by step."""
        found = {}
        for path in self.checkpoints.glob("global_step_*"):
            with contextlib.suppress(ValueError):
                found[int(path.name.rpartition("_")[2])] = path
        return found

    def newest(self) -> int:
        return max(self.saved(), default=0)

    def output(self) -> str:
        file = self.folder / "output.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, step: int) -> None:
        """Until this step is saved, or the run has ended."""
        limit_s = RUN_LIMIT_S + STEP_LIMIT_S * (step - self.newest())
        deadline = time.monotonic() + limit_s
        while self.running() and self.newest() < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not saved within {limit_s:g} s; {self.output()[-2000:]}")
            time.sleep(0.05)

    def wait_for_save(self) -> None:
        """Until a checkpoint is being written."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while self.running() and time.monotonic() < deadline:
            if any(self.checkpoints.glob(".writing_*")):
                return
            time.sleep(0.001)

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, by file and name; not the random state, which seeded runs ignore."""
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        if not {"extra", "rollout"} & set(path.relative_to(folder).parts)
        for name, tensor in load_file(path).items()
    }


def differences(job: Job, calm: Job, compared: set[int]) -> Iterator[str]:
    """What sets the job's checkpoints apart from the undisturbed run's; those in `compared` were looked at before."""
    for step, folder in sorted(job.saved().items()):
        if step in compared:
            continue
        compared.add(step)
        got, wanted = parameters(folder), parameters(calm.saved()[step])
        assert wanted, f"{calm.saved()[step]} has no tensors"
        if got.keys() != wanted.keys():
            yield f"step {step} has other tensors"
        elif wrong := [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]:
            yield f"step {step} differs in {len(wrong)} of {len(wanted)} tensors, e.g. {wrong[0]}"


def kill_once(job: Job, trial: Trial, dice: random.Random, start_s: float) -> None:
    """Bring the job to the moment, kill, and wait for what comes of it."""
    if job.running():
        trial.moment = trial.moment.replace("start", "step")  # it went on after the last kill
    else:
        job.start()
    if trial.moment == "start":
        time.sleep(dice.uniform(0, 0.9 * start_s))
    else:
        job.wait_for(job.newest() + 1)
        if trial.moment == "save":
            job.wait_for_save()
        else:
            time.sleep(dice.uniform(0, 1.0))
    candidates = job.find(trial.target) or job.find("any")
    if not candidates:
        trial.problems.append(f"the run had ended before: {job.output()[-500:]}")
        return
    victim = dice.choice(candidates)
    with contextlib.suppress(psutil.Error):
        trial.process = " ".join(victim.cmdline())[:60] or victim.name()
    if not job.find(trial.target):
        trial.target = f"any ({trial.process.split(' ')[0].rpartition('/')[2]})"
    elif trial.target == "any":
        trial.target = f"any ({victim.name()})"
    trial.step = newest = job.newest()
    killed, printed = time.monotonic(), len(job.output())
    victim.kill()
    # Going on means two more checkpoints: the first may have been on its way.
    while job.running() and job.newest() < min(newest + 2, job.steps):
        limit_s = RUN_LIMIT_S if "Starting it again" in job.output()[printed:] else LIMIT_S
        if time.monotonic() - killed > limit_s:
            trial.problems.append(f"neither ended nor went on within {limit_s:g} s: {job.output()[printed:][-300:]!r}")
            job.end()
        time.sleep(0.05)
    if job.running() or job.newest() == job.steps:
        trial.ended = "went on"
        return
    assert job.process is not None
    trial.exit_s = time.monotonic() - killed
    code = job.process.returncode
    trial.ended = f"ended, {signal.Signals(-code).name if code < 0 else f'exit {code}'}"
    if code == 0:
        trial.problems.append("exit code 0")
    while left := job.processes():
        if time.monotonic() - killed > trial.exit_s + LIMIT_S:
            trial.problems.append(f"left: {[process.name() for process in left]}")
            job.end()
            break
        time.sleep(0.1)
    trial.gone_s = time.monotonic() - killed
    if job.newest() < newest:
        trial.problems.append(f"step {newest} was saved and is lost")


def resume_step(job: Job, since: int) -> int | None:
    """From which step the run that was started last says that it goes on."""
    lines = [line for line in job.output()[since:].splitlines() if line.startswith("resumed from ")]
    return int(lines[-1].partition(": step ")[2].split()[0]) if lines else None


def campaign(folder: Path, engine: str, plan: list[tuple[str, str]], dice: random.Random) -> list[Trial]:
    steps = 8 * len(plan) + 4  # a kill comes within a few steps, and two more must follow it
    segments = left_in_shared_memory()
    calm, job = (Job(folder / name, engine, steps) for name in ("undisturbed", "killed"))
    for one in (calm, job):
        one.folder.mkdir()
    started = time.monotonic()
    calm.start()
    calm.wait_for(1)
    start_s = time.monotonic() - started
    assert calm.process is not None
    calm.wait_for(steps)
    if calm.process.wait(LIMIT_S) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{calm.output()[-4000:]}")
    print(f"{engine}: {steps} undisturbed steps in {time.monotonic() - started:.0f} s", file=sys.stderr)
    trials: list[Trial] = []
    ended: list[Trial] = []  # those whose next start has not said yet from where it goes on
    compared: set[int] = set()

    def check(printed: int) -> None:
        """Compare what is new, and take down where a run that has started since `printed` goes on."""
        trials[-1].problems += differences(job, calm, compared)
        if ended and (resumed := resume_step(job, printed)) is not None:
            for trial in ended:
                trial.resumed_from = resumed
                if resumed < trial.step:
                    trial.problems.append(f"step {trial.step} was saved, but it went on from {resumed}")
            ended.clear()

    try:
        for target, moment in plan:
            printed = len(job.output())
            trial = Trial(target, moment)
            trials.append(trial)
            kill_once(job, trial, dice, start_s)
            check(printed)
            if trial.exit_s is not None and trial.step:
                ended.append(trial)
            print(trial.row(len(trials), engine), trial.process, file=sys.stderr, flush=True)
        printed = len(job.output())
        if not job.running():
            job.start()
        job.wait_for(steps)
        assert job.process is not None
        if job.process.wait(LIMIT_S) != 0 or job.newest() != steps:
            trials[-1].problems.append(f"the last run did not finish: {job.output()[-1000:]}")
        check(printed)
        if left := left_in_shared_memory() - segments:
            trials[-1].problems.append(f"left in shared memory: {sorted(map(str, left))}")
        if ended:
            ended[-1].problems.append("nothing says from where it went on")
    finally:
        job.end()
        calm.end()
    return trials


def make_inputs(folder: Path) -> None:
    tiny_model(folder / "model")
    write_jsonl(addition_rows(64), folder / "train.jsonl")
    (folder / "reward.py").write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0.01)  # else nobody is ever caught at work\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )


def choose(kills: int, targets: list[str], dice: random.Random) -> list[tuple[str, str]]:
    """(target, moment) of each kill: every target before one comes again."""
    plan: list[tuple[str, str]] = []
    while len(plan) < kills:
        plan += [(target, dice.choice(MOMENTS)) for target in dice.sample(targets, len(targets))]
    return plan[:kills]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("hf", "vllm", "both"), default="both", help="both: a third with vllm")
    parser.add_argument("--targets", default=",".join(TARGETS), help="of " + ", ".join(TARGETS))
    parser.add_argument("--out", type=Path, help="where the table is written too")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the runs are ended too
    dice = random.Random(options.seed)
    kills = {"hf": options.kills, "vllm": options.kills}
    if options.engine == "both":
        kills = {"hf": options.kills - options.kills // 3, "vllm": options.kills // 3}
    rows, failed = [HEADER], 0
    folder = Path(tempfile.mkdtemp(prefix="verl_lite-chaos-"))
    try:
        for engine in ("hf", "vllm") if options.engine == "both" else (options.engine,):
            inputs = folder / engine
            inputs.mkdir()
            make_inputs(inputs)
            targets = [t for t in options.targets.split(",") if t != "engine child" or engine == "vllm"]
            for trial in campaign(inputs, engine, choose(kills[engine], targets, dice), dice):
                rows.append(trial.row(len(rows), engine))
                failed += bool(trial.problems)
    finally:
        if options.keep or failed:
            print(f"the runs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(rows) + f"\n\n{len(rows) - 1} kills, {failed} with a problem; seed {options.seed}\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
