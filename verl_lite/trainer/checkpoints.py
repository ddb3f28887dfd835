"""The folders of `trainer.default_local_dir`: written beside, renamed when complete, found again, removed when old.

    global_step_{N}/trainer.json        the driver's state, the config, and name and size of every other file
    global_step_{N}/actor/, critic/     what the ranks wrote (`distributed.checkpoint`)
    latest_checkpointed_iteration.txt   N of the newest, written last

A folder is complete when trainer.json is there and every file it lists has the size and the checksum it lists. Reading
is JSON and safetensors; nothing is ever unpickled. Imports no torch: what can be refused is refused before anything
heavy loads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from verl_lite.config import Config, redacted

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "trainer.json"
LOCK = ".lock"
FORMAT = 1
# Before the name of a folder that is not there yet, or not any more; while a replaced one has no successor it counts.
BEING_WRITTEN, BEING_REPLACED, BEING_REMOVED = ".writing_", ".replaced_", ".removing_"
MAX_STATE_BYTES, MAX_CHECKED_BYTES, MAX_DEPTH = 16 << 20, 100 << 20, 20
LARGEST, LARGEST_FLOAT = 2**63, 1e300
MAX_SHOWN, MAX_REASONS = 200, 4  # characters of a foreign text, broken folders, in a message
# Of trainer.json: what a run reads of it. "*" stands for any key, [x] for a list of x, (x, y) for a list of these two.
FORM = {
    "format": int, "step": int, "saved_at": float, "total_training_steps": int, "ranks": int, "data": str,
    "run": str,
    "contents": {"*": [str]},
    "architecture": {"*": {"*": object}},
    "sampler": {"epoch": int, "position": int, "seed": int, "shuffle": bool, "num_rows": int},
    "kl_controller": {"kl_coef": float},
    "skipped_in_a_row": {"actor": int, "critic": int},
    "best": {"*": [(float, int)]},
    "config": {"*": object},
    "files": {"*": (int, int)},
}  # fmt: skip
PICKLED = {".metadata", ".distcp", ".pt", ".pth", ".bin", ".pkl", ".pickle", ".npy", ".npz"}
WAYS_OUT = (
    "trainer.resume_mode=resume_path with trainer.resume_from_path=… names one; trainer.resume_mode=disable starts anew"
)

# A changed value makes another run of it: steps and rows would no longer be those that were counted.
FIXED = ("data.train_batch_size", "critic.enable")
ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
# What a run may change at every start without a word.
FREE = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.run_dir", "trainer.default_local_dir")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the one before is whole."""


@dataclass(frozen=True)
class Checkpoint:
    """One to go on from."""

    folder: Path
    state: dict[str, Any] = field(hash=False)  # trainer.json
    warning: str | None = None  # why it is not the one the tracker names

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def saved_at(self) -> float:
        """Seconds since 1970; later than those of all the checkpoints that were there, whatever the clock says."""
        return float(self.state["saved_at"])


def read_checkpoint(folder: Path, role: str | None = None) -> Checkpoint:
    """ValueError says why it cannot be resumed from, or `role` cannot be read. Of tensors it reads the headers only."""
    return _whole(_read_state(folder), role)


def _read_state(folder: Path) -> Checkpoint:
    """trainer.json, which anybody may have written: everything the run will ask it for is there and of its type."""
    if not (folder / STATE).is_file():
        raise ValueError(f"has no {STATE}: it is not a checkpoint of verl_lite, or not all of one")
    try:
        with (folder / STATE).open("rb") as file:
            content = file.read(MAX_STATE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"has {STATE}, which cannot be read ({error})") from error
    if len(content) > MAX_STATE_BYTES:
        raise ValueError(f"{STATE} is damaged: longer than {MAX_STATE_BYTES} bytes")
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is damaged ({type(error).__name__}: {plain(error)})") from error
    if (depth := _depth(state)) > MAX_DEPTH:
        raise ValueError(f"{STATE} is damaged: lists and mappings stand {depth} deep in each other")
    if isinstance(state, dict) and state.get("format") != FORMAT:
        raise ValueError(f"{STATE} has format {plain(repr(state.get('format')))}, this version reads {FORMAT}")
    if deviation := next(_deviations(state, FORM), None):
        raise ValueError(f"{STATE} is damaged: {plain(deviation)}")
    return Checkpoint(folder, state)


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer := [inner for outer in layer if isinstance(outer, dict | list) for inner in _elements(outer)]:
        depth += 1
    return depth


