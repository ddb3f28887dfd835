"""Random ragged float64 batches for tests of pure functions: every edge a mask or a group can have, in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

# 1 = trained token. Whole, holes, one token first / last / inside, short, nothing at all.
MASKS = [
    [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1],
    [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0],
    [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1],
]  # fmt: skip
# Sizes without the fully masked rows 3 and 12: group 0: 4, 1: 1 (row 10), 2: 3 with equal rewards, 3: 3, 4: 1 of 2.
GROUPS = [0, 2, 0, 0, 3, 2, 0, 3, 2, 0, 1, 3, 4, 4]
EQUAL_REWARDS_GROUP = 2


def mask() -> Tensor:
    return torch.tensor(MASKS)


def randn(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(MASKS), len(MASKS[0]), generator=generator, dtype=torch.float64)


def outcome_rewards(seed: int) -> Tensor:
    """[B, T], the score on the last trained token; rows of EQUAL_REWARDS_GROUP all have 0.1."""
    rewards = torch.zeros(len(MASKS), len(MASKS[0]), dtype=torch.float64)
    for row, (score, tokens) in enumerate(zip(randn(seed)[:, 0].tolist(), trained(), strict=True)):
        if tokens:
            rewards[row, tokens[-1]] = 0.1 if GROUPS[row] == EQUAL_REWARDS_GROUP else score
    return rewards


def trained() -> list[list[int]]:
    """Per row, the places of its trained tokens."""
    return [[t for t, flag in enumerate(row) if flag] for row in MASKS]


def poisoned(values: Tensor, poison: float = float("nan")) -> Tensor:
    """The same with `poison` at every masked place."""
    return values.where(mask().bool(), poison)
