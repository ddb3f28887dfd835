"""Advantage estimators: fn(AdvantageInputs, *, options) -> Advantages, vectorised over tokens and groups.

Only tokens with response_mask 1 are read: whatever stands at other places, NaN included, changes nothing, and
advantages and returns are 0 there. A fully masked row counts nowhere, in its group's statistics neither.

Outcome estimators (all but gae and reinforce_plus_plus) sum a row's rewards to its score s, compare it with the scores
of its group (the responses to one prompt) and give every token of the row the same advantage; returns = advantages.
With k valid rows in the group: mean(s) = sum(s) / k, std(s) the unbiased one. A group of one has nothing to compare:
its row keeps its score as advantage (mean 0, std 1), and one warning per process says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lite.algorithms.aggregate import masked_count, masked_sum, masked_whiten

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole train batch; B rows (responses), T response tokens, right-padded, any order of rows."""

    token_level_rewards: Tensor  # [B, T] float, KL penalty already subtracted if it is in the reward
    response_mask: Tensor  # [B, T] 0/1 or bool, 1 = the policy chose this token; holes allowed
    group_ids: Tensor  # [B] long in 0..G-1, equal = same prompt; `group_ids(uids)` makes them
    values: Tensor | None = None  # [B, T] the critic's values, where the estimator needs them
    baseline_scores: Tensor | None = None  # [B] score of the greedy response to the row's prompt (remax)


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor  # [B, T], the rewards' dtype, 0 at masked places
    returns: Tensor  # [B, T], what the critic learns


def group_ids(uids: Iterable[Hashable]) -> Tensor:
    """[B] long: 0 for the first uid and its equals, 1 for the next new one, ..."""
    ids: dict[Hashable, int] = {}
    return torch.tensor([ids.setdefault(uid, len(ids)) for uid in uids], dtype=torch.long)


def gae(inputs: AdvantageInputs, *, gamma: float, lam: float) -> Advantages:
    """delta_t = r_t + gamma V_t' - V_t,  A_t = delta_t + gamma lam A_t',  returns = A + V; then A is whitened.

    t' is the row's next trained token: gaps in the mask cost no decay; after the last one V and A are 0. Whitened over
    all tokens of the batch. J. Schulman et al. eq. 16, https://arxiv.org/abs/1506.02438
    """
    if inputs.values is None:
        raise ValueError("algorithm.adv_estimator=gae needs values: leave critic.enable unset or set it to True.")
    advantages, returns = torch.empty_like(inputs.token_level_rewards), torch.empty_like(inputs.token_level_rewards)
    for rows in _blocks(len(returns)):
        mask = _columns(inputs.response_mask[rows].bool())
        rewards = _columns(inputs.token_level_rewards[rows]).where(mask, 0.0)
        values = _columns(inputs.values[rows]).where(mask, 0.0)
        # The value at or after t, and from it, one column on, the value of the next trained token.
        at_or_after = _scan_from_last((~mask).to(values.dtype), values)
        next_values = torch.cat([at_or_after[1:], torch.zeros_like(values[:1])])
        deltas = (rewards + gamma * next_values - values).where(mask, 0.0)
        carried = _scan_from_last(_decay(mask, gamma * lam, values.dtype), deltas).where(mask, 0.0)
        advantages[rows], returns[rows] = carried.t(), (carried + values).t()
    return Advantages(masked_whiten(advantages, inputs.response_mask), returns)


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> Advantages:
    """R_t = r_t + gamma R_t',  A = whiten(R) over all tokens of the batch; t' = next trained token; returns = R.

    J. Hu et al. §3, https://arxiv.org/abs/2501.03262
    """
    returns = torch.empty_like(inputs.token_level_rewards)
    for rows in _blocks(len(returns)):
        mask = _columns(inputs.response_mask[rows].bool())
        rewards = _columns(inputs.token_level_rewards[rows]).where(mask, 0.0)
        returns[rows] = _scan_from_last(_decay(mask, gamma, rewards.dtype), rewards).where(mask, 0.0).t()
    return Advantages(masked_whiten(returns, inputs.response_mask), returns)