def _elements(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _deviations(value: Any, form: Any, name: str = "") -> Iterator[str]:
    """Where a JSON value is not of a form of `FORM`'s kind."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{name or 'all of it'} is not a mapping"
            return
        for key in value if "*" in form else form:
            if key in value:
                yield from _deviations(value[key], form.get(key, form.get("*")), f"{name}.{key}" if name else key)
            else:
                yield f"no {name}.{key}" if name else f"no {key}"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{name} is not a list"
            return
        for element in value:
            yield from _deviations(element, form[0], name)
    elif isinstance(form, tuple):
        if not isinstance(value, list) or len(value) != len(form):
            yield f"{name} is not a list of {len(form)}"
            return
        for element, part in zip(value, form, strict=True):
            yield from _deviations(element, part, name)
    elif form is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_FLOAT:
            yield f"{name}={value!r} is not a number"
    elif form is int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
            yield f"{name}={value!r} is not a count"
    elif not isinstance(value, form):
        yield f"{name} is not a {form.__name__}"


def _whole(checkpoint: Checkpoint, role: str | None = None) -> Checkpoint:
    """The checkpoint, if its files are those that were saved, and nothing else would be loaded with them.

    Where one role alone is asked for, others may have been removed as a whole, as `Checkpoints` does.
    """
    folder, files = checkpoint.folder, checkpoint.state["files"]
    try:
        there = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
        for name, path in sorted(there.items()):
            if path.suffix in PICKLED or path.name in PICKLED:
                raise ValueError(f"has {plain(name)}, which may be a pickle: those run code, none is opened")
            if path.is_symlink():
                raise ValueError(f"has the link {plain(name)}: put a copy of what it leads to in its place")
            if path.suffix == ".safetensors" and name not in files:
                raise ValueError(f"has {plain(name)}, which was not saved with it")
        gone = checkpoint.state["contents"].keys() - there.keys()
        for name, (size, checksum) in files.items():
            part = name.partition("/")[0]
            if part in gone and role not in (None, part):
                continue
            if name not in there or not there[name].is_file():
                why = f", and all else of it (trainer.max_{plain(part)}_ckpt_to_keep?)" if part in gone else ""
                raise ValueError(f"lacks {plain(name)}{why}")
            if (bytes_there := there[name].stat().st_size) != size:
                raise ValueError(f"{plain(name)} has {bytes_there} bytes instead of {size}")
            if _checksum(there[name]) != checksum:
                raise ValueError(f"{plain(name)} is damaged: it is not what was saved")
    except (OSError, RecursionError) as error:
        raise ValueError(f"cannot be read ({type(error).__name__}: {plain(error)})") from error
    return checkpoint


def _checksum(path: Path) -> int:
    """CRC-32 of a file; of .safetensors the header only, which says what the rest means: models are too large."""
    with path.open("rb") as file:
        start = file.read(8) if path.suffix == ".safetensors" else b""
        rest = int.from_bytes(start, "little") if start else MAX_CHECKED_BYTES
        return zlib.crc32(start + file.read(min(rest, MAX_CHECKED_BYTES)))


def plain(text: object) -> str:
    """What another program wrote, for a message: short, and without what steers a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: MAX_SHOWN + 1])
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"


