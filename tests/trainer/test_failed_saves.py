"""Saves that the disk refuses: the run ends with the error of the system, and the checkpoint before it is whole."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from test_dead_keys import ADAPTIVE
from test_resume import Runs, runs, workshop  # noqa: F401  (fixtures)
from training import cut, make_actor, ragged_batch, update

from verl_lite.config import CheckpointConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.trainer import checkpoints
from verl_lite.trainer.checkpoints import LOCK, TRACKER
from verl_lite.trainer.ppo import PPOTrainer

SAVING = [*ADAPTIVE, "trainer.save_freq=1", "trainer.total_training_steps=4"]


@pytest.fixture
def step_bytes(runs: Runs) -> int:  # noqa: F811
    """The size of one checkpoint of this recipe."""
    assert runs.run(*SAVING, "trainer.total_training_steps=1")
    size = sum(path.stat().st_size for path in runs.folder.rglob("*") if path.is_file())
    runs.clear()
    return size


class SmallDisk:
    """A folder that holds `size` bytes: a file system of its own; where none may be mounted, files end there."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(parents=True)
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        mount = shutil.which("mount")
        self.mounted = mount is not None and subprocess.run([mount, *options], capture_output=True).returncode == 0
        self.messages = ("No space left on device",) if self.mounted else ("File too large",)

    @contextlib.contextmanager
    def full_at(self, step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Without a file system of its own, this process may write no large file from that step on."""
        write, limits = PPOTrainer.write_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

        def limited(trainer: PPOTrainer) -> Path:
            if trainer.global_step == step and not self.mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            return write(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(PPOTrainer, "write_checkpoint", limited)
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def grow(self, size: int) -> None:
        if self.mounted:
            subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def remove(self) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("room", [2.2, 2.6, 2.95])
def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(
    runs: Runs,  # noqa: F811
    step_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: float,
) -> None:
    """verl-project/verl#4873 (B087): room for two checkpoints and a part of the third."""
    disk = SmallDisk(tmp_path / "disk", int(room * step_bytes))
    place = f"trainer.default_local_dir={disk.folder}"
    try:
        with disk.full_at(3, monkeypatch):
            error = runs.run(*SAVING, place)[-1]
        assert error.startswith(f"CheckpointError step 3 could not be saved in {place}: "), error
        assert any(message in error for message in disk.messages)
        assert {path.name for path in disk.folder.iterdir()} == {"global_step_1", "global_step_2", TRACKER, LOCK}
        assert (disk.folder / TRACKER).read_text() == "2"
        assert [line["step"] for line in runs.metrics()] == [1, 2]  # what is logged as a step is also saved
        disk.grow(5 * step_bytes)
        lines = runs.run(*SAVING, place)
        assert any("global_step_2" in line and "step 2 of 4 is done" in line for line in lines), lines
        assert {path.name for path in disk.folder.iterdir()} == {
            *(f"global_step_{n}" for n in (1, 2, 3, 4)),
            TRACKER,
            LOCK,
        }
    finally:
        disk.remove()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def block_tracker(folder: Path) -> None:
    (folder / f".{TRACKER}").mkdir()


def block_state(folder: Path) -> None:
    (folder / ".writing_global_step_3" / "trainer.json").mkdir()


def block_role(folder: Path) -> None:
    (folder / ".writing_global_step_3" / "critic").write_text("")


@pytest.mark.parametrize(
    ("before", "damage", "found"),
    [("commit", block_tracker, 3), ("complete", block_state, 2), ("complete", remove, None), ("begin", block_role, 2)],
    ids=["tracker", "state", "folder_removed", "one_role"],
)
def test_whatever_of_a_save_fails_the_next_run_goes_on(
    runs: Runs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    damage: Callable[[Path], None],
    found: int | None,
) -> None:
    done = 0
    method = getattr(checkpoints.Checkpoints, before)

    def damaged(self: checkpoints.Checkpoints, *args: object) -> object:
        nonlocal done
        done += 1
        if before == "begin":  # what the workers are to fill is there
            result = method(self, *args)
        if done == 3:
            damage(self.directory)
        return result if before == "begin" else method(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, before, damaged)
        error = runs.run(*SAVING)[-1]
    assert error.startswith("CheckpointError step 3 could not be saved in trainer.default_local_dir="), error
    with contextlib.suppress(OSError):
        (runs.folder / f".{TRACKER}").rmdir()
    assert not list(runs.folder.glob(".writing_*"))
    lines = runs.run(*SAVING)
    if found is not None:
        assert any(f"global_step_{found}: step {found} of 4 is done" in line for line in lines), lines
    assert runs.steps() == ["1", "2", "3", "4"]
    assert (runs.folder / TRACKER).read_text() == "4"


def test_a_model_folder_that_is_gone_after_the_start_does_not_end_the_run(
    runs: Runs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings are saved with every step; those of a hub's model must not need the hub each time."""
    begin = checkpoints.Checkpoints.begin

    def removed(self: checkpoints.Checkpoints, step: int) -> Path:
        if step == 2:
            (runs.workshop.folder / "model").rename(runs.workshop.folder / "moved")
        return begin(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "begin", removed)
        try:
            runs.run(*SAVING, "trainer.total_training_steps=2")
        finally:
            (runs.workshop.folder / "moved").rename(runs.workshop.folder / "model")
    assert runs.steps() == ["1", "2"]
    for role in ("actor", "critic"):
        first, second = (runs.folder / f"global_step_{step}/{role}/huggingface/config.json" for step in (1, 2))
        assert first.read_text() == second.read_text()


def test_a_folder_that_is_a_link_to_another_file_system_is_used_as_any_other(
    runs: Runs,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Runs on local disks keep their checkpoints on shared storage."""
    elsewhere = Path("/dev/shm") / f"verl_lite_test_{os.getpid()}"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    try:
        place = f"trainer.default_local_dir={tmp_path / 'link'}"
        runs.run(*SAVING, place, "trainer.total_training_steps=2", "trainer.max_actor_ckpt_to_keep=1",
                 "trainer.max_critic_ckpt_to_keep=1")  # fmt: skip
        lines = runs.run(*SAVING, place)
        assert any("global_step_2: step 2 of 4 is done" in line for line in lines), lines
        assert (elsewhere / TRACKER).read_text() == "4"
        assert (tmp_path / "link").is_symlink()
    finally:
        shutil.rmtree(elsewhere)


# --- one of several ranks ---------------------------------------------------------------------------------------------


def save_where_one_may_not(
    context: RankContext, folder: Path, model: str, contents: list[str], limit: int
) -> tuple[str | None, str | None]:
    """What a save says when rank 1 may write files of at most `limit` bytes, and what the next one says."""
    worker = make_actor(context, model, checkpoint=CheckpointConfig(contents, contents))
    batch = ragged_batch(8)
    update(worker, batch, cut(batch, context, mini=8, micro_batch_rows=4))
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "2").mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    refused = worker.save_checkpoint(str(folder / "1" / "actor"))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return refused, worker.save_checkpoint(str(folder / "2" / "actor"))


@pytest.mark.parametrize(
    ("contents", "limit"),
    [(["model", "optimizer", "extra"], 20_000), (["optimizer", "model"], 100_000), (["extra"], 1_000)],
    ids=["model", "optimizer", "extra"],
)
def test_where_one_rank_cannot_write_nobody_waits_for_it(
    tmp_path: Path, tiny_model_path: str, two_ranks: Ranks, contents: list[str], limit: int
) -> None:
    answers = two_ranks.run(save_where_one_may_not, tmp_path, tiny_model_path, contents, limit)
    assert any(refused and "File too large" in refused for refused, _ in answers), answers
    assert [later for _, later in answers] == [None, None]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
