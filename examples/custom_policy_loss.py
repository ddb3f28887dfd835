r"""Your own policy loss, in one file outside the package:

python -m verl_lite.main_ppo --config-name quickstart \
    actor_rollout_ref.actor.policy_loss.loss_mode=examples/custom_policy_loss.py:quadratic_penalty \
    +actor_rollout_ref.actor.policy_loss.penalty=2.0

Return one loss per token and never a mean: the trainer divides by the tokens (or sequences) of the whole mini-batch, so
that neither micro-batches nor ranks change the gradient. Keyword-only arguments are options of `policy_loss`; those
named clip_ratio_low, clip_ratio_high and clip_ratio_c are filled from `actor.*`.
"""

from __future__ import annotations

import torch

from verl_lite.algorithms.policy_losses import PolicyLossInputs, PolicyLossOutputs


def quadratic_penalty(inputs: PolicyLossInputs, *, penalty: float = 1.0) -> PolicyLossOutputs:
    """-A r + penalty / 2 (log r)^2: no clip, a spring that holds the policy near the one that sampled."""
    mask = inputs.response_mask.bool()
    # Before the first formula: a NaN at a masked place that went through exp would come back as a NaN gradient.
    log_ratio = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    advantages = torch.where(mask, inputs.advantages, 0.0)
    losses = -advantages * log_ratio.exp() + 0.5 * penalty * log_ratio.square()
    if inputs.rollout_weights is not None:
        losses = losses * torch.where(mask, inputs.rollout_weights, 0.0)
    return PolicyLossOutputs(losses, metrics={"ppo_kl": -log_ratio.detach()})
