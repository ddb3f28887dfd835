"""From a command line to the typed config: the only room that knows Hydra.

`compose(argv)` reads overrides with Hydra's grammar and recipes with Hydra's defaults lists, and does what plain Hydra
does not: unknown keys are errors with near names (behind a `+` too), old names are mapped with one warning
line each, scalars become lists where a list is wanted, and all problems are reported at once.
"""

from __future__ import annotations

import copy
import fnmatch
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_lite import algorithms, rewards, rollout
from verl_lite.config import (
    HUB_KEYS,
    PLUGIN_KEYS,
    SECRET_NAME,
    Config,
    Leaf,
    flatten,
    follows,
    leaf_keys,
    looks_like_path,
    near_names,
    notices,
    resolve,
    secrets_of,
    show,
    unflatten,
    validate,
    without_secrets,
)
from verl_lite.legacy_keys import ALIASES, GLOBAL_SIZES, IGNORED, RENAMED, UNSUPPORTED, UNSUPPORTED_VALUES, is_off
from verl_lite.plugins import absolute_spec
from verl_lite.tracking import printable

LOSS = "actor_rollout_ref.actor.policy_loss."
TABLES: dict[str, Mapping[str, str]] = {
    "algorithm.adv_estimator": algorithms.ADVANTAGE_ESTIMATORS,
    "algorithm.kl_penalty": algorithms.KL_ESTIMATORS,
    "actor_rollout_ref.actor.kl_loss_type": algorithms.KL_ESTIMATORS,
    "actor_rollout_ref.actor.loss_agg_mode": algorithms.LOSS_AGGREGATIONS,
    "critic.loss_agg_mode": algorithms.LOSS_AGGREGATIONS,
    LOSS + "loss_mode": algorithms.POLICY_LOSSES,
    "actor_rollout_ref.rollout.name": rollout.ENGINES,
    "reward.reward_manager.name": rewards.MANAGERS,
}
"""Keys that name an entry of a table; those of PLUGIN_KEYS take an import path too."""

USAGE = """usage: python -m {module} [--config-name RECIPE] [--config-dir FOLDER] [key=value ...]

  --config-name RECIPE   a recipe of verl_lite (default: ppo_trainer), one in FOLDER, or path/to/recipe.yaml
  --config-dir FOLDER    a folder with recipes of your own (--config-path is the same)
  key=value              overrides in Hydra's grammar: n=5  files=[a.parquet,b.parquet]  kwargs={{a: 1}}  'text="a=b"'
                         +key=value and ++key=value mean key=value; ~key takes back what a recipe set
                         relative paths count from the folder the run is started in, a recipe's too

recipes: {recipes}
"""


RESERVED_OPTIONS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "clip_ratio")
"""Arguments of the losses that have a key of their own."""


class ConfigError(ValueError):
    """A command line that cannot be run: every problem, one a line. `config`: as far as it could be understood."""

    def __init__(self, problems: Sequence[str], config: Config | None = None) -> None:
        self.problems = list(dict.fromkeys(problems))
        self.config = config
        head = "" if len(self.problems) == 1 else f"{len(self.problems)} problems with the configuration:\n  - "
        super().__init__(head + "\n  - ".join(self.problems))


@dataclass(frozen=True)
class Composed:
    config: Config
    warnings: list[str]
    raw: dict[str, Any]
    """Dotted key -> value of what recipe and command line set, before nulls were filled."""


