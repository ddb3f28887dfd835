"""Policy losses: fn(PolicyLossInputs, *, options) -> PolicyLossOutputs, per token, never reduced.

r_t = pi(y_t) / pi_old(y_t) = exp(log_probs - old_log_probs), with the log ratio cut at +-20 so that exp stays finite;
A_t the advantage, eps_low and eps_high the options clip_ratio_low and clip_ratio_high. All is [B, T]; masked places
are replaced before the first formula and after the last, so that a NaN there reaches neither value nor gradient.

Metrics of every loss: pg_clipfrac (1 where clipping takes the gradient away or cuts the weight; geo_mean: by the upper
bound), pg_clipfrac_lower (vanilla: 1 where the dual clip holds; geo_mean, cispo: where the lower bound does) and
ppo_kl (-log r: k1 of the old against the new policy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from verl_lite.algorithms.aggregate import masked_mean


@dataclass(frozen=True)
class PolicyLossInputs:
    """Any number of whole rows; which rows stand together changes nothing."""

    log_probs: Tensor  # [B, T] of the policy being trained, with gradient
    old_log_probs: Tensor  # [B, T] of the policy at the start of the training step
    advantages: Tensor  # [B, T]
    response_mask: Tensor  # [B, T] 0/1 or bool
    rollout_weights: Tensor | None = None  # [B, T] truncated importance weights (correction.py); multiply the loss
    selected: Tensor | None = None  # [B, T] bool, what the loss's own `select` chose from the whole mini-batch


class PolicyLossOutputs(NamedTuple):
    losses: Tensor  # [B, T], 0 at masked places
    metrics: dict[str, Tensor]  # name -> [B, T], detached; their mean over tokens is what is logged


class Select(Protocol):
    """Chooses tokens by statistics of the whole mini-batch (all ranks, without gradient): -> [B, T] bool.

    `row_keys` come from `row_keys(input_ids)`: the choice depends on them, not on the order of the rows.
    """

    def __call__(self, inputs: PolicyLossInputs, *, row_keys: Tensor, **options: float) -> Tensor: ...


_Loss = TypeVar("_Loss", bound=Callable[..., PolicyLossOutputs])


def selects_with(select: Callable[..., Tensor]) -> Callable[[_Loss], _Loss]:
    """Declare that a loss reads `inputs.selected`, and what computes it."""

    def declare(loss: _Loss) -> _Loss:
        loss.select = select  # type: ignore[attr-defined]
        return loss

    return declare


def selector(loss: Callable[..., PolicyLossOutputs]) -> Select | None:
    """The selection a loss declares, or None: the one place that looks, since a loss may be the user's function."""
    return cast("Select | None", getattr(loss, "select", None))


