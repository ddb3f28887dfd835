"""The folders of `trainer.default_local_dir`: written beside, renamed when complete, found again, removed when old.

    global_step_{N}/trainer.json        the driver's state, the config, and name and size of every other file
    global_step_{N}/actor/, critic/     what the ranks wrote (`distributed.checkpoint`)
    latest_checkpointed_iteration.txt   N of the newest, written last

A folder is complete when trainer.json is there and every file it lists has the size it lists. Reading is JSON and
safetensors; nothing is ever unpickled. Imports no torch: what can be refused is refused before anything heavy loads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_lite.config import Config, redacted

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "trainer.json"
FORMAT = 1
# Before the name of a folder that is not there yet, or not any more; while a replaced one has no successor it counts.
BEING_WRITTEN, BEING_REPLACED, BEING_REMOVED = ".writing_", ".replaced_", ".removing_"
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
    """A complete one."""

    folder: Path
    state: dict[str, Any]  # trainer.json
    warning: str | None = None  # why it is not the one the tracker names

    @property
    def step(self) -> int:
        return int(self.state["step"])


def read_checkpoint(folder: Path) -> Checkpoint:
    """ValueError says why the folder cannot be resumed from. Opens trainer.json only."""
    found = {path for path in folder.rglob("*") if path.is_file()}
    pickled = sorted(path for path in found if path.suffix in PICKLED or path.name in PICKLED)
    if pickled:
        raise ValueError(f"has {pickled[0].relative_to(folder)}, which may be a pickle: those run code, none is opened")
    if folder / STATE not in found:
        raise ValueError(f"has no {STATE}: it is not a checkpoint of verl_lite, or not all of one")
    try:
        state = json.loads((folder / STATE).read_bytes())
        files, step = dict(state["files"]), int(state["step"])
        if state["format"] != FORMAT:
            raise ValueError(f"{STATE} has format {state['format']!r}, this version reads {FORMAT}")
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(f"{STATE} is damaged ({type(error).__name__}: {error})") from error
    for name, size in files.items():
        path = folder / name
        if path not in found:
            raise ValueError(f"lacks {name}")
        if (there := path.stat().st_size) != size:
            raise ValueError(f"{name} has {there} bytes instead of {size}")
    return Checkpoint(folder, {**state, "step": step})


def find_checkpoint(config: Config) -> Checkpoint | None:
    """What `trainer.resume_mode` says to go on from. ValueError where only the user can decide."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        assert trainer.resume_from_path is not None, "validate asks for it"
        folder = Path(trainer.resume_from_path)
        try:
            return read_checkpoint(folder)
        except ValueError as error:
            raise ValueError(f"trainer.resume_from_path={folder} {error}{_others(folder.parent, folder)}") from error
    return _newest(Path(trainer.default_local_dir))


def _newest(directory: Path) -> Checkpoint | None:
    folders = _folders(directory)
    tracker = directory / TRACKER
    complete, broken = [], []
    for folder in folders:
        try:
            complete.append(read_checkpoint(folder))
        except ValueError as error:
            broken.append(f"{folder.name} {error}")
    complete.sort(key=lambda checkpoint: float(checkpoint.state["saved_at"]))
    tracked = tracker.read_text(errors="replace").strip() if tracker.is_file() else None
    if not complete:
        if tracked is None and not folders:
            return None
        reasons = "; ".join(broken) or f"{TRACKER} says {tracked!r}, and there is no such folder"
        raise ValueError(f"trainer.default_local_dir={directory} has no complete checkpoint: {reasons}. {WAYS_OUT}")
    # Complete ones that the tracker does not know: the run was killed before it could write it.
    newer = [c for c in complete if tracked is None or _modified(c.folder / STATE) > _modified(tracker)]
    named = [checkpoint for checkpoint in complete if str(checkpoint.step) == tracked]
    chosen = (newer or named or complete)[-1]
    if str(chosen.step) == tracked:
        return chosen
    why = "is not there" if tracked is None else f"says {tracked!r}"
    if chosen not in newer:
        why += ", but " + next(
            (f for f in broken if f.startswith(f"global_step_{tracked} ")), "there is no such folder"
        )
    return replace(chosen, warning=f"{tracker} {why}: going on from the newest complete checkpoint, {chosen.folder}")


def _folders(directory: Path) -> list[Path]:
    """Those of checkpoints, by step; one that was being replaced counts while nothing stands in its place."""
    found: dict[int, Path] = {}
    for path in sorted(directory.glob("*global_step_*")) if directory.is_dir() else []:
        match = re.fullmatch(rf"({re.escape(BEING_REPLACED)})?global_step_(\d+)", path.name)
        if match and path.is_dir() and not (match[1] and (directory / f"global_step_{match[2]}").exists()):
            found[int(match[2])] = path
    return [found[step] for step in sorted(found)]