def compose(argv: Sequence[str]) -> Composed:
    """The config of this command line (`sys.argv[1:]`). Raises ConfigError; prints and exits on --help."""
    name, folders, overrides, problems = _split_arguments(argv)
    given = _Given()
    given.problems += problems
    recipe = _load_recipe(name, folders, given.problems)
    for key, value in (recipe or {}).items():
        given.add(str(key), value, origin="recipe")
    for override in overrides:
        given.add_override(override)
    if recipe is None:  # what it would have set is missing everywhere
        raise ConfigError(given.problems)
    values = _coerce(given)
    wrong = {key for key in leaf_keys() if key not in values}
    config = _resolve(values)
    if given.global_sizes:
        _divide_global_sizes(given, values, config.num_slots)
        config = _resolve(values)
    found = [*_check_tables(config, given), *validate(config)]
    given.problems += [problem for problem in found if not any(problem.startswith(key) for key in wrong)]
    if given.problems:
        raise ConfigError(given.problems, config)
    raw = {key: values[key] for key in given.keys_set() if key in values}
    return Composed(config, list(dict.fromkeys([*given.warnings, *notices(config)])), raw)


def recipe_folder() -> Path:
    """Where the recipes are: inside an installed package, at the top of a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def usage(module: str = "verl_lite.main_ppo") -> str:
    """What --help prints: the command line, then every key with its default and meaning."""
    lines = [
        USAGE.format(module=module, recipes=", ".join(sorted(path.stem for path in recipe_folder().glob("*.yaml"))))
    ]
    last = ""
    for name, leaf in leaf_keys().items():
        section, _, key = name.rpartition(".")
        if section != last:
            lines.append(f"\n{section}")
            last = section
        lines.append(f"  {key}={show(leaf.default)}".ljust(50) + f"  {leaf.doc} ({leaf.wanted()})")
    return "\n".join(lines)


def print_usage(module: str = "verl_lite.main_ppo", more: str = "") -> None:
    """`| head` may close the pipe before the end."""
    try:
        print(more + usage(module), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes when it ends


def tell(text: str, config: Config | None) -> None:
    """Print to standard error without control characters or secrets, those of `config` as far as it is known."""
    print(printable(without_secrets(text, secrets_of(config or Config()))), file=sys.stderr)


def open_streams() -> None:
    """Lead to nowhere what the caller has closed (`>&-`): else a file of the run's would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # where · and × cannot be shown


def _split_arguments(argv: Sequence[str]) -> tuple[str, list[Path], list[str], list[str]]:
    """(recipe, the user's recipe folders, overrides, problems)."""
    flags = {"--config-name": "name", "-cn": "name", "--config-dir": "dir", "-cd": "dir"}
    flags |= {"--config-path": "dir", "-cp": "dir"}
    name, folders, overrides, problems = "ppo_trainer", [], [], []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if argument in ("-h", "--help"):
            print_usage()
            raise SystemExit(0)
        if flag in flags:
            value = value if equals else next(arguments, "")
            if not value:
                problems.append(f"{flag} needs a value")
            elif flags[flag] == "name":
                name = value
            else:
                folders.append(Path(os.path.abspath(os.path.expanduser(value))))
        elif argument.startswith("-"):
            problems.append(f"{argument}: no such option; settings are written key=value, see --help")
        else:
            overrides.append(argument)
    problems += [f"--config-dir {folder}: no such folder" for folder in folders if not os.path.isdir(folder)]
    return name, [folder for folder in folders if os.path.isdir(folder)], overrides, problems


def _load_recipe(name: str, folders: Sequence[Path], problems: list[str]) -> dict[str, Any] | None:
    """The recipe with its defaults list followed, interpolations kept; None when it cannot be read."""
    if name.endswith((".yaml", ".yml")):
        file = Path(os.path.abspath(os.path.expanduser(name)))
        if os.path.isfile(file):
            name, folders = file.stem, [file.parent, *folders]
        else:
            name = file.stem
    places = [*folders, recipe_folder()]
    home = next((place for place in places if os.path.isfile(place / f"{name}.yaml")), None)
    names = sorted({path.stem for place in places for path in place.glob("*.yaml")})
    if home is None:
        near = near_names(name, names) or names
        problems.append(f"--config-name {name}: no such recipe; there are: {', '.join(near)}")
        return None
    file, reason = home / f"{name}.yaml", ""
    others = ",".join(f'"file://{place}"' for place in places if place != home)
    try:
        if not isinstance(OmegaConf.load(file), DictConfig):
            raise OmegaConfBaseException("it is no mapping; write key: value")
        with initialize_config_dir(config_dir=str(home), version_base=None):
            recipe = hydra_compose(name, overrides=[f"hydra.searchpath=[{others}]"])
        return {str(key): value for key, value in OmegaConf.to_container(recipe, resolve=False).items()}  # type: ignore[union-attr]
    except MissingConfigException as error:
        entry = (error.missing_cfg_file or str(error).splitlines()[0]).removesuffix(".yaml")
        there = ", ".join(near_names(entry, names) or names)
        reason = f"its defaults list has {entry}, which is no recipe; there are: {there}"
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    problems.append(f"--config-name {name}: {file} cannot be read: {reason}")
    return None