def find_checkpoint(config: Config) -> Checkpoint | None:
    """What `trainer.resume_mode` says to go on from. ValueError where only the user can decide."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        newest = _newest(Path(trainer.default_local_dir))
        if newest is not None or trainer.resume_from_path is None:
            return newest
    assert trainer.resume_from_path is not None, "validate asks for it"
    folder = Path(trainer.resume_from_path)
    try:
        return read_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"trainer.resume_from_path={folder} {error}{_others(folder)}") from error


def _newest(directory: Path) -> Checkpoint | None:
    states, broken = [], []
    for step, folder in _folders(directory).items():
        try:
            states.append(_read_state(folder))
            if states[-1].step != step:
                raise ValueError(f"is of step {states.pop().step}")
        except ValueError as error:
            broken.append(f"{folder.name} {error}")
    states.sort(key=Checkpoint.saved_at, reverse=True)
    tracker = directory / TRACKER
    tracked = _tracked(tracker)
    named = [checkpoint for checkpoint in states if str(checkpoint.step) == tracked]
    # The tracker does not know them: the run was killed before it could write it. Not only by the times of the files,
    # which copying changes, and not only by those in them: an older step written into the tracker by hand is meant.
    newer = [
        checkpoint
        for checkpoint in states
        if named and checkpoint.saved_at() > named[0].saved_at()
        and (checkpoint.folder / STATE).stat().st_mtime > tracker.stat().st_mtime
    ]  # fmt: skip
    skipped = [reason for reason in broken if reason.startswith(f"global_step_{tracked} ")]
    for candidate in dict.fromkeys([*newer, *named, *states]):
        try:
            chosen = _whole(candidate)
            break
        except ValueError as error:
            skipped.append(f"{candidate.folder.name} {error}")
    else:
        if tracked is None and not broken and not skipped:
            return None
        reasons = "; ".join(list(dict.fromkeys(skipped + broken))[:MAX_REASONS])
        reasons = reasons or f"{TRACKER} names {tracked!r}, which is not there"
        raise ValueError(f"trainer.default_local_dir={directory} has no complete checkpoint: {reasons}. {WAYS_OUT}")
    if str(chosen.step) == tracked and not skipped:
        return chosen
    if not named:
        skipped = [f"{TRACKER} " + ("is not there" if tracked is None else f"names {tracked!r}"), *skipped, *broken]
    elif not skipped:
        skipped = [f"{TRACKER} names {tracked!r}, saved before the newest"]
    why = "; ".join(list(dict.fromkeys(skipped))[:MAX_REASONS])
    return replace(chosen, warning=f"{directory}: {why}: going on from the newest complete checkpoint, {chosen.folder}")


def _tracked(tracker: Path) -> str | None:
    if not tracker.is_file():
        return None
    with tracker.open(errors="replace") as file:
        return plain(file.read(MAX_SHOWN).strip())


def _folders(directory: Path) -> dict[int, Path]:
    """Those of checkpoints by step; one that was being replaced counts while nothing stands in its place."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*global_step_*")) if directory.is_dir() else []:
        match = re.fullmatch(rf"({re.escape(BEING_REPLACED)})?global_step_([0-9]+)", path.name)
        if match and path.is_dir() and not (match[1] and (directory / f"global_step_{match[2]}").exists()):
            found[int(match[2])] = path
    return dict(sorted(found.items()))


def _others(folder: Path) -> str:
    """The newest complete checkpoint in a folder that is none, or else around and beside it."""
    for places in (_folders(folder).values(), (folder.parent, *_folders(folder.parent).values())):
        found = []
        for place in places:
            with contextlib.suppress(ValueError):
                found.append(_read_state(place))
        for checkpoint in sorted(found, key=Checkpoint.saved_at, reverse=True):
            with contextlib.suppress(ValueError):
                return f"; complete is trainer.resume_from_path={_whole(checkpoint).folder}"
    return ""


def resume_problems(config: Config) -> list[str]:
    """Why the run cannot go on from the checkpoint it finds; without loading anything."""
    problems = []
    try:
        checkpoint = find_checkpoint(config)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    else:
        if checkpoint is not None:
            problems += list(_misfits(config, checkpoint))
    return problems


