"""The life of `trainer.default_local_dir`: what is found, kept, removed and refused, whatever happens in between."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CHECKPOINT_STATE

from verl_lite.cli import ConfigError
from verl_lite.plan import compose_plan
from verl_lite.trainer.checkpoints import (
    LOCK,
    TRACKER,
    Checkpoint,
    Checkpoints,
    claim,
    find_checkpoint,
    plain,
)

HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
RUN = "a run"
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)  # two zeros as safetensors


def write(checkpoints: Checkpoints, step: int, stamp: float = 0.0) -> Path:
    """One save; the stamp tells it from another one of the same step."""
    folder = checkpoints.begin(step)
    for role in checkpoints.keep:
        (folder / role / "model").mkdir(parents=True)
        (folder / role / "model" / "shard-1.safetensors").write_bytes(WEIGHTS)
    checkpoints.complete(folder, {**CHECKPOINT_STATE, "step": step, "kl_controller": {"kl_coef": stamp}})
    return checkpoints.commit(folder)


def find(directory: Path, resume_from_path: Path | None = None, mode: str | None = None) -> Checkpoint | None:
    trainer = SimpleNamespace(
        resume_mode=mode or ("auto" if resume_from_path is None else "resume_path"),
        default_local_dir=str(directory),
        resume_from_path=resume_from_path and str(resume_from_path),
    )
    return find_checkpoint(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]


def steps(directory: Path, role: str = "") -> set[int]:
    return {int(path.name[12:]) for path in directory.glob("global_step_*") if (path / role).is_dir()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with steps 2 and 4."""
    checkpoints = Checkpoints(tmp_path, {"actor": None}, RUN)
    for step in (2, 4):
        write(checkpoints, step)
    return tmp_path


# --- interruptions ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Interruption:
    """Raises `error` at the n-th change of the file system, before it happens; the interpreter reports them all."""

    CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")

    def __init__(self) -> None:
        self.left, self.error = 0, BaseException()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if self.left and (writes or event in self.CHANGES):
            self.left -= 1
            if not self.left:
                raise self.error

    @contextlib.contextmanager
    def at(self, change: int, error: BaseException) -> Iterator[None]:
        self.left, self.error = change, error
        try:
            yield
        finally:
            self.left = 0


INTERRUPTION = Interruption()


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["kill", "disk_full"])
@pytest.mark.parametrize("step", [4, 6], ids=["replacing", "new"])
def test_no_change_of_the_disk_is_a_moment_at_which_the_newest_is_lost(
    tmp_path: Path, step: int, error: BaseException
) -> None:
    """verl-project/verl#4873 (B087), RLinf/RLinf#1469 (B085): every moment of a save is tried, one after the other."""
    for change in itertools.count(1):
        directory = tmp_path / str(change)
        checkpoints = Checkpoints(directory, {"actor": 1, "critic": 2}, RUN)
        write(checkpoints, 2, 1.0)
        write(checkpoints, 4, 2.0)
        finished = False
        with INTERRUPTION.at(change, error):
            try:
                write(checkpoints, step, 3.0)
                finished = True
            except Killed:
                pass
            except OSError:
                checkpoints.discard()
                assert not list(directory.glob(".writing_*"))
        found = find(directory)
        assert found is not None
        stamp = found.state["kl_controller"]["kl_coef"]
        assert stamp in ([3.0] if finished else [2.0, 3.0]), f"change {change}: {found}"
        assert all((path / TRAINER).is_file() for path in directory.glob("global_step_*")), (
            "half removed, or half there"
        )
        named = (directory / TRACKER).read_text()  # other tools read it too
        assert any((directory / f"{prefix}global_step_{named}").is_dir() for prefix in ("", ".replaced_"))
        with INTERRUPTION.at(10, Killed()), pytest.raises(Killed):  # the next one does not come far either
            write(Checkpoints(directory, {"actor": 1, "critic": 2}, RUN), 8, 4.0)
        assert find(directory).state["kl_controller"] == {"kl_coef": stamp}  # type: ignore[union-attr]
        write(Checkpoints(directory, {"actor": 1, "critic": 2}, RUN), 8, 4.0)  # nothing left behind is in the way
        assert (steps(directory, "actor"), len(steps(directory, "critic"))) == ({8}, 2)
        assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == [LOCK]
        if finished and INTERRUPTION.left == 0 and not isinstance(error, OSError):
            break
        if change == 60:  # an error while old ones are removed is a warning: such saves finish too
            break
    assert change > 12


