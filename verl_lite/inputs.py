"""What a run reads and where it writes, looked at before anything heavy loads: data, models, code, folders, cluster.

Everything here is cheap (no torch, no transformers, the first rows of a file, the headers of weights) and certain: what
is refused could not have run. `trainer.setup` looks deeper while Ray starts.
"""

from __future__ import annotations

import json
import os
import re
import socket
import symtable
from collections.abc import Iterator
from pathlib import Path

from verl_lite.cli import prepared_folder
from verl_lite.config import PLUGIN_KEYS, Config, flatten, gpus_here, leaf_keys, looks_like_path, near_names
from verl_lite.data.files import read_prompt, read_rows
from verl_lite.models.folder import weight_shapes
from verl_lite.tracking import check_loggers

FIRST_ROWS = 8
MAX_JSON_BYTES = 20 << 20  # a larger .json file, which can only be read whole, is left to the reading of the data
CLUSTER_TIMEOUT_S = 10.0
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip


def input_problems(config: Config) -> list[str]:
    """Every file, folder, package or machine the run needs and will not get; the plan of the sizes needs none."""
    if problems := list(_path_problems(config)):
        return problems  # the other checks ask the system about the same paths
    problems = [*_data_problems(config), *_model_problems(config), *_code_problems(config), *_folder_problems(config)]
    problems += _machine_problems(config)
    try:
        check_loggers(config.trainer.logger)
    except ValueError as error:
        problems.append(str(error))
    return problems


def _path_problems(config: Config) -> Iterator[str]:
    """Paths the system will not even look up: names too long, loops of links, folders closed to this user."""
    model = "actor_rollout_ref.model.path"  # first: other keys follow it
    seen = set[str | None]([None])
    for name, value in sorted(flatten(config).items(), key=lambda item: item[0] != model):
        if name not in PLUGIN_KEYS and not leaf_keys()[name].path:
            continue
        for entry in value if isinstance(value, list) else [value]:
            path = f"{entry}".rpartition(".py:")[0] + ".py" if name in PLUGIN_KEYS else entry
            if path in seen or "://" in path:
                continue
            seen.add(path)
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as error:
                yield f"{name}={path:.200}: {getattr(error, 'strerror', None) or error}; name another path"


def _data_problems(config: Config) -> Iterator[str]:
    data = config.data
    if not data.train_files and not config.trainer.val_only:
        yield "data.train_files is not set: name a parquet, json or jsonl file"
    for name in ("data.train_files", "data.val_files"):
        for path in map(Path, flatten(config)[name]):
            if not path.exists():
                yield f"{name}: no such file: {path}" + _what_is_there(path)
            elif data.custom_cls.path is None and (problem := _file_problem(config, path)):
                yield f"{name}: {problem}"


def _file_problem(config: Config, path: Path) -> str | None:
    """What the first rows of a file show; a class of the user's own may read anything."""
    if path.suffix == ".json" and path.stat().st_size > MAX_JSON_BYTES:
        return None
    keys = {"prompt_key": config.data.prompt_key, "reward_fn_key": config.data.reward_fn_key}
    try:
        rows = read_rows(str(path), FIRST_ROWS)
        if not rows:
            return f"{path} has no rows"
        for row_number, row in enumerate(rows):
            read_prompt(row, row_number, str(path), **keys)
    except ValueError as error:
        return str(error)
    return None


def _model_problems(config: Config) -> Iterator[str]:
    model, reward_model = config.actor_rollout_ref.model, config.reward.reward_model
    if model.path is None:
        yield "actor_rollout_ref.model.path is not set: name a model folder or hub id"
    if reward_model.enable and reward_model.model.path is None:
        yield "reward.reward_model.model.path is not set: name the folder or hub id of a sequence classifier"
    folders: dict[str, str | None] = {"actor_rollout_ref.model.path": model.path}
    if config.needs_critic and config.critic.model.path != model.path:
        folders["critic.model.path"] = config.critic.model.path
    if reward_model.enable:
        folders["reward.reward_model.model.path"] = reward_model.model.path
    for name, folder in folders.items():
        if folder is not None and looks_like_path(folder):
            yield from (f"{name}: {problem}" for problem in _model_folder_problems(Path(folder)))
    tokenizer = config.data.tokenizer
    if tokenizer is not None and looks_like_path(tokenizer):
        if not Path(tokenizer).is_dir():
            if tokenizer != model.path:
                yield f"data.tokenizer: no such folder: {tokenizer}" + _what_is_there(Path(tokenizer))
        elif not any((Path(tokenizer) / file).is_file() for file in TOKENIZER_FILES):
            yield (
                f"data.tokenizer: no tokenizer in {tokenizer} (none of {', '.join(TOKENIZER_FILES)}); "
                "actor_rollout_ref.model.tokenizer_path names one elsewhere"
            )
    template = model.custom_chat_template
    if template is not None and "{" not in template and not os.path.isfile(template):
        yield (
            f"actor_rollout_ref.model.custom_chat_template={template}: neither a file that is there nor a Jinja "
            "template, which would hold {{ … }}"
        )