def remax(inputs: AdvantageInputs) -> Advantages:
    """R_t = sum of the rewards from t on,  A_t = R_t - score of the greedy response to the same prompt; returns = R.

    Z. Li et al. alg. 1, https://arxiv.org/abs/2310.10505
    """
    if inputs.baseline_scores is None:
        raise ValueError("algorithm.adv_estimator=remax needs baseline_scores [B]: the scores of greedy responses.")
    returns, advantages = torch.empty_like(inputs.token_level_rewards), torch.empty_like(inputs.token_level_rewards)
    for rows in _blocks(len(returns)):
        mask = inputs.response_mask[rows].bool()
        rewards = inputs.token_level_rewards[rows].where(mask, 0.0)
        to_go = rewards.sum(-1, keepdim=True) - rewards.cumsum(-1) + rewards
        returns[rows] = to_go.where(mask, 0.0)
        advantages[rows] = (to_go - inputs.baseline_scores[rows, None]).where(mask, 0.0)
    return Advantages(advantages, returns)


def grpo(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool) -> Advantages:
    """A = (s - mean(s)) / (std(s) + 1e-6); without the division when norm_adv_by_std_in_grpo is False (Dr. GRPO).

    Z. Shao et al. §4.1.2, https://arxiv.org/abs/2402.03300; Dr. GRPO §3.1, https://arxiv.org/abs/2503.20783
    """
    groups = _Groups(inputs, "grpo")
    centred = groups.centred()
    return groups.spread(groups.over_std(centred) if norm_adv_by_std_in_grpo else centred)


def grpo_passk(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool) -> Advantages:
    """A = best s - second best s for the group's best row (then / (std(s) + 1e-6)), 0 for all others.

    Rows that tie for the best get 0. Y. Tang et al., https://arxiv.org/abs/2503.19595
    """
    groups = _Groups(inputs, "grpo_passk")
    best = groups.valid & (groups.scores == groups.maximum(groups.valid))
    runner_up = groups.maximum(groups.valid & ~best).where(groups.counts > 1, 0.0)
    alone = groups.sum(best.double()) == 1
    gaps = (groups.scores - runner_up).where(best & alone, 0.0)
    return groups.spread(groups.over_std(gaps) if norm_adv_by_std_in_grpo else gaps)


def rloo(inputs: AdvantageInputs) -> Advantages:
    """A = s - mean of the group's other scores = k / (k - 1) * (s - mean(s)).

    A. Ahmadian et al. eq. 7, https://arxiv.org/abs/2402.14740
    """
    groups = _Groups(inputs, "rloo")
    others = (groups.counts - 1).clamp(min=1)
    return groups.spread(groups.centred() * (groups.counts / others))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """A = whiten(s - mean(s)), whitened over all tokens of the batch.

    J. Hu et al., https://arxiv.org/abs/2501.03262
    """
    groups = _Groups(inputs, "reinforce_plus_plus_baseline")
    centred, lengths = groups.centred(), masked_count(inputs.response_mask, -1)
    # A row's tokens are all alike, so that the tokens' mean and variance come from the rows.
    tokens = lengths.sum()
    deviations = centred - (lengths * centred).sum() / tokens.clamp(min=1)
    variance = (lengths * deviations.square()).sum() / (tokens - 1).clamp(min=1)
    return groups.spread(deviations * (variance + 1e-8).rsqrt())


def opo(inputs: AdvantageInputs) -> Advantages:
    """A = s - sum(l s) / sum(l), l = the row's trained tokens: the baseline of least variance.

    Y. Hao et al., https://arxiv.org/abs/2505.23585
    """
    groups = _Groups(inputs, "opo")
    return groups.spread(groups.centred(weights=masked_count(inputs.response_mask, -1).double()))