def test_nothing_gets_its_name_before_its_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLinf/RLinf#1469 (B085): a machine that loses power keeps renames and loses what was not synced."""
    done: list[tuple[str, str]] = []
    rename, fsync = Path.rename, os.fsync

    def renamed(self: Path, target: Path) -> Path:
        done.append(("rename", Path(target).name))
        return rename(self, target)

    def synced(file: int) -> None:
        done.append(("sync", str(Path(os.readlink(f"/proc/self/fd/{file}")).relative_to(tmp_path.resolve()))))
        fsync(file)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    write(Checkpoints(tmp_path, {"actor": None}, RUN), 2)
    events = iter(done)
    first = set(itertools.takewhile(lambda event: event != ("rename", "global_step_2"), events))
    second = set(itertools.takewhile(lambda event: event != ("rename", TRACKER), events))
    folder = ".writing_global_step_2"
    parts = ("", "/trainer.json", "/actor", "/actor/model", "/actor/model/shard-1.safetensors")
    assert first >= {("sync", f"{folder}{part}") for part in parts}
    assert second >= {("sync", "."), ("sync", f".{TRACKER}")}
    assert list(events) == [("sync", ".")]


Action = tuple[str, int]


@settings(max_examples=300, deadline=None)
@given(
    keep=st.tuples(*[st.sampled_from([1, 2, 3, None])] * 2),
    actions=st.lists(
        st.tuples(st.sampled_from(["save"] * 3 + ["restart", "back", "fail", "kill"]), st.integers(1, 40)), max_size=14
    ),
)
def test_whatever_happens_the_newest_is_found_and_as_many_are_kept_as_asked(
    keep: tuple[int | None, int | None], actions: list[Action]
) -> None:
    """Saves, failures, kills, restarts and returns to older steps in any order."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        live_through(directory, {"actor": keep[0], "critic": keep[1]}, actions)
    finally:
        shutil.rmtree(directory)


def live_through(directory: Path, keep: dict[str, int | None], actions: list[Action]) -> None:
    checkpoints, step, newest = Checkpoints(directory, keep, RUN), 0, None
    for stamp, (action, number) in enumerate(actions, 1):
        if action == "restart":
            checkpoints = Checkpoints(directory, keep, RUN)
            continue
        if action == "back":  # trainer.resume_from_path names an older one
            checkpoints = Checkpoints(directory, keep, RUN)
            step = sorted(steps(directory))[number % len(steps(directory))] if steps(directory) else 0
            continue
        before, step = contents(directory), step + 1
        error = {"fail": OSError("disk full"), "kill": Killed(), "save": Killed()}[action]
        with INTERRUPTION.at(0 if action == "save" else number, error):
            try:
                write(checkpoints, step, float(stamp))
                newest = float(stamp)
            except OSError:
                checkpoints.discard()
            except Killed:
                checkpoints = Checkpoints(directory, keep, RUN)
        found = find(directory)
        assert found is not None or newest is None
        at = None if found is None else found.state["kl_controller"]["kl_coef"]
        assert at in (newest, float(stamp)), f"{action} at {number}: {at}, and {newest} was the newest"
        newest = at
        if action == "save":
            order = [path for path in before if path != f"global_step_{step}"] + [f"global_step_{step}"]
            for role, count in keep.items():
                having = [path for path in order if path == order[-1] or role in before[path]]
                assert {f"global_step_{number}" for number in steps(directory, role)} == set(having[-(count or 99) :])
            assert steps(directory) == steps(directory, "actor") | steps(directory, "critic")


def contents(directory: Path) -> dict[str, set[str]]:
    """Of each folder the roles it has, from the first that was saved to the last."""
    found = {}
    for path in (*directory.glob("global_step_*"), *directory.glob(".replaced_*")):
        final = path.name.removeprefix(".replaced_")
        if final == path.name or not (directory / final).exists():
            saved_at = json.loads((path / "trainer.json").read_text())["saved_at"]
            found[final] = (saved_at, {role.name for role in path.iterdir() if role.is_dir()})
    return {name: roles for name, (_, roles) in sorted(found.items(), key=lambda item: item[1][0])}


def test_a_clock_that_was_set_back_does_not_make_the_newest_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2e9, 1e9, 1e9])
    monkeypatch.setattr("verl_lite.trainer.checkpoints.time.time", lambda: next(times))
    for step in (1, 2, 3):
        write(Checkpoints(tmp_path, {"actor": 1}, RUN), step)  # as three processes would
        assert steps(tmp_path) == {step}
        found = find(tmp_path)
        assert found is not None and (found.step, found.warning) == (step, None)


def test_a_step_that_is_saved_again_is_the_newest(tmp_path: Path) -> None:
    """trainer.resume_from_path named step 1 of 4: what is saved from then on must not be the first to be removed."""
    for step in (1, 2, 3, 4):
        write(Checkpoints(tmp_path, {"actor": None}, RUN), step)
    write(Checkpoints(tmp_path, {"actor": 2}, RUN), 2)
    assert steps(tmp_path) == {2, 4}


def test_an_old_one_that_cannot_be_removed_does_not_undo_the_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On network storage a folder stays as long as somebody reads a file of it."""

    def busy(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr("verl_lite.trainer.checkpoints.shutil.rmtree", busy)
    checkpoints = Checkpoints(saved, {"actor": 1}, RUN)
    for step in (6, 7, 7, 8):
        write(checkpoints, step)
    found = find(saved)
    assert found is not None and (found.step, found.warning) == (8, None)
    assert steps(saved) == {8}


def test_of_a_link_the_link_alone_is_removed(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Someone has moved checkpoints to other storage: whole ones, and the critic's part of one."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for step in (2, 4):
        (saved / f"global_step_{step}" / "critic").mkdir()
        (saved / f"global_step_{step}").rename(elsewhere / str(step))
        (saved / f"global_step_{step}").symlink_to(elsewhere / str(step))
    checkpoints = Checkpoints(saved, {"actor": 1, "critic": 3}, RUN)
    for step in (5, 6, 7, 8):
        write(checkpoints, step)
    assert {path.name for path in saved.iterdir()} == {"global_step_6", "global_step_7", "global_step_8", TRACKER, LOCK}
    assert len(list(elsewhere.glob("*/actor/model/*"))) == 2 and len(list(elsewhere.glob("*/critic"))) == 2


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), lambda path: path.symlink_to("gone")])
@pytest.mark.parametrize("name", [".writing_global_step_6", ".removing_global_step_1", "global_step_6"])
def test_whatever_has_the_name_of_a_folder_to_be_does_not_end_the_run(
    saved: Path, name: str, make: Callable[[Path], object]
) -> None:
    make(saved / name)
    write(Checkpoints(saved, {"actor": None}, RUN), 6)
    assert {path.name for path in saved.iterdir()} == {*(f"global_step_{n}" for n in (2, 4, 6)), TRACKER, LOCK}