def _model_folder_problems(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield ("no config.json in" if folder.is_dir() else "no such folder:") + f" {folder}" + _what_is_there(folder)
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        yield f"{folder}/config.json cannot be read: {error}"
        return
    if not isinstance(config, dict) or "model_type" not in config:
        yield f"{folder}/config.json has no model_type: it is no Hugging Face model config"
    try:
        weight_shapes(folder)
    except ValueError as error:
        yield str(error)


def _code_problems(config: Config) -> Iterator[str]:
    function, cls = config.reward.custom_reward_function, config.data.custom_cls
    sources: list[tuple[str, str | None, str, str | None]] = [
        ("reward.custom_reward_function.path", function.path, "reward.custom_reward_function.name", function.name),
        ("data.custom_cls.path", cls.path, "data.custom_cls.name", cls.name),
    ]
    for plugin_key in PLUGIN_KEYS:
        file, _, name = str(flatten(config)[plugin_key]).rpartition(":")
        sources.append((plugin_key, file, plugin_key, name))
    for path_key, source, name_key, attribute in sources:
        if source and source.endswith(".py"):
            yield from _check_python(path_key, Path(source), name_key, attribute)


def _check_python(path_key: str, path: Path, name_key: str, attribute: str | None) -> list[str]:
    """Problems of a user's Python file, found without running it."""
    if not path.is_file():
        return [f"{path_key}: no such file: {path}" + _what_is_there(path)]
    try:
        text = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except (SyntaxError, ValueError, OSError) as error:
        return [f"{path_key}: {path} is not valid Python: {error}"]
    if "import *" in text or any(symbol.get_name() == attribute and _is_bound(symbol) for symbol in symbols):
        return []
    defined = [symbol.get_name() for symbol in symbols if symbol.is_namespace()]
    return [f"{name_key}={attribute}: {path} defines {', '.join(defined) or 'no function'}, but no {attribute}"]


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _folder_problems(config: Config) -> Iterator[str]:
    """Folders that would turn out unusable after hours; the run folder is claimed at once anyway."""
    trainer = config.trainer
    folders = {name: getattr(trainer, name) for name in ("rollout_data_dir", "validation_data_dir")}
    if trainer.saves:
        folders["default_local_dir"] = trainer.default_local_dir
    for name, folder in folders.items():
        if folder is None:
            continue
        if "://" in folder:
            yield f"trainer.{name}={folder} is a URL; name a folder (of storage that is mounted here)"
            continue
        there = next(place for place in (Path(folder), *Path(folder).parents) if os.path.lexists(place))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is a file" if there.exists() else "leads nowhere"
            yield f"trainer.{name}={folder}: {there} {why}; name another folder"
    resumed = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and not Path(resumed or "").is_dir():
        yield f"trainer.resume_from_path: no such folder: {resumed}" + _what_is_there(Path(resumed or "/"))


def _machine_problems(config: Config) -> Iterator[str]:
    trainer = config.trainer
    name, address = "ray_kwargs.ray_init.address", config.ray_kwargs.ray_init.address
    if address is None:
        name, address = "RAY_ADDRESS", os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        if trainer.nnodes > 1:
            yield (
                f"trainer.nnodes={trainer.nnodes} without a cluster: the Ray that a run starts for itself is this one "
                "machine; start Ray on the nodes and name its head (ray_kwargs.ray_init.address=HOST:6379 or "
                "RAY_ADDRESS, see docs/clusters.md), or set trainer.nnodes=1"
            )
        if trainer.device == "cuda" and gpus_here() < trainer.n_gpus_per_node:
            yield (
                f"trainer.device=cuda with trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has "
                f"{gpus_here()} GPUs; set trainer.device=cpu, n_gpus_per_node to what there is, or "
                "ray_kwargs.ray_init.address to a cluster that has them"
            )
    elif str(address).startswith("ray://"):
        yield (
            f"{name}={address}: Ray's client is not supported, every batch would cross it; run the command on a node "
            "of the cluster with its HOST:6379, or `ray job submit` it (docs/clusters.md)"
        )
    elif str(address).startswith("http"):
        yield f"{name}={address}: that is Ray's job server; submit to it: ray job submit --address {address} -- …"
    elif address != "auto":
        # Ray itself would try for minutes.
        place = re.fullmatch(r"(?:\w+://)?\[?([^/\]]+?)\]?:(\d+)/?", str(address))
        if place is None:
            yield f"{name}={address}: write host:port, e.g. 10.0.0.1:6379, or auto or local"
            return
        try:
            socket.create_connection((place[1], int(place[2])), timeout=CLUSTER_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            yield f"{name}={address}: nothing answers there ({error}); is the cluster up, is it the port of its head?"


def _what_is_there(path: Path) -> str:
    """Names beside a missing path that look like it, or the deepest folder that does exist."""
    if path.is_relative_to(prepared_folder()):
        return (
            "; the scripts/prepare_*.py make what a recipe needs (the quickstart's: bash scripts/quickstart.sh, "
            "quickstart_ppo's: python scripts/prepare_quickstart.py --critic)"
        )
    if not path.parent.is_dir():
        there = next((str(parent) for parent in path.parents if parent.is_dir()), "/")
        return f" (folders exist up to {there})"
    near = near_names(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.name != path.name))
    return f" (there: {', '.join(near)})" if near else ""