def _others(directory: Path, folder: Path) -> str:
    """The complete checkpoints beside a broken one."""
    names = []
    for other in _folders(directory):
        with contextlib.suppress(ValueError):
            if other != folder:
                names.append(read_checkpoint(other).folder)
    return "".join(f"; complete is trainer.resume_from_path={name}" for name in names[-1:])


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def resume_problems(config: Config) -> list[str]:
    """Why the run cannot go on from the checkpoint it finds, or cannot save; without loading anything."""
    problems = []
    trainer = config.trainer
    try:
        checkpoint = find_checkpoint(config)
    except ValueError as error:
        problems.append(str(error))
    else:
        if checkpoint is not None:
            problems += list(_misfits(config, checkpoint))
    if trainer.save_freq > 0:
        folder = Path(trainer.default_local_dir)
        there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            problems.append(f"trainer.default_local_dir={folder}: {there} is not a folder that this user can write to")
    return problems


def _misfits(config: Config, checkpoint: Checkpoint) -> Iterator[str]:
    name, way_out = checkpoint.folder, "; give the same value, or trainer.resume_mode=disable"
    changes = changed_keys(config, checkpoint)
    for key in FIXED:
        if key in changes:
            yield f"{key}: was {changes[key][0]}, is {changes[key][1]}, and the run goes on from {name}{way_out}"
    parts = {"actor": config.actor_rollout_ref.actor.checkpoint}
    if config.needs_critic and "critic.enable" not in changes:
        parts["critic"] = config.critic.checkpoint
    for role, wanted in parts.items():
        key = "actor_rollout_ref.actor" if role == "actor" else role
        held = checkpoint.state["contents"].get(role, [])
        if lacking := sorted(set(wanted.load_contents) - set(held) - {"hf_model"}):
            yield f"{key}.checkpoint.load_contents has {', '.join(lacking)}, but {name} holds {', '.join(held)} only"
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
                        f"{before.get(field)}{way_out}"
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
    """Writes checkpoints: `folder = begin(step)`, write into it, `commit(step, …)`."""

    def __init__(self, directory: Path, keep: Mapping[str, int | None]) -> None:
        """keep: for each role how many checkpoints have its part; None: all."""
        self.directory, self.keep = directory, keep

    def begin(self, step: int) -> Path:
        """A new folder that nobody takes for a checkpoint yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".*global_step_*"):
            final = self.directory / leftover.name.removeprefix(BEING_REPLACED)
            if leftover.name.startswith(BEING_REPLACED) and not final.exists():
                leftover.rename(final)  # killed between the two renames of `commit`
            else:
                shutil.rmtree(leftover)
        folder = self.directory / f"{BEING_WRITTEN}global_step_{step}"
        folder.mkdir()
        return folder

    def complete(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Put `state` and the list of files into the folder and everything on the disk."""
        files = {
            str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
        }
        (folder / STATE).write_text(json.dumps({"format": FORMAT, **state, "files": files}, indent=1))
        for path in [*folder.rglob("*"), folder]:
            _sync(path)

    def discard(self) -> None:
        """What was begun and cannot be completed gives its room back."""
        for folder in self.directory.glob(f"{BEING_WRITTEN}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, folder: Path) -> Path:
        """Give the folder its name, tell the tracker, remove what is too old."""
        final = self.directory / folder.name.removeprefix(BEING_WRITTEN)
        replaced = self.directory / f"{BEING_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        folder.rename(final)
        _sync(self.directory)
        tracker = self.directory / f".{TRACKER}"
        tracker.write_text(final.name.removeprefix("global_step_"))
        _sync(tracker)
        tracker.rename(self.directory / TRACKER)
        _sync(self.directory)
        try:
            if replaced.exists():
                shutil.rmtree(replaced)
            self._prune()
        except OSError as error:
            logger.warning("old checkpoints in %s could not be removed: %s", self.directory, error)
        return final

    def _prune(self) -> None:
        # Those of former processes count. Age is when they were written: a run that went back a few steps must not
        # lose what it has just saved.
        states = sorted(self.directory.glob(f"global_step_*/{STATE}"), key=_modified, reverse=True)
        folders = [state.parent for state in states]
        for role, keep in self.keep.items():
            having = [folder for folder in folders if (folder / role).is_dir()]
            for folder in having[keep or len(having) :]:
                shutil.rmtree(folder / role)
        for folder in folders:
            if not any((folder / role).is_dir() for role in self.keep):
                shutil.rmtree(folder.rename(self.directory / f"{BEING_REMOVED}{folder.name}"))


def _sync(path: Path) -> None:
    """Have it on the disk: a rename must not outlive the content it names."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