def test_folders_that_are_not_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """Someone else's folders: of verl itself, of hand-made copies, hidden ones."""
    others = ["global_step_1", "global_step_5_best", ".backup_global_step_1", "old_global_step_3"]
    for name in others:
        (tmp_path / name / "actor").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, {"actor": 1}, RUN)
    for step in (2, 3, 4):
        write(checkpoints, step)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "global_step_4", TRACKER, LOCK}


@pytest.mark.parametrize("name", ["global_step_2_best", "global_step_02", "global_step_9"])
def test_a_copy_made_by_hand_is_not_counted_and_not_removed(saved: Path, name: str) -> None:
    shutil.copytree(saved / "global_step_2", saved / name)
    checkpoints = Checkpoints(saved, {"actor": 1}, RUN)
    for step in (5, 6):
        write(checkpoints, step)
    assert {path.name for path in saved.iterdir()} == {name, "global_step_6", TRACKER, LOCK}


def test_the_checkpoints_of_an_earlier_run_are_not_counted_and_not_removed(tmp_path: Path) -> None:
    """trainer.resume_mode=disable starts a run beside them; what it keeps of its own says nothing about theirs."""
    for step in (10, 20):
        write(Checkpoints(tmp_path, {"actor": None}, "earlier"), step)
    for step in (1, 2, 3):
        write(Checkpoints(tmp_path, {"actor": 2}, RUN), step)
    assert steps(tmp_path) == {2, 3, 10, 20}
    found = find(tmp_path)
    assert found is not None and (found.step, found.state["run"]) == (3, RUN)


