r"""Your own advantage estimator, in one file outside the package:

python -m verl_lite.main_ppo --config-name quickstart \
    algorithm.adv_estimator=examples/custom_advantage.py:median_baseline

The function gets the whole train batch and gives every token its advantage. Of its keyword-only arguments, `gamma`,
`lam` and `norm_adv_by_std_in_grpo` are filled from `algorithm.*`; others need a default. An estimator that reads
`inputs.values` needs `critic.enable=True`.
"""

from __future__ import annotations

import torch

from verl_lite.algorithms.advantages import AdvantageInputs, Advantages


def median_baseline(inputs: AdvantageInputs) -> Advantages:
    """A = s - median of the group's scores: one lucky answer moves the baseline of the others less than a mean does."""
    mask = inputs.response_mask.bool()
    # Select, don't multiply: there may be anything, NaN included, at masked places.
    scores = torch.where(mask, inputs.token_level_rewards, 0.0).sum(-1)
    baselines = torch.zeros_like(scores)
    for group in inputs.group_ids.unique():
        rows = (inputs.group_ids == group) & mask.any(-1)  # a fully masked row counts nowhere
        if rows.any():
            baselines[rows] = scores[rows].median()
    advantages = torch.where(mask, (scores - baselines)[:, None], 0.0)
    return Advantages(advantages=advantages, returns=advantages)
