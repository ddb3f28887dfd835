"""What the config names: a built-in name, 'package.module:attribute' or 'path/file.py:attribute'."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(spec: str, table: Mapping[str, str] | None = None, *, key: str) -> Any:
    """Return what `spec` names: an entry of `table`, or anything by import path; `key` is the config key, for errors.

    Raises ValueError with the way out: near names, the path that does
    not exist, what the file does define, or file and line of an error in it.
    """
    path = (table or {}).get(spec, spec)
    place, colon, attribute = path.rpartition(":")
    if not colon or not place or not attribute:
        raise ValueError(_unknown(spec, table, key))
    module = _load_file(place, key) if place.endswith(".py") else _import(place, key)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(f"{key}={spec}: no {attribute!r} in {place}. {_defines(module, attribute)}") from None
    return found


def absolute_spec(spec: str) -> str:
    """'path/file.py:attribute' with an absolute path, for processes with another working folder; else unchanged."""
    place, _, attribute = spec.rpartition(":")
    return f"{_absolute(place)}:{attribute}" if place.endswith(".py") else spec


def option_names(*functions: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of the functions: the options a config may set."""
    return {
        name: parameter
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def pick_options(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `available` that `function` takes as keyword-only options."""
    names = option_names(function)
    return {name: value for name, value in available.items() if name in names or _takes_any(function)}


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    key: str,
    reserved: Iterable[str] = (),
    companions: Iterable[Callable[..., Any]] = (),
    way_out: str = "",
) -> None:
    """Raise one ValueError with every option that `function` (or a companion) lacks, or requires and did not get.

    `reserved` are the arguments the framework passes itself; a config may not set them here. `way_out`: from what is
    required and not set, where a config cannot set it.
    """
    functions, reserved = [function, *companions], set(reserved)
    known = option_names(*functions)
    free = sorted(known.keys() - reserved)
    problems = []
    for name in options:
        if name in reserved:
            problems.append(f"{key}.{name} is set by verl_lite itself, from its own key")
        elif name not in known and not any(map(_takes_any, functions)):
            problems.append(f"{key}.{name} is unknown{_near(name, free)}; options: {', '.join(free) or 'none'}")
    for name in free:
        if known[name].default is inspect.Parameter.empty and name not in options:
            problems.append(f"{key}.{name} is required and not set{way_out}")
    if problems:
        raise ValueError(f"options of {function.__name__}: " + "; ".join(problems))


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(near)})" if near else ""


def _unknown(spec: str, table: Mapping[str, str] | None, key: str) -> str:
    own = "'package.module:attribute' or 'path/file.py:attribute'"
    if table is None:
        return f"{key}={spec} is no import path; write {own}."
    return f"{key}={spec} is unknown{_near(spec, table)}; known: {', '.join(table)}; your own: {own}."


def _defines(module: ModuleType, wanted: str) -> str:
    names = [
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]
    return f"It defines: {', '.join(names) or 'nothing'}{_near(wanted, names)}."


def _absolute(place: str) -> Path:
    return Path(place).expanduser().resolve()


def _import(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"{key}: no module {error.name!r} on Python's path; is its package installed?") from None
        raise ValueError(f"{key}: {name} cannot be imported: {error}") from error


def _load_file(place: str, key: str) -> ModuleType:
    path = _absolute(place)
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {path}.")
    # Path and content make the name, so that equal file names don't meet and an edited file is loaded anew.
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
    name = f"_verl_lite_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError) and error.filename:
            raise ValueError(f"{key}: syntax error in {error.filename}, line {error.lineno}: {error.msg}") from error
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{key}: {path}{where} raised {type(error).__name__}: {error}") from error
    return module