def test_two_runs_do_not_save_in_one_folder(saved: Path) -> None:
    """Both would take the other's folder for a leftover, and remove the other's checkpoints as too old."""
    code = (
        "import sys; from pathlib import Path; from verl_lite.trainer.checkpoints import Checkpoints\n"
        "run = Checkpoints(Path(sys.argv[1]), {'actor': 1}, 'other'); print(run.begin(5), flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(saved)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    folder = Path(other.stdout.readline().strip())
    try:
        ours = Checkpoints(saved, {"actor": 1}, RUN)
        with pytest.raises(OSError, match="another run is saving there; give each run a folder of its own"):
            write(ours, 6)
        ours.discard()
        assert folder.is_dir()
    finally:
        other.kill()
        other.communicate()
    write(ours, 6)
    assert steps(saved) == {6}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_an_older_step_written_into_the_tracker_by_hand_is_meant(saved: Path) -> None:
    (saved / TRACKER).write_text("2")
    os.utime(saved / TRACKER, (9e9, 9e9))
    found = find(saved)
    assert found is not None and (found.step, found.warning) == (2, None)


def test_a_whole_one_that_the_tracker_does_not_know_yet_is_found(saved: Path) -> None:
    """The run was killed between giving the folder its name and telling the tracker."""
    (saved / TRACKER).write_text("2")
    os.utime(saved / TRACKER, (1, 1))
    found = find(saved)
    assert found is not None and found.step == 4
    assert found.warning is not None and f": {TRACKER} names '2', saved before the newest: going on" in found.warning


@pytest.mark.parametrize("name", [TRACKER, f".{TRACKER}"])
def test_a_folder_in_the_trackers_place_is_said_before_the_first_save(saved: Path, name: str) -> None:
    (saved / TRACKER).unlink()
    (saved / name).mkdir()
    with pytest.raises(OSError, match=f"^{name} is a folder; remove it, or name another folder"):
        claim(saved)


@pytest.mark.parametrize("key", ["data.seed", "trainer.total_epochs", "trainer.total_training_steps"])
def test_a_number_too_large_to_be_read_again_is_refused(key: str) -> None:
    """Else all checkpoints of the run would be damaged ones."""
    with pytest.raises(ConfigError, match=f"{key}=9223372036854775808: .*<= "):
        compose_plan([f"{key}={2**63}"])


def test_copying_the_folder_in_another_order_changes_nothing(saved: Path) -> None:
    """cp -r gives files new times: the tracker may become older than what it was written after."""
    for step, seconds in ((4, 100), (2, 300)):
        os.utime(saved / f"global_step_{step}/trainer.json", (seconds, seconds))
    os.utime(saved / TRACKER, (200, 200))
    found = find(saved)
    assert found is not None and (found.step, found.warning) == (4, None)


@pytest.mark.parametrize("content", ["", "abc", "6", "4\x1b[2J", "-4", "4" * 5000])
def test_a_broken_tracker_is_said_and_the_newest_complete_one_taken(saved: Path, content: str) -> None:
    """verl find_latest_ckpt_path, OpenRLHF d4e92951 (B086)."""
    (saved / TRACKER).write_text(content)
    found = find(saved)
    assert found is not None and found.step == 4
    assert found.warning is not None and TRACKER in found.warning and str(found.folder) in found.warning
    assert found.warning.isprintable()


def test_a_lost_tracker_is_said_and_an_absent_folder_is_a_new_run(saved: Path) -> None:
    (saved / TRACKER).unlink()
    found = find(saved)
    assert found is not None and found.step == 4 and "is not there" in (found.warning or "")
    assert find(saved / "absent") is None


def test_a_run_that_began_elsewhere_goes_on_from_what_it_has_saved_itself(saved: Path, tmp_path: Path) -> None:
    """The same command, queued again, before and after its first save."""
    beginning, own = saved / "global_step_2", tmp_path / "own"
    found = find(own, beginning, "auto")
    assert found is not None and found.folder == beginning
    write(Checkpoints(own, {"actor": None}, RUN), 3)
    found = find(own, beginning, "auto")
    assert found is not None and found.folder == own / "global_step_3"


# --- what is refused --------------------------------------------------------------------------------------------------

SHARD, TRAINER = "actor/model/shard-1.safetensors", "trainer.json"


def edit(**changes: Any) -> Callable[[Path], None]:
    """Put values into trainer.json; "files" get added."""

    def change(folder: Path) -> None:
        state = json.loads((folder / TRAINER).read_text())
        changes["files"] = {**state["files"], **changes.get("files", {})}
        (folder / TRAINER).write_text(json.dumps({**state, **changes}))

    return change


def overwrite(name: str, offset: int, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    return change


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def swap_for(make: Callable[[Path], object], name: str = SHARD) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        make(folder / name)

    return change


PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors cut": (put(SHARD, WEIGHTS[:-1]), f"{SHARD} has {len(WEIGHTS) - 1} bytes instead of {len(WEIGHTS)}"),
    "tensors longer": (put(SHARD, WEIGHTS + b"\0"), f"has {len(WEIGHTS) + 1} bytes instead of {len(WEIGHTS)}"),
    "tensors empty": (put(SHARD, b""), "has 0 bytes"),
    "tensors gone": (lambda folder: (folder / SHARD).unlink(), f"lacks {SHARD}"),
    "role gone": (lambda folder: shutil.rmtree(folder / "actor"), f"lacks {SHARD}"),
    "huge header": (overwrite(SHARD, 0, b"\xff" * 8), f"{SHARD} is damaged"),
    "bit of the header's length": (overwrite(SHARD, 0, bytes([WEIGHTS[0] ^ 1])), f"{SHARD} is damaged"),
    "header without JSON": (overwrite(SHARD, 8, b"["), f"{SHARD} is damaged"),
    "other dtype": (overwrite(SHARD, 8 + HEADER.index(b"F32"), b"I32"), f"{SHARD} is damaged"),
    "other offsets": (overwrite(SHARD, 8 + HEADER.index(b"[0,8]"), b"[4,8]"), f"{SHARD} is damaged"),
    "other shape": (overwrite(SHARD, 8 + HEADER.index(b"[2]"), b"[3]"), f"{SHARD} is damaged"),
    "pickled metadata": (put("actor/model/.metadata", PICKLE), "has actor/model/.metadata, which may be a pickle"),
    "a pickle beside": (put("actor/rng.pt", PICKLE), "has actor/rng.pt, which may be a pickle"),
    "a pickle as tensors": (put(SHARD, PICKLE), "bytes instead of"),
    "a pickle as state": (put(TRAINER, PICKLE), "trainer.json is damaged"),
    "more tensors": (put("actor/model/a.safetensors", WEIGHTS), "a.safetensors, which was not saved with it"),
    "a link to a file": (swap_for(lambda path: path.symlink_to("../../../outside")), f"has the link {SHARD}"),
    "a link to a folder": (swap_for(lambda path: path.symlink_to("../../outside"), "actor"), "has the link actor"),
    "a pipe": (swap_for(os.mkfifo), f"lacks {SHARD}"),
    "a pipe as state": (swap_for(os.mkfifo, TRAINER), "has no trainer.json"),
    "a folder as state": (swap_for(os.mkdir, TRAINER), "has no trainer.json"),
    "no state": (lambda folder: (folder / TRAINER).unlink(), "has no trainer.json"),
    "empty state": (put(TRAINER, b""), "trainer.json is damaged"),
    "half of the state": (lambda folder: os.truncate(folder / TRAINER, 100), "trainer.json is damaged"),
    "state is no mapping": (put(TRAINER, b"[1]"), "trainer.json is damaged: all of it is not a mapping"),
    "state is no text": (put(TRAINER, b"\xff\xfe"), "trainer.json is damaged"),
    "state without end": (put(TRAINER, b"[" * 100_000), "trainer.json is damaged (RecursionError"),
    "state too deep": (edit(config={"a": json.loads("[" * 300 + "]" * 300)}), "stand 301 deep in each other"),
    "state too long": (put(TRAINER, b'{"a":[' + b"1," * (9 << 20) + b"1]}"), "longer than 16777216 bytes"),
    "format of the future": (edit(format=2), "trainer.json has format 2, this version reads 1"),
    "step is not a number": (edit(step=float("nan")), "step=nan is not a count"),
    "step is infinite": (edit(step=float("inf")), "step=inf is not a count"),
    "step below 0": (edit(step=-4), "step=-4 is not a count"),
    "step is true": (edit(step=True), "step=True is not a count"),
    "step is a text": (edit(step="4\x1b]0;title\x07"), r"step='4\x1b]0;title\x07' is not a count"),
    "saved when": (edit(saved_at=float("nan")), "saved_at=nan is not a number"),
    "a field is another": (edit(sampler=[]), "sampler is not a mapping"),
    "a field lacks a field": (edit(sampler={"epoch": 0}), "no sampler.position"),
    "a field of a field": (edit(best={"acc\x1b[2J": [[1.0]]}), r"best.acc\x1b[2J is not a list of 2"),
    "a long text": (edit(best={"x" * 5000: 1}), "…"),
    "files without sizes": (edit(files={SHARD: []}), f"files.{SHARD} is not a list of 2"),
    "a file elsewhere": (edit(files={"../../../etc/passwd": [1, 2]}), "lacks ../../../etc/passwd"),
    "a file by its whole path": (edit(files={"/etc/passwd": [1, 2]}), "lacks /etc/passwd"),
    "a file with a bad name": (edit(files={"a\x1b[2J\0": [1, 2]}), r"lacks a\x1b[2J\x00"),
    "a file on the way up": (edit(files={f"actor/../{SHARD}": [1, 2]}), f"lacks actor/../{SHARD}"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_found(saved: Path, damage: str) -> None:
    """RLinf/RLinf#1469 (B085): never a mix, never silently from scratch, nothing executed."""
    change, message = DAMAGES[damage]
    newest = saved / "global_step_4"
    os.utime(newest / TRAINER, (1, 1))
    change(newest)
    with pytest.raises(ValueError) as refused:
        find(saved, newest)
    text = str(refused.value)
    assert text.startswith(f"trainer.resume_from_path={newest} ") and message in text, text
    assert text.endswith(f"; complete is trainer.resume_from_path={saved / 'global_step_2'}")
    assert text.isprintable() and len(text) < 1000
    found = find(saved)
    assert found is not None and found.step == 2
    assert found.warning is not None and message in found.warning and found.warning.isprintable()
    shutil.rmtree(saved / "global_step_2")
    with pytest.raises(ValueError, match=r"has no complete checkpoint: .*trainer\.resume_mode=disable starts anew"):
        find(saved)
    assert not Path("executed").exists()


def test_large_numbers_are_numbers(saved: Path) -> None:
    best = {"val-core/a/reward/mean@1": [[1e30, 4]]}
    edit(best=best)(saved / "global_step_4")
    assert find(saved).state["best"] == best  # type: ignore[union-attr]


def test_a_checkpoint_of_another_step_than_its_folder_says_is_not_taken(saved: Path) -> None:
    (saved / "global_step_4").rename(saved / "global_step_6")
    found = find(saved)
    assert found is not None and found.step == 2 and "global_step_6 is of step 4" in (found.warning or "")
    by_path = find(saved, saved / "global_step_6")  # named by the user: a copy may have any name
    assert by_path is not None and by_path.step == 4


def test_what_a_terminal_would_obey_is_shown_as_text() -> None:
    assert plain("a\x1b[2J\r\nü\u202e") == r"a\x1b[2J\r\nü\u202e"