def _misfits(config: Config, checkpoint: Checkpoint) -> Iterator[str]:
    name, way_out = checkpoint.folder, "; give the same value, or trainer.resume_mode=disable"
    changes = changed_keys(config, checkpoint)
    for key in FIXED:
        if key in changes:
            yield f"{key}: was {plain(changes[key][0])}, is {changes[key][1]}, and the run goes on from {name}{way_out}"
    parts = {"actor": config.actor_rollout_ref.actor.checkpoint}
    if config.needs_critic and "critic.enable" not in changes:
        parts["critic"] = config.critic.checkpoint
    for role, wanted in parts.items():
        key = "actor_rollout_ref.actor" if role == "actor" else role
        held = checkpoint.state["contents"].get(role, [])
        if lacking := sorted(set(wanted.load_contents) - set(held) - {"hf_model"}):
            there = plain(", ".join(held))
            found = [part for part in wanted.load_contents if part in held]
            yield (
                f"{key}.checkpoint.load_contents has {', '.join(lacking)}, but {name} holds {there} only; "
                + (f"set it to [{','.join(found)}]" if "model" in found else "trainer.resume_mode=disable starts anew")
            )
        elif "model" not in wanted.load_contents:
            yield (
                f"{key}.checkpoint.load_contents={wanted.load_contents} has no model to go on from; add it, or set "
                "trainer.resume_mode=disable"
            )
    for role, model in (("actor", config.actor_rollout_ref.model), ("critic", config.critic.model)):
        before = checkpoint.state["architecture"].get(role)
        here = architecture(model.path, model.override_config)
        if role in parts and before and here:
            for field in ARCHITECTURE:
                if before.get(field) != here.get(field):
                    key = "actor_rollout_ref" if role == "actor" else role
                    yield (
                        f"{key}.model.path={model.path} has {field}={here.get(field)}, the model in {name} has "
                        f"{plain(before.get(field))}{way_out}"
                    )
                    break


