"""The learning rate as a pure function of the training step; plain Python."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    lr: float,
    total_steps: int,
    schedule: str = "constant",
    warmup_steps: int = -1,
    warmup_ratio: float = 0.0,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """The rate all optimizer steps of training step `step` (from 0) use; positive in the first one.

    Warm-up over w = warmup_steps (below 0: floor(warmup_ratio * total_steps)) steps: lr (step + 1) / w, full in the
    w-th. Then, with p from 0 to 1 over the rest and m = min_lr_ratio,
        constant  lr
        linear    lr (m + (1 - m) (1 - p))
        cosine    lr (m + (1 - m) (1 + cos(2 pi num_cycles p)) / 2)     https://arxiv.org/abs/1608.03983
    p is 1 in the last step, so that the minimum is reached there; where the minimum is 0, one step after it, so that no
    step is made with rate 0. Steps beyond total_steps keep the last rate.
    """
    warmup = warmup_steps if warmup_steps >= 0 else int(warmup_ratio * total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    last = total_steps - 1 if min_lr_ratio > 0 else total_steps
    progress = min(max(step - warmup, 0) / max(last - warmup, 1), 1.0)
    if schedule == "constant":
        height = 1.0
    elif schedule == "linear":
        height = 1.0 - progress
    else:
        assert schedule == "cosine", "the config knows no other"
        height = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * height)
