"""kill -9 while real ranks save: what is found afterwards is whole, and not older than what was known to be saved."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from tiny import CHECKPOINT_STATE
from torch.distributed.tensor import DTensor
from training import make_actor

from verl_lite.config import CheckpointConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.trainer.checkpoints import Checkpoints, find_checkpoint

KILLS = 20
WAIT_S = 60.0


def save_for_ever(context: RankContext, directory: Path, model: str, log: Path, keep: int | None) -> None:
    """Go on from the newest checkpoint, which must be whole; then save without end, each time other numbers."""

    def note(event: str, stamp: float) -> None:
        if context.rank == 0:
            with log.open("a") as file:
                file.write(f"{event} {stamp:g} {time.monotonic()}\n")

    contents = ["model", "optimizer", "extra"]
    worker = make_actor(context, model, checkpoint=CheckpointConfig(contents, contents))
    optimizer = worker.engine.optimizer
    assert optimizer is not None

    def tensors() -> list[torch.Tensor]:
        found = [tensor.detach() for tensor in worker.engine.module.parameters()]
        return found + [value for state in optimizer.state.values() for value in state.values()]

    trainer: Any = SimpleNamespace(resume_mode="auto", resume_from_path=None, default_local_dir=str(directory))
    checkpoint = find_checkpoint(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
    stamp = 0.0
    if checkpoint is not None:
        stamp = checkpoint.state["kl_controller"]["kl_coef"]
        worker.load_checkpoint(str(checkpoint.folder / "actor"))
        assert len(optimizer.state) > 5
        for tensor in tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert (local == stamp).all(), f"{local.flatten()[:3]} in a checkpoint of {stamp}"
    note("loaded", stamp)
    checkpoints = Checkpoints(directory, {"actor": keep}, "a run")
    for parameter in worker.engine.module.parameters():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    while True:
        stamp += 1
        for tensor in tensors():
            tensor.fill_(stamp)
        dist.barrier()
        note("saving", stamp)
        step = int(stamp) % 3 + 1  # with keep=None each save replaces the one three before
        folder = [checkpoints.begin(step) if context.rank == 0 else None]
        dist.broadcast_object_list(folder)
        assert folder[0] is not None
        worker.save_checkpoint(str(folder[0] / "actor"))
        dist.barrier()
        if context.rank == 0:
            checkpoints.complete(folder[0], {**CHECKPOINT_STATE, "step": step, "kl_controller": {"kl_coef": stamp}})
            note("committing", stamp)
            checkpoints.commit(folder[0])
        note("saved", stamp)


Event = tuple[str, int, float]  # what, the stamp, the time


def read(log: Path) -> list[Event]:
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(event, int(stamp), float(at)) for event, stamp, at in lines]


def count(events: list[Event], event: str) -> int:
    return sum(name == event for name, *_ in events)


def longest(events: list[Event], start: str) -> float:
    """From that event of a save to its end, in seconds."""
    times = {(event, stamp): at for event, stamp, at in events}
    whole = [stamp for event, stamp in times if event == "saved" and (start, stamp) in times]
    return max(times["saved", stamp] - times[start, stamp] for stamp in whole)


def test_twenty_saves_killed_at_random_moments_leave_the_newest_whole(tmp_path: Path, tiny_model_path: str) -> None:
    """RLinf/RLinf#1469, prime-rl b127f0375 (B085): kill -9 while a step is saved, then resume with auto."""
    chance, directory, log = random.Random(0), tmp_path / "checkpoints", tmp_path / "log"
    interrupted = attempts = 0
    while interrupted < KILLS:
        attempts += 1
        assert attempts <= 2 * KILLS, "the moments lie outside the saves"
        before = len(read(log))
        # From the beginning, or only the renaming and removing, which is short.
        start, number = chance.choice(["saving", "committing"]), chance.randint(2, 5)
        with Ranks(3 if attempts % 5 == 0 else 2) as ranks:
            failures: list[str] = []
            keep = 2 if attempts % 2 else None
            thread = threading.Thread(target=run, args=(ranks, failures, directory, tiny_model_path, log, keep))
            thread.start()
            deadline = time.monotonic() + WAIT_S
            try:
                while count(events := read(log)[before:], start) < number:
                    assert not failures, failures[0]
                    assert time.monotonic() < deadline, f"{events} within {WAIT_S:.0f} s"
                    time.sleep(0.0005)
                time.sleep(chance.uniform(0, longest(events, start)))
            finally:
                for process in chance.sample(ranks.processes, len(ranks.processes)):
                    if process.pid is not None:
                        os.kill(process.pid, signal.SIGKILL)
            thread.join(WAIT_S)
            assert failures == []
        events = read(log)[before:]
        interrupted += count(events, "saving") > count(events, "saved")
    saved = begun = 0
    for event, stamp, _ in read(log):
        if event == "loaded":
            assert saved <= stamp <= begun, f"{stamp} was loaded, {saved} was known to be saved, {begun} begun"
            saved = begun = stamp
        elif event == "saving":
            begun = stamp
        elif event == "saved":
            saved = stamp


def run(ranks: Ranks, failures: list[str], directory: Path, model: str, log: Path, keep: int | None) -> None:
    try:
        ranks.run(save_for_ever, directory, model, log, keep)
    except RuntimeError as error:  # of one of the ranks; that one is gone is an EOFError
        failures.append(str(error))
    except (EOFError, OSError):
        pass