def architecture(path: str, override: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a local model's config that its weights' shapes follow from; empty for one on a hub."""
    file = Path(path) / "config.json"
    config = {**json.loads(file.read_text()), **override} if file.is_file() else {}
    return {field: config[field] for field in ARCHITECTURE if field in config}


def changed_keys(config: Config, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value when saved, value now)."""
    here = dict(_flat(json.loads(json.dumps(redacted(config)))))
    before = dict(_flat(checkpoint.state["config"]))
    keys = [key for key in {**before, **here} if before.get(key) != here.get(key) and not key.startswith(FREE)]
    return {key: (before.get(key), here.get(key)) for key in keys}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _flat(entry, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


class Checkpoints:
    """Writes checkpoints: `folder = begin(step)`, write into it, `complete(folder, state)`, `commit(folder)`."""

    def __init__(self, directory: Path, keep: Mapping[str, int | None], run: str) -> None:
        """keep: for each role how many checkpoints have its part; None: all. run: whose they are, for ever."""
        self.directory, self.keep, self.run = directory, keep, run
        self._known: dict[Path, Checkpoint] = {}  # the checkpoints that are there
        self._lock: TextIO | None = None
        self._begun: Path | None = None

    def begin(self, step: int) -> Path:
        """A new folder that nobody takes for a checkpoint yet."""
        if self._lock is None or not (self.directory / LOCK).exists():
            self._lock = claim(self.directory)
        for leftover in self._leftovers(BEING_WRITTEN, BEING_REPLACED, BEING_REMOVED):
            final = self.directory / leftover.name.removeprefix(BEING_REPLACED)
            if leftover.name.startswith(BEING_REPLACED) and not final.exists():
                leftover.rename(final)  # killed between the two renames of `commit`
            else:
                _remove(leftover)
        folder = self.directory / f"{BEING_WRITTEN}global_step_{step}"
        folder.mkdir()
        self._begun = folder
        return folder

    def _leftovers(self, *prefixes: str) -> list[Path]:
        return [path for prefix in prefixes for path in self.directory.glob(f"{prefix}global_step_*")]

    def complete(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Put `state` and the list of files into the folder and everything on the disk."""
        files = {
            str(path.relative_to(folder)): (path.stat().st_size, _checksum(path))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        # Not by the clock alone: it may be set back, and be another one where the run is resumed.
        before = [math.nextafter(checkpoint.saved_at(), math.inf) for checkpoint in self._checkpoints()]
        saved_at = max([time.time(), *before])
        content = {"format": FORMAT, **state, "run": self.run, "saved_at": saved_at, "files": files}
        (folder / STATE).write_text(json.dumps(content, indent=1, default=str))
        for path in [*folder.rglob("*"), folder]:
            _sync(path)

    def discard(self) -> None:
        """What was begun and cannot be completed gives its room back."""
        if self._begun is not None:
            shutil.rmtree(self._begun, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.directory / f".{TRACKER}").unlink(missing_ok=True)

    def commit(self, folder: Path) -> Path:
        """Give the folder its name, tell the tracker, remove what is too old."""
        final = self.directory / folder.name.removeprefix(BEING_WRITTEN)
        replaced = self.directory / f"{BEING_REPLACED}{final.name}"
        if os.path.lexists(final):
            final.rename(replaced)
        folder.rename(final)
        self._known.pop(final, None)
        _sync(self.directory)
        tracker = self.directory / f".{TRACKER}"
        tracker.write_text(final.name.removeprefix("global_step_"))
        _sync(tracker)
        tracker.rename(self.directory / TRACKER)
        _sync(self.directory)
        try:
            if os.path.lexists(replaced):
                _remove(replaced)
            self._prune()
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.directory, error)
        return final

    def _checkpoints(self) -> list[Checkpoint]:
        """Those that are there, newest first, of former processes and other runs too."""
        for folder in self.directory.glob("global_step_*"):
            if folder not in self._known:
                with contextlib.suppress(ValueError):
                    checkpoint = _read_state(folder)
                    if folder.name == f"global_step_{checkpoint.step}":  # a copy of another name is the user's
                        self._known[folder] = checkpoint
        self._known = {folder: checkpoint for folder, checkpoint in self._known.items() if folder.is_dir()}
        return sorted(self._known.values(), key=Checkpoint.saved_at, reverse=True)

    def _prune(self) -> None:
        # By when they were written: a run that went back a few steps must not lose what it has just saved. Those of
        # another run (trainer.resume_mode=disable starts one beside them) are not this one's to remove.
        folders = [checkpoint.folder for checkpoint in self._checkpoints() if checkpoint.state["run"] == self.run]
        kept: dict[str, list[Path]] = {}
        for role, keep in self.keep.items():
            having = [folder for folder in folders if (folder / role).is_dir()]
            kept[role] = having[: keep or len(having)]
        for folder in folders:
            if any(folder in kept[role] for role in kept):
                for role in kept:
                    if folder not in kept[role] and (folder / role).is_dir() and not folder.is_symlink():
                        _remove(folder / role)
            else:
                _remove(folder.rename(self.directory / f"{BEING_REMOVED}{folder.name}"))


def claim(directory: Path) -> TextIO:
    """Make the folder and hold it as long as the file is open: of two runs each would remove what the other writes."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (TRACKER, f".{TRACKER}"):
        if (directory / name).is_dir():
            raise OSError(f"{name} is a folder; remove it, or name another folder")
    lock = (directory / LOCK).open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            lock.close()
            raise OSError("another run is saving there; give each run a folder of its own") from None
        # Some file systems know no locks.
    return lock


def _remove(path: Path) -> None:
    """Of a link the link alone. What cannot be removed (network storage keeps what somebody reads) is not needed."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def _sync(path: Path) -> None:
    """Have it on the disk: a rename must not outlive the content it names."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
