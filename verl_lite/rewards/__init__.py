"""Built-in graders behind verl's signature, chosen by `data_source`. Imports neither torch nor Ray."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

# data_source pattern → module with compute_score(solution_str, ground_truth, extra_info), and the package it needs.
GRADERS: dict[str, tuple[str, str | None]] = {
    "verl_lite/addition": ("verl_lite.rewards.exact", None),
    "openai/gsm8k": ("verl_lite.rewards.gsm8k", None),
    "lighteval/MATH": ("verl_lite.rewards.math", "math-verify"),
    "HuggingFaceH4/MATH-500": ("verl_lite.rewards.math", "math-verify"),
    "math": ("verl_lite.rewards.math", "math-verify"),
    "aime*": ("verl_lite.rewards.math", "math-verify"),
    "reasoning_gym/*": ("verl_lite.rewards.reasoning_gym", "reasoning-gym"),
}

# reward.reward_manager.name → class. `verl_lite.rewards.managers` needs torch: it is imported by the driver only.
MANAGERS = {
    "naive": "verl_lite.rewards.managers:RewardManager",
    "dapo": "verl_lite.rewards.managers:DapoRewardManager",
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """Score of a response in [0, 1], by the grader of its data source. Raises `ValueError` for an unknown source."""
    grader = _find(data_source)
    if grader is None:
        raise ValueError(f"no built-in reward for data_source {data_source!r}; known: {', '.join(GRADERS)}")
    return importlib.import_module(grader[0]).compute_score(solution_str, ground_truth, extra_info or {})


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise one `ValueError` when the built-in graders cannot score every one of these sources."""
    graders = {source: _find(source) for source in data_sources}
    if unknown := [source for source, grader in graders.items() if grader is None]:
        raise ValueError(
            f"no built-in reward for data_source {', '.join(map(repr, unknown))} (in the data: "
            f"{', '.join(map(repr, graders))}; known: {', '.join(GRADERS)}); set reward.custom_reward_function.path"
        )
    needed = {source: grader[1] for source, grader in graders.items() if grader is not None and grader[1] is not None}
    missing = {
        source: name for source, name in needed.items() if importlib.util.find_spec(name.replace("-", "_")) is None
    }
    if missing:
        raise ValueError(
            "; ".join(f"scoring data_source {source!r} needs {package}" for source, package in missing.items())
            + f": pip install {' '.join(sorted(set(missing.values())))}"
        )


def _find(data_source: str) -> tuple[str, str | None] | None:
    return next((grader for pattern, grader in GRADERS.items() if fnmatchcase(data_source, pattern)), None)
