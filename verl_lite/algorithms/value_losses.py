"""Value losses: fn(ValueLossInputs, *, options) -> ValueLossOutputs, per token, never reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLossInputs:
    values: Tensor  # [B, T] of the critic being trained, with gradient
    old_values: Tensor  # [B, T] of the critic at the start of the training step
    returns: Tensor  # [B, T]
    response_mask: Tensor  # [B, T] 0/1 or bool


class ValueLossOutputs(NamedTuple):
    losses: Tensor  # [B, T], 0 at masked places
    metrics: dict[str, Tensor]  # name -> [B, T], detached


def clipped(inputs: ValueLossInputs, *, cliprange_value: float) -> ValueLossOutputs:
    """max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, eps = cliprange_value.

    J. Schulman et al., OpenAI baselines' PPO2; studied in https://arxiv.org/abs/2005.12729 §3.
    """
    mask = inputs.response_mask.bool()
    values = inputs.values.where(mask, 0.0)
    old_values = inputs.old_values.where(mask, 0.0).detach()
    returns = inputs.returns.where(mask, 0.0).detach()
    bounded = torch.minimum(torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value)
    free, held = (values - returns).square(), (bounded - returns).square()
    losses = 0.5 * torch.maximum(free, held)
    return ValueLossOutputs(
        losses.where(mask, 0.0),
        {"vf_clipfrac": ((held > free) & mask).to(losses.dtype), "vpred_mean": values.detach()},
    )
