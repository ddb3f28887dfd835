"""A reward function of your own: the answer must be right, and a short response earns a little more.

python -m verl_lite.main_ppo --config-name quickstart \\
    reward.custom_reward_function.path=examples/custom_reward.py \\
    +reward.custom_reward_function.reward_kwargs.length_bonus=0.1

It runs in processes of its own, one call per response, `reward.timeout_s` seconds each. It may also be `async def`, and
may return a plain number, or None for a response that should not count. The other values of the dict become metrics
(`reward/acc`), and validation reports them.
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None,
    length_bonus: float = 0.0,
) -> dict[str, float | str]:  # fmt: skip
    answer = solution_str.strip()
    right = answer == ground_truth
    bonus = length_bonus / (1 + len(answer)) if right else 0.0
    return {"score": right + bonus, "acc": float(right), "pred": answer}
