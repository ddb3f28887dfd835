"""Tasks of reasoning-gym: each task's own scoring, from the entry that `scripts/data/reasoning_gym.py` stored."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """The task's score in [0, 1] for the last `<answer>…</answer>`, or for the whole response where there is none."""
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    if not answer:
        return 0.0
    return float(_scorer(extra_info["task"])(answer, json.loads(extra_info["entry"])))


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    # An optional package that takes seconds to import.
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