def gpg(inputs: AdvantageInputs) -> Advantages:
    """A = alpha (s - mean(s)), alpha = rows / rows of groups whose scores are not all equal.

    alpha makes up for the groups that give no gradient. X. Chu et al. §3, https://arxiv.org/abs/2504.02546
    """
    groups = _Groups(inputs, "gpg")
    centred = groups.centred()
    varied = groups.valid & (groups.sum(centred.abs()) > 0)
    return groups.spread(centred * (groups.valid.sum().double() / varied.sum().clamp(min=1)))


class _Groups:
    """Scores of the rows, in float64, and statistics of their groups, all as [B]: each row sees its own group's."""

    def __init__(self, inputs: AdvantageInputs, estimator: str) -> None:
        self.mask = inputs.response_mask.bool()
        self.dtype = inputs.token_level_rewards.dtype
        self.ids = inputs.group_ids
        self.num_groups = int(self.ids.max()) + 1 if self.ids.numel() else 0
        self.valid = masked_count(self.mask, -1) > 0
        self.scores = masked_sum(inputs.token_level_rewards, self.mask, -1).double()
        self.counts = self.sum(torch.ones_like(self.scores))
        if bool((self.valid & (self.counts == 1)).any()):
            _warn_of_single_rows(estimator)

    def sum(self, per_row: Tensor) -> Tensor:
        per_group = per_row.new_zeros(self.num_groups)
        return per_group.index_add_(0, self.ids, per_row.where(self.valid, 0.0))[self.ids]

    def maximum(self, of_rows: Tensor) -> Tensor:
        """Largest score among the chosen rows; -inf for none."""
        chosen = self.scores.where(of_rows, -torch.inf)
        return chosen.new_full((self.num_groups,), -torch.inf).scatter_reduce_(0, self.ids, chosen, "amax")[self.ids]

    def centred(self, weights: Tensor | None = None) -> Tensor:
        """s - (weighted) mean(s); a group of one keeps s."""
        weights = torch.ones_like(self.scores) if weights is None else weights
        # From the group's best score, so that equal scores give exactly 0: the mean of five times 0.1 is not 0.1.
        below_best = (self.scores - self.maximum(self.valid)).where(self.valid, 0.0)
        mean = self.sum(weights * below_best) / self.sum(weights).clamp(min=1.0)
        return (below_best - mean).where(self.counts > 1, self.scores)

    def over_std(self, per_row: Tensor) -> Tensor:
        """x / (std(s) + 1e-6), with std 1 for a group of one."""
        variance = self.sum(self.centred().square()) / (self.counts - 1).clamp(min=1)
        return per_row / (variance.sqrt().where(self.counts > 1, 1.0) + 1e-6)

    def spread(self, per_row: Tensor) -> Advantages:
        advantages = torch.where(self.mask, per_row.to(self.dtype)[:, None], 0.0)
        return Advantages(advantages, advantages)


@functools.cache
def _warn_of_single_rows(estimator: str) -> None:
    logger.warning(
        "adv_estimator=%s compares the responses to one prompt, but a prompt has only one valid response: "
        "it keeps its bare score as advantage (said once; is actor_rollout_ref.rollout.n=1?)",
        estimator,
    )


def _blocks(num_rows: int) -> Iterator[slice]:
    """Rows a block at a time: its columns stay in the cache, and no temporary is as large as the batch."""
    return (slice(start, start + 1024) for start in range(0, num_rows, 1024))


def _columns(rows: Tensor) -> Tensor:
    """[B, T] -> contiguous [T, B]: a step along T then touches one stretch of memory."""
    return rows.t().contiguous()


def _decay(mask: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`factor` at trained tokens, 1 in the gaps."""
    return torch.ones_like(mask, dtype=dtype).masked_fill_(mask, factor)


def _scan_from_last(decays: Tensor, increments: Tensor) -> Tensor:
    """x_t = increments_t + decays_t x_{t+1} over [T, B], from 0 behind the last t."""
    scanned = torch.empty_like(increments)
    following = torch.zeros_like(increments[0])
    for decay, increment, out in zip(*(reversed(x.unbind()) for x in (decays, increments, scanned)), strict=True):
        following = torch.addcmul(increment, decay, following, out=out)
    return scanned
