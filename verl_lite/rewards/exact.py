"""The whole response is the answer: for tasks whose prompt asks for nothing else."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 when the response, without surrounding space, is the ground truth; else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())
