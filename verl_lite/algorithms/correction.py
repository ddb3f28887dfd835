"""Train/rollout mismatch: the engine samples with slightly other probabilities than the trainer computes.

With l_t = old_log_probs - rollout_log_probs (log of trainer over engine) at the tokens of a row, the ratio is
    token:      exp(l_t), one per token
    sequence:   exp(sum_t l_t), the product: the exact weight of the row, of high variance
    geometric:  exp(mean_t l_t), the geometric mean: per row and independent of its length (rejection only)
Importance weights are truncated, min(ratio, threshold) (TIS: F. Yao et al., 2025, https://fengyao.notion.site/off-policy-rl);
rejection takes tokens or rows whose ratio leaves [1 / threshold, threshold] out of the mask. Both are facts of the
whole train batch and carry no gradient; exponents are cut at +-20. Rows without tokens count nowhere.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lite.algorithms.aggregate import masked_mean, masked_sum, masked_var

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutCorrection:
    weights: Tensor | None  # [B, T] to multiply the policy loss by; None when rollout_is is None; 0 at masked places
    response_mask: Tensor  # [B, T], dtype as given, without what was rejected: the update's mask. Advantages keep the
    # mask from before, or a row whose last token is rejected would lose its reward.
    metrics: dict[str, float]  # rollout_corr/*


@torch.no_grad()
def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = None,
) -> RolloutCorrection:
    """Weights, mask and metrics of `algorithm.rollout_correction`; all tensors [B, T], a whole train batch.

    rollout_rs_threshold=None takes rollout_is_threshold. With both None it only measures (at token level).
    """
    rs_threshold = rollout_is_threshold if rollout_rs_threshold is None else rollout_rs_threshold
    mask = response_mask.bool()
    log_ratio = (old_log_probs - rollout_log_probs).where(mask, 0.0)
    metrics = _mismatch(old_log_probs, rollout_log_probs, log_ratio, mask)

    ratio, counts = _ratio(log_ratio, mask, rollout_is or "token")
    truncated = ratio.clamp(max=rollout_is_threshold)
    metrics |= _ratio_metrics("rollout_is", ratio, truncated, counts, rollout_is_threshold)
    weights = None if rollout_is is None else truncated.expand_as(mask).where(mask, 0.0)

    kept = mask
    if rollout_rs is not None:
        ratio, counts = _ratio(log_ratio, mask, rollout_rs)
        inside = (ratio >= 1 / rs_threshold) & (ratio <= rs_threshold)
        metrics |= _ratio_metrics(
            "rollout_rs", ratio, ratio.clamp(1 / rs_threshold, rs_threshold), counts, rs_threshold
        )
        kept = mask & inside
        metrics["rollout_rs_masked_fraction"] = float(masked_mean((~kept).to(ratio.dtype), mask))
        lost = (mask & ~kept).any(-1).to(ratio.dtype)
        metrics["rollout_rs_seq_masked_fraction"] = float(masked_mean(lost, mask.any(-1)))
        if bool(mask.any() & ~kept.any()):
            _warn_of_nothing_kept(rollout_rs, rs_threshold)
    return RolloutCorrection(
        weights=weights,
        response_mask=kept.to(response_mask.dtype),
        metrics={f"rollout_corr/{name}": value for name, value in metrics.items()},
    )


@torch.no_grad()
def rollout_probs_diff(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """training/rollout_probs_diff_{mean,max,std}: |p_trainer - p_engine| of the sampled tokens."""
    mask = response_mask.bool()
    gaps = (old_log_probs.exp() - rollout_log_probs.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": float(masked_mean(gaps, mask)),
        "training/rollout_probs_diff_max": float(gaps.where(mask, 0.0).max()),
        "training/rollout_probs_diff_std": float(masked_var(gaps, mask).sqrt()),
    }


def _ratio(log_ratio: Tensor, mask: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Ratios as [B, T] (token) or [B, 1], and which of them count."""
    if level == "token":
        return log_ratio.clamp(-20.0, 20.0).exp(), mask
    assert level in ("sequence", "geometric"), "the config knows no other"
    per_row = masked_sum(log_ratio, mask, -1) if level == "sequence" else masked_mean(log_ratio, mask, -1)
    return per_row.clamp(-20.0, 20.0).exp()[:, None], mask.any(-1, keepdim=True)


def _ratio_metrics(prefix: str, ratio: Tensor, bounded: Tensor, counts: Tensor, threshold: float) -> dict[str, float]:
    """Over tokens (token level) or rows: of the ratio itself, but the sample size of the bounded one.

    eff_sample_size = mean(w)^2 / mean(w^2), in (0, 1]: 1 means that all weigh the same.
    """
    if not bool(counts.any()):
        return {}
    dtype = ratio.dtype
    return {
        f"{prefix}_mean": float(masked_mean(ratio, counts)),
        f"{prefix}_std": float(masked_var(ratio, counts).sqrt()),
        f"{prefix}_max": float(ratio.where(counts, -torch.inf).max()),
        f"{prefix}_min": float(ratio.where(counts, torch.inf).min()),
        f"{prefix}_eff_sample_size": float(masked_mean(bounded, counts) ** 2 / masked_mean(bounded**2, counts)),
        f"{prefix}_ratio_fraction_high": float(masked_mean((ratio > threshold).to(dtype), counts)),
        f"{prefix}_ratio_fraction_low": float(masked_mean((ratio < 1 / threshold).to(dtype), counts)),
    }


@functools.cache
def _warn_of_nothing_kept(rollout_rs: str, threshold: float) -> None:
    logger.warning(
        "algorithm.rollout_correction.rollout_rs=%s with threshold %g rejected every token of a step, which trains "
        "nothing (said once; training/empty_steps counts the updates): do engine and trainer have the same weights, "
        "or is rollout_rs_threshold too close to 1?",
        rollout_rs,
        threshold,
    )


def _mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """KL(engine || trainer) over tokens as k1 and k3, and perplexities: the mean over rows of exp(-mean log-prob)."""
    rows = mask.any(-1)
    bounded = log_ratio.clamp(-20.0, 20.0)
    training_ppl = (-masked_mean(old_log_probs, mask, -1)).clamp(-20.0, 20.0).exp()
    rollout_ppl = (-masked_mean(rollout_log_probs, mask, -1)).clamp(-20.0, 20.0).exp()
    return {
        "kl": float(masked_mean(-log_ratio, mask)),
        "k3_kl": float(masked_mean(bounded.expm1() - bounded, mask)),
        "training_ppl": float(masked_mean(training_ppl, rows)),
        "rollout_ppl": float(masked_mean(rollout_ppl, rows)),
    }
