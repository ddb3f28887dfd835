"""KL(policy || reference) per token from log-probs of sampled tokens, and the coefficient in front of it.

Estimators: fn(log_probs [B, T], ref_log_probs [B, T]) -> [B, T], nats. With d = log_probs - ref_log_probs and tokens
drawn from the policy; J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from verl_lite.algorithms import KL_ESTIMATORS
from verl_lite.algorithms.aggregate import masked_count, masked_mean
from verl_lite.plugins import resolve

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d. Unbiased, may be negative; as a loss its expected gradient is 0, so use it in the reward."""
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|d|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2. Biased value; its gradient is that of the KL in expectation."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most 10. Unbiased and never negative; d is cut at +-20 so that exp stays finite."""
    negative_d = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (negative_d.expm1() - negative_d).clamp(max=10.0)


def _with_k2_gradient(estimator: Estimator) -> Estimator:
    """The estimator's value with k2's gradient, d: the right gradient of the KL whatever is monitored.

    Y. Tang, R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL", https://arxiv.org/abs/2506.09477
    """

    def straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        gradient = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + gradient - gradient.detach()

    return straight_through


k1_plus = _with_k2_gradient(k1)
absolute_plus = _with_k2_gradient(absolute)
k2_plus = k2
k3_plus = _with_k2_gradient(k3)


class KLPenalty(Protocol):
    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor | None = None) -> Tensor: ...


def kl_penalty(name: str, *, key: str = "kl_loss_type") -> KLPenalty:
    """The estimator of that name (or import path); given a mask, masked places are 0 in value and in gradient."""
    estimator: Estimator = resolve(name, KL_ESTIMATORS, key=key)

    def penalty(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor | None = None) -> Tensor:
        if response_mask is None:
            return estimator(log_probs, ref_log_probs)
        # Before the estimator and after: a NaN that has gone through exp comes back as a NaN gradient.
        mask = response_mask.bool()
        kl = estimator(torch.where(mask, log_probs, 0.0), torch.where(mask, ref_log_probs, 0.0))
        return torch.where(mask, kl, 0.0)

    return penalty


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    name: str = "kl",
) -> tuple[Tensor, float]:
    """KL in the reward: token_level_rewards = token_level_scores - kl_coef * KL on response tokens; all [B, T].

    Returns the rewards (a new tensor) and the KL's mean over sequences of their mean over tokens: what an adaptive
    coefficient follows, and `actor/reward_kl_penalty`.
    """
    kl = kl_penalty(name, key="algorithm.kl_penalty")(old_log_probs, ref_log_probs, response_mask)
    per_sequence = masked_mean(kl, response_mask, dim=-1)
    return token_level_scores - kl_coef * kl, float(masked_mean(per_sequence, masked_count(response_mask, -1)))


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.kl_coef = kl_coef

    def update(self, current_kl: float, num_sequences: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass  # a fixed coefficient is the config's, also after a resume with another one


class AdaptiveKLController(FixedKLController):
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon.

    D. Ziegler et al. §2.2, https://arxiv.org/abs/1909.08593; `horizon` in sequences.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: int) -> None:
        super().__init__(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, num_sequences: int) -> None:
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * num_sequences / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl_coef = state["kl_coef"]


def make_kl_controller(type: str, *, kl_coef: float, target_kl: float, horizon: int) -> FixedKLController:
    """The controller of `algorithm.kl_ctrl`."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    assert type == "adaptive", "the config knows no other"
    return AdaptiveKLController(kl_coef, target_kl=target_kl, horizon=horizon)