@dataclass(frozen=True)
class _Entry:
    typed: str
    value: Any
    text: str | None
    """How the value was written on the command line, for text that looks like a number."""


@dataclass
class _Given:
    """What recipe and command line set, by today's names, with the problems and warnings met on the way."""

    recipe: dict[str, _Entry] = field(default_factory=dict)
    command: dict[str, _Entry] = field(default_factory=dict)
    global_sizes: dict[str, _Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_override(self, text: str) -> None:
        """One argument such as `+a.b=1`."""
        key, equals, value_text = text.partition("=")
        name = key.lstrip("+~")
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            leaf = leaf_keys().get(name)
            if equals and leaf and str in (*leaf.types, leaf.item) and not set(value_text) & set("[]{}'\""):
                self.add(name, value_text, origin="command")  # a path such as ~/x or a=b, which the grammar refuses
            elif not equals:
                self.problems.append(f"{text}: write key=value")
            else:
                reason = str(error).splitlines()[0]
                shown = f"{key}=***" if SECRET_NAME.search(name.rpartition(".")[2]) else text
                self.problems.append(f"{shown}: cannot be read ({reason}); quote the value: '{key}=\"…\"'")
            return
        if override.package is not None:
            self.problems.append(f"{text}: packages (@) are not supported; write the full key")
        elif override.is_delete():
            for entries in (self.recipe, self.command):
                for known in [k for k in entries if f"{k}.".startswith(f"{name}.")]:
                    del entries[known]
            if not any(f"{known}.".startswith(f"{name}.") for known in leaf_keys()):
                self.problems.append(_unknown(f"~{name}", name))
        elif override.is_sweep_override():
            self.problems.append(f"{text}: several values (a sweep) are not supported; a list is written {key}=[a,b]")
        else:
            self.add(name, override.value(), origin="command", text=value_text)

    def add(self, key: str, value: Any, *, origin: str, typed: str | None = None, text: str | None = None) -> None:
        """Put a value under its key's present name; `typed` is the name it came under."""
        typed = typed or key
        entries = self.recipe if origin == "recipe" else self.command
        known = leaf_keys()
        inside = next((leaf for leaf in known if key.startswith(f"{leaf}.") and dict in known[leaf].types), None)
        if key.startswith(LOSS) and key != LOSS + "loss_mode" and not key.startswith(LOSS + "options"):
            key = inside = f"{LOSS}options.{key.removeprefix(LOSS)}"
        if key == "hydra" or key.startswith("hydra."):
            self.warn(typed, "Hydra's own settings are not used")
        elif inside or key in known:
            before = entries.get(key)
            if before and before.typed != typed and before.value != value:
                self.problems.append(_rivals(before.typed, before.value, typed, value))
            entries[key] = _Entry(typed, value, text)
        elif renamed := _renamed(key, ALIASES):
            self.add(renamed, value, origin=origin, typed=typed, text=text)
        elif key in GLOBAL_SIZES:
            if value is not None:
                self.global_sizes[GLOBAL_SIZES[key]] = _Entry(typed, value, text)
        elif isinstance(value, dict) and any(name.startswith(f"{key}.") for name in (*known, *RENAMED, *ALIASES)):
            for name, below in value.items():
                self.add(f"{key}.{name}", below, origin=origin, typed=f"{typed}.{name}")
        elif key in _TRANSLATED:
            self.warn(typed, "old name; " + (", ".join(f"{k}={show(v)}" for k, v in _TRANSLATED[key](value)) or "off"))
            for name, new in _TRANSLATED[key](value):
                self.add(name, new, origin=origin, typed=typed)
        elif renamed := _renamed(key, RENAMED):
            self.warn(typed, f"old name of {renamed}")
            self.add(renamed, value, origin=origin, typed=typed, text=text)
        elif why := _matching(key, IGNORED):
            self.warn(typed, f"ignored: {why}")
        elif why := _matching(key, UNSUPPORTED):
            if is_off(key, value):
                self.warn(typed, f"ignored: not supported ({why}), and this value switches it off")
            else:
                near = [name for name in known if SequenceMatcher(None, key, name).ratio() > 0.95]
                typo = f"; did you mean {near[0]}?" if near else ""
                self.problems.append(f"{typed}={show(value)}: not supported ({why}){typo}")
        elif any(name.startswith(f"{key}.") for name in known):
            self.problems.append(f"{typed}={show(value)}: {key} is a section; set one of its keys, {key}.…=…")
        else:
            self.problems.append(_unknown(typed, key))

    def warn(self, typed: str, why: str) -> None:
        self.warnings.append(f"{typed}: {why}")

    def keys_set(self) -> list[str]:
        """The declared keys that were set, or set in part."""
        return [
            leaf for leaf in leaf_keys() if any(f"{k}.".startswith(f"{leaf}.") for k in (*self.recipe, *self.command))
        ]


def _rivals(one: str, value: Any, other: str, other_value: Any) -> str:
    return f"{one}={show(value)} and {other}={show(other_value)} set the same thing; give one of them"


def _renamed(key: str, table: Mapping[str, str]) -> str | None:
    """The present name of a key that is in the table, or below an entry of it."""
    for old, new in table.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def _matching(key: str, patterns: Mapping[str, str]) -> str | None:
    return next((why for pattern, why in patterns.items() if fnmatch.fnmatchcase(key, pattern)), None)


def _correction(level: Any, threshold: Any = None) -> list[tuple[str, Any]]:
    prefix = "algorithm.rollout_correction.rollout_is"
    return [(prefix, level)] + ([(f"{prefix}_threshold", threshold)] if threshold is not None else [])


_TRANSLATED: dict[str, Any] = {
    "trainer.remove_previous_ckpt_in_save": lambda on: (
        [(f"trainer.max_{role}_ckpt_to_keep", 1) for role in ("actor", "critic")] if on else []
    ),
    "actor_rollout_ref.actor.tis_imp_ratio_cap": lambda cap: (
        _correction("token", cap) if isinstance(cap, int | float) and cap > 0 else []
    ),
    "algorithm.rollout_is": lambda on: _correction("token" if on is True else on or None),
}
"""Old keys whose value changes with the name: value -> [(key, value)]."""


def _unknown(typed: str, key: str) -> str:
    """The message for a key nobody knows, with the nearest names by whole key and by last part."""
    last = key.rpartition(".")[2]

    def likeness(name: str) -> float:
        if name.endswith(f".{key}"):
            return 2.0
        whole, part = (SequenceMatcher(None, *pair).ratio() for pair in ((key, name), (last, name.rpartition(".")[2])))
        return max(whole, part) + 0.1 * min(whole, part)

    near = sorted(leaf_keys(), key=likeness, reverse=True)
    near = [name for name in near[:3] if likeness(name) > 0.75]
    return f"{typed}: no such key" + (f"; nearest: {', '.join(near)}" if near else "; --help lists all keys")


def _coerce(given: _Given) -> dict[str, Any]:
    """Every declared key's value: given or default, interpolated, of the declared type; a wrong one is left out."""
    tree: dict[str, Any] = {}

    def put(key: str, value: Any) -> None:
        node, (*parents, last) = tree, key.split(".")
        for part in parents:
            below = node.get(part)
            node[part] = node = below if isinstance(below, dict) else {}
        both = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = _merge(node[last], value) if both else value

    for key, leaf in leaf_keys().items():
        put(key, copy.deepcopy(leaf.default))
    for entries in (given.recipe, given.command):
        for key, set_to in entries.items():
            put(key, set_to.value)
    OmegaConf.register_new_resolver("verl_lite_home", prepared_folder, replace=True)
    interpolated = OmegaConf.create(tree)

    values: dict[str, Any] = {}
    origins = given.recipe | given.command
    for key, leaf in leaf_keys().items():
        entry = origins.get(key)
        value: Any = tree
        for part in key.split("."):
            value = value[part]
        try:
            if "${" in str(value):
                value = OmegaConf.select(interpolated, key, throw_on_missing=True)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                text = None
            else:
                text = entry.text if entry else None
            values[key] = _absolute(key, leaf, _convert(leaf, value, text))
        except OmegaConfBaseException as error:
            given.problems.append(f"{key}={value}: {str(error).splitlines()[0]}")
        except TypeError:
            typed = entry.typed if entry else key
            given.problems.append(f"{typed}={show(value)}: must be {leaf.wanted()}")
    return values


def _merge(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both dicts in one; where both have a key, the new value, merged again if both are dicts."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _convert(leaf: Leaf, value: Any, text: str | None) -> Any:
    """The value as the declared type. Raises TypeError if it is none."""
    if value is None or (value == "None" and leaf.nullable):
        if leaf.nullable:
            return None
        if list in leaf.types or dict in leaf.types:
            return leaf.types[0]()
        raise TypeError
    kind = next(kind for kind in leaf.types if kind is not type(None))
    if kind is list:
        assert leaf.item is not None, "a list declares the type of its entries"
        return [_convert_scalar(leaf.item, entry, None) for entry in (value if isinstance(value, list) else [value])]
    if kind is dict:
        if not isinstance(value, dict):
            raise TypeError
        return value
    return _convert_scalar(kind, value, text)


def _convert_scalar(kind: type, value: Any, text: str | None) -> Any:
    if isinstance(value, list | dict) or value is None:
        raise TypeError
    if kind is str:
        return value if isinstance(value, str) else str(value if text is None else text.strip())
    if kind is bool:
        options = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() in options:
            return options[str(value).lower()]
        raise TypeError
    if isinstance(value, bool):
        raise TypeError
    try:
        number = float(value)
    except ValueError:
        raise TypeError from None
    if kind is float:
        return number
    if isinstance(value, int):
        return value
    if not number.is_integer():
        raise TypeError
    return int(number)


def prepared_folder() -> str:
    """Folder of prepared models and data: VERL_LITE_HOME, or verl_lite in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.abspath(os.path.expanduser(os.environ.get("VERL_LITE_HOME") or f"{cache}/verl_lite"))


def _absolute(key: str, leaf: Leaf, value: Any) -> Any:
    """Paths made absolute, since workers have other working folders. Hub ids and URLs stay."""
    if isinstance(value, list):
        return [_absolute(key, leaf, entry) for entry in value]
    if not value or not isinstance(value, str):
        return value
    if key in PLUGIN_KEYS:
        return absolute_spec(value)
    is_module = key in ("data.custom_cls.path", "reward.custom_reward_function.path") and "/" not in value
    if not leaf.path or "://" in value or (key in HUB_KEYS and not looks_like_path(value)):
        return value
    if is_module and not value.endswith(".py"):
        return value
    return os.path.abspath(os.path.expanduser(value))


def _resolve(values: Mapping[str, Any]) -> Config:
    estimator = values.get("algorithm.adv_estimator")
    return resolve(unflatten(values), needs_values=estimator in algorithms.ESTIMATORS_WITH_CRITIC)


def _divide_global_sizes(given: _Given, values: dict[str, Any], ranks: int) -> None:
    """Old sizes that count all ranks together, turned into sizes per rank."""
    for key, entry in given.global_sizes.items():
        try:
            size = _convert_scalar(int, entry.value, entry.text)
        except TypeError:
            given.problems.append(f"{entry.typed}={show(entry.value)}: must be int")
            continue
        given.warn(entry.typed, f"old name of {key}, divided by the {ranks} ranks")
        if size <= 0 or size % ranks:
            near = sorted({max(1, size // ranks) * ranks, (max(0, size) // ranks + 1) * ranks})
            given.problems.append(
                f"{entry.typed}={size} is not a multiple of the {ranks} ranks (trainer.n_gpus_per_node × "
                f"trainer.nnodes); nearest: {', '.join(map(str, near))}; or set {key}"
            )
        elif values.get(key) not in (None, size // ranks):
            given.problems.append(_rivals(entry.typed, f"{size} ({size // ranks} per rank)", key, values[key]))
        else:
            values[key] = size // ranks


def _check_tables(config: Config, given: _Given) -> Iterator[str]:
    """Problems of keys that name an algorithm, and of the chosen loss's options."""
    flat = flatten(config)
    for key, table in TABLES.items():
        value = flat[key]
        if value in table or (key in PLUGIN_KEYS and ":" in value) or follows(flat, key):
            continue
        if value in UNSUPPORTED_VALUES:
            yield f"{key}={value}: not supported; there are: {', '.join(table)}"
            continue
        near = near_names(value, list(table), 1)
        own = ", or your own as package.module:name or path/file.py:name" if key in PLUGIN_KEYS else ""
        yield f"{key}={value}: must be one of {', '.join(table)}{own}" + (f"; did you mean {near[0]}?" if near else "")

    estimator, critic = config.algorithm.adv_estimator, config.critic
    if estimator in algorithms.ESTIMATORS_WITH_CRITIC and not critic.enable:
        yield f"critic.enable=False: algorithm.adv_estimator={estimator} needs a critic's values"
    if estimator in set(algorithms.ADVANTAGE_ESTIMATORS) - algorithms.ESTIMATORS_WITH_CRITIC and critic.enable:
        given.warn("critic.enable", f"a critic is trained, but algorithm.adv_estimator={estimator} uses no values")

    loss = config.actor_rollout_ref.actor.policy_loss
    options = algorithms.POLICY_LOSS_OPTIONS
    if loss.loss_mode in algorithms.POLICY_LOSSES:
        known = options.get(loss.loss_mode, {})
        for option, value in loss.options.items():
            if option in RESERVED_OPTIONS:
                yield f"{LOSS}{option}={show(value)}: set actor_rollout_ref.actor.{option}"
            elif option not in known:
                others = [name for name, names in options.items() if option in names]
                hint = f"; {', '.join(others)} has it" if others else ""
                near = near_names(option, list(known), 1)
                hint = f"; did you mean {near[0]}?" if near and not others else hint
                has = f"loss_mode={loss.loss_mode} has no such option (it has: {', '.join(known) or 'none'})"
                yield f"{LOSS}{option}: {has}{hint}"
            elif not isinstance(value, int | float) or isinstance(value, bool):
                yield f"{LOSS}{option}={show(value)}: must be a number"
            elif not (leaf := Leaf(LOSS + option, (float,), **known[option])).in_range(value):
                yield f"{LOSS}{option}={show(value)}: must be {leaf.wanted()}"
        ends = [
            loss.options.get(name, known[name]["default"]) for name in ("clip_cov_lb", "clip_cov_ub") if name in known
        ]
        if all(isinstance(end, int | float) for end in ends) and ends != sorted(set(ends)):
            yield f"{LOSS}clip_cov_lb={ends[0]}: must be < clip_cov_ub={ends[1]}, or no token is ever chosen"
