"""Masked statistics, and the one function that reduces a loss.

Masked entries are selected away, never multiplied: 0 * NaN is NaN. A mask is bool or 0/1 of any dtype, 1 = counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lite.algorithms import LOSS_AGGREGATIONS
from verl_lite.plugins import resolve


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the entries under the mask; over all, or over the last dim (-1)."""
    return _join([torch.where(m, v, 0.0).sum(dim) for v, m in zip(_blocks(values), _blocks(mask.bool()), strict=True)])


def masked_count(mask: Tensor, dim: int | None = None) -> Tensor:
    """Number of entries under the mask; over all, or over the last dim (-1)."""
    # As int8, since summing bools takes ten times as long.
    return _join([block.sum(dim, dtype=torch.int32) for block in _blocks(mask.bool().view(torch.int8))])


def _blocks(values: Tensor) -> tuple[Tensor, ...]:
    """Rows a block at a time: fresh memory for a temporary as large as a train batch costs more than its sum."""
    return torch.split(values, 512)


def _join(sums: list[Tensor]) -> Tensor:
    return torch.cat(sums) if sums[0].dim() else torch.stack(sums).sum()


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the entries under the mask; 0 where there are none."""
    return masked_sum(values, mask, dim) / masked_count(mask, dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (divisor n - 1) of the entries under the mask; 0 for fewer than two."""
    deviations = values - masked_mean(values, mask)
    return masked_sum(deviations.square(), mask) / (masked_count(mask) - 1).clamp(min=1)


@torch.no_grad()
def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the entries under the mask, 0 elsewhere; a single entry becomes 0.

    Without gradient, and in one new tensor: each temporary would cost as much time as the result.
    """
    mean = masked_mean(values, mask)
    deviations = torch.where(mask.bool(), values, mean).sub_(mean)
    variance = torch.linalg.vector_norm(deviations).square() / (masked_count(mask) - 1).clamp(min=1)
    return deviations.mul_((variance + 1e-8).rsqrt())


@dataclass(frozen=True)
class MiniBatchTotals:
    """What a mini-batch's losses are divided by, counted over all its rows on all ranks before it is cut."""

    loss_tokens: int  # tokens with response_mask 1
    sequences: int  # rows with at least one such token; a fully masked row counts nowhere

    @classmethod
    def count(cls, response_mask: Tensor) -> MiniBatchTotals:
        per_row = masked_count(response_mask, -1)
        return cls(loss_tokens=int(per_row.sum()), sequences=int((per_row > 0).sum()))


def aggregate_loss(
    losses: Tensor, mask: Tensor, mode: str, totals: MiniBatchTotals, scale_factor: float | None = None
) -> Tensor:
    """This micro-batch's share of the mini-batch's mean loss: its numerator over the mini-batch's denominator.

    The shares of all micro-batches and ranks add up to the loss of the whole mini-batch, however it was cut; who
    averages gradients over W ranks multiplies by W. Without any loss token the share is 0.

    Args:
        losses: [B, T] per-token losses (or a metric); anything at masked places.
        mask: [B, T], 1 where the token counts.
        mode: a name in LOSS_AGGREGATIONS, or the import path of a function with the same signature.
        totals: of the whole mini-batch.
        scale_factor: tokens, the divisor of seq-mean-token-sum-norm; the other modes do not read it.
    """
    share: Tensor = resolve(mode, LOSS_AGGREGATIONS, key="loss_agg_mode")(losses, mask, totals, scale_factor)
    return share


def token_mean(losses: Tensor, mask: Tensor, totals: MiniBatchTotals, scale_factor: float | None = None) -> Tensor:
    """sum over tokens / number of tokens. DAPO §3.3, https://arxiv.org/abs/2503.14476"""
    return masked_sum(losses, mask) / max(totals.loss_tokens, 1)


def seq_mean_token_sum(
    losses: Tensor, mask: Tensor, totals: MiniBatchTotals, scale_factor: float | None = None
) -> Tensor:
    """sum over tokens / number of sequences."""
    return masked_sum(losses, mask) / max(totals.sequences, 1)


def seq_mean_token_mean(
    losses: Tensor, mask: Tensor, totals: MiniBatchTotals, scale_factor: float | None = None
) -> Tensor:
    """mean over sequences of the mean over their tokens. GRPO eq. 3, https://arxiv.org/abs/2402.03300"""
    return masked_mean(losses, mask, dim=-1).sum() / max(totals.sequences, 1)


def seq_mean_token_sum_norm(
    losses: Tensor, mask: Tensor, totals: MiniBatchTotals, scale_factor: float | None = None
) -> Tensor:
    """sum over tokens / (number of sequences * scale_factor). Dr. GRPO §3.1, https://arxiv.org/abs/2503.20783

    scale_factor is a constant of the run, usually the longest response allowed. The width of a batch would not do: it
    changes with the padding.
    """
    if scale_factor is None or scale_factor <= 0:
        raise ValueError(
            f"loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor > 0 (tokens), got {scale_factor}; "
            "usual: data.max_response_length."
        )
    return masked_sum(losses, mask) / (max(totals.sequences, 1) * scale_factor)