def vanilla(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> PolicyLossOutputs:
    """max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); where A < 0 at most -A c (dual clip, c > 1).

    PPO eq. 7, https://arxiv.org/abs/1707.06347; separate bounds: DAPO §3.1, https://arxiv.org/abs/2503.14476;
    dual clip: D. Ye et al. eq. 5, https://arxiv.org/abs/1912.09729
    """
    tokens = _Tokens(inputs)
    clipped_once, clipped = tokens.clipped_surrogate(tokens.log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    bound = -clip_ratio_c * tokens.advantages
    lower = (tokens.advantages < 0) & (clipped_once > bound)
    return tokens.outputs(torch.where(lower, bound, clipped_once), clipped, lower)


def gspo(inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> PolicyLossOutputs:
    """vanilla's clipped surrogate (no dual clip) with the row's ratio s = exp(mean_t log r_t) at every token.

    Token t carries sg[s] pi / sg[pi]: the value is s, and the gradients of a row's tokens average to that of s.
    C. Zheng et al. eq. 5 and §4.3, https://arxiv.org/abs/2507.18071; made for seq-mean-token-mean and bounds near 3e-4.
    """
    tokens = _Tokens(inputs)
    log_s = masked_mean(tokens.log_ratio, tokens.mask, dim=-1).detach()[:, None]
    ratio = (log_s + tokens.log_probs - tokens.log_probs.detach()).exp()
    losses, clipped = tokens.clipped_surrogate(ratio, clip_ratio_low, clip_ratio_high)
    return tokens.outputs(losses, clipped)


def gpg(inputs: PolicyLossInputs) -> PolicyLossOutputs:
    """-A log pi: the plain policy gradient, no ratio. X. Chu et al. §3, https://arxiv.org/abs/2504.02546"""
    tokens = _Tokens(inputs)
    return tokens.outputs(-tokens.advantages * tokens.log_probs)


def select_clip_cov(
    inputs: PolicyLossInputs,
    *,
    row_keys: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """max(1, floor(clip_cov_ratio N)) of N tokens, drawn at random among those not clipped with lb < cov < ub."""
    if clip_cov_ratio <= 0:
        raise ValueError(f"actor.policy_loss.clip_cov_ratio={clip_cov_ratio} must be above 0.")
    tokens = _Tokens(inputs)
    _, clipped = tokens.clipped_surrogate(tokens.log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    covariances = tokens.covariances()
    candidates = tokens.mask & ~clipped & (covariances > clip_cov_lb) & (covariances < clip_cov_ub)
    count = max(1, int(clip_cov_ratio * int(tokens.mask.sum())))
    steps = torch.arange(inputs.log_probs.shape[1], device=row_keys.device)
    draw = _mix(row_keys[:, None] + steps)  # a random number per token that knows nothing of rows' order
    return _largest(draw, candidates, count)


@selects_with(select_clip_cov)
def clip_cov(inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> PolicyLossOutputs:
    """vanilla's clipped surrogate (no dual clip), and 0 for the selected tokens, whose covariance is high.

    cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the mini-batch's tokens: such tokens bring the entropy
    down. G. Cui et al. eq. 10-11, https://arxiv.org/abs/2505.22617
    """
    tokens, selected = _Tokens(inputs), _selected(inputs)
    losses, clipped = tokens.clipped_surrogate(tokens.log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    return tokens.outputs(torch.where(selected, 0.0, losses), clipped | selected)


def select_kl_cov(inputs: PolicyLossInputs, *, row_keys: Tensor, kl_cov_ratio: float = 0.0002) -> Tensor:
    """The max(1, floor(kl_cov_ratio N)) of N tokens whose covariance is highest."""
    if kl_cov_ratio <= 0:
        raise ValueError(f"actor.policy_loss.kl_cov_ratio={kl_cov_ratio} must be above 0.")
    tokens = _Tokens(inputs)
    return _largest(tokens.covariances(), tokens.mask, max(1, int(kl_cov_ratio * int(tokens.mask.sum()))))


@selects_with(select_kl_cov)
def kl_cov(inputs: PolicyLossInputs, *, ppo_kl_coef: float = 1.0) -> PolicyLossOutputs:
    """-A r without clipping, plus ppo_kl_coef |log r| for the selected tokens, whose covariance is highest.

    G. Cui et al. eq. 12-13, https://arxiv.org/abs/2505.22617; cov as in clip_cov.
    """
    tokens, selected = _Tokens(inputs), _selected(inputs)
    losses = -tokens.advantages * tokens.log_ratio.exp()
    return tokens.outputs(losses + torch.where(selected, ppo_kl_coef * tokens.log_ratio.abs(), 0.0))


def geo_mean(inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> PolicyLossOutputs:
    """-A exp(mean_t c_t) at every token, A the row's mean advantage, c_t the clipped log ratio of GMPO.

    c_t = min(log r_t, eps_high) where A_t > 0, max(log r_t, -eps_low) where A_t < 0: the bounds are log ratios.
    Y. Zhao et al. eq. 4, https://arxiv.org/abs/2507.20673 (bounds 0.4); made for seq-mean-token-mean, which gives the
    mean over rows.
    """
    tokens = _Tokens(inputs)
    upper = torch.where(tokens.advantages > 0, tokens.log_ratio.clamp(max=clip_ratio_high), tokens.log_ratio)
    bounded = torch.where(tokens.advantages < 0, tokens.log_ratio.clamp(min=-clip_ratio_low), upper)
    ratio = masked_mean(bounded, tokens.mask, dim=-1).exp()
    losses = -masked_mean(tokens.advantages, tokens.mask, dim=-1) * ratio
    return tokens.outputs(
        losses[:, None].expand_as(tokens.mask), bounded < tokens.log_ratio, bounded > tokens.log_ratio
    )


def cispo(inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float) -> PolicyLossOutputs:
    """-sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi: the weight is clipped, every token keeps a gradient.

    MiniMax-M1 eq. 4-5, https://arxiv.org/abs/2506.13585 (no lower bound there: eps_low >= 1).
    """
    tokens = _Tokens(inputs)
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return tokens.outputs(-weight * tokens.advantages * tokens.log_probs, weight != ratio, weight > ratio)


def sapo(inputs: PolicyLossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PolicyLossOutputs:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg: a soft gate instead of a clip.

    C. Gao et al. eq. 5-6, https://arxiv.org/abs/2511.20347; made for seq-mean-token-mean. Its gradient at r = 1 is
    that of -A r.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"actor.policy_loss: tau_pos={tau_pos} and tau_neg={tau_neg} must be above 0.")
    tokens = _Tokens(inputs)
    tau = torch.full_like(tokens.advantages, tau_neg).masked_fill(tokens.advantages > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.log_ratio.exp() - 1))
    return tokens.outputs(-tokens.advantages * gate)


class _Tokens:
    """The inputs with masked places replaced by 0 (ratio 1), and what all losses share."""

    def __init__(self, inputs: PolicyLossInputs) -> None:
        self.mask = inputs.response_mask.bool()
        self.log_probs = inputs.log_probs.where(self.mask, 0.0)
        self.advantages = inputs.advantages.where(self.mask, 0.0).detach()
        self.log_ratio = (self.log_probs - inputs.old_log_probs.where(self.mask, 0.0).detach()).clamp(-20.0, 20.0)
        self.weights = inputs.rollout_weights

    def clipped_surrogate(self, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """The larger of -A r and -A clip(r, 1 - low, 1 + high), and where it is the second alone."""
        free, bounded = -self.advantages * ratio, -self.advantages * ratio.clamp(1 - low, 1 + high)
        return torch.maximum(free, bounded), bounded > free

    def covariances(self) -> Tensor:
        """(log pi - mean log pi) (A - mean A), without gradient."""
        log_probs = self.log_probs.detach()
        return (log_probs - masked_mean(log_probs, self.mask)) * (
            self.advantages - masked_mean(self.advantages, self.mask)
        )

    def outputs(self, losses: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> PolicyLossOutputs:
        if self.weights is not None:
            losses = losses * self.weights.where(self.mask, 0.0).detach()
        none = torch.zeros_like(self.mask)
        metrics = {
            "pg_clipfrac": none if clipped is None else clipped,
            "pg_clipfrac_lower": none if lower is None else lower,
            "ppo_kl": -self.log_ratio.detach(),
        }
        at_tokens = {name: values.to(losses.dtype).where(self.mask, 0.0) for name, values in metrics.items()}
        return PolicyLossOutputs(losses.where(self.mask, 0.0), at_tokens)


def _selected(inputs: PolicyLossInputs) -> Tensor:
    assert inputs.selected is not None, "this loss chooses tokens over the whole mini-batch: its select comes first"
    return inputs.selected.bool()


def _largest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """[B, T] bool: the `count` candidates with the largest values, or all of them."""
    chosen = torch.zeros_like(candidates)
    places = candidates.flatten().nonzero()[:, 0]
    best = values.flatten()[places].topk(min(count, len(places))).indices
    chosen.view(-1)[places[best]] = True
    return chosen


def row_keys(input_ids: Tensor, *, seed: int = 0) -> Tensor:
    """[B] int64, a hash of each row's token ids [B, L] and the seed: the same on every rank and in every order."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    return _mix(_mix(input_ids.long() + _mix(places + seed)).sum(-1))


def _mix(numbers: Tensor) -> Tensor:
    """Scramble int64 numbers, one to one: splitmix64's finaliser (S. Vigna); multiplication wraps."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        logical = (numbers >> shift) & ((1 << (64 - shift)) - 1)  # torch shifts the sign in
        numbers = (numbers ^ logical) * factor
    return numbers
