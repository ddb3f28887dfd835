"""The engine by itself: the global gradient norm, and steps that do not happen."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

from verl_lite.config import FSDPConfig, OptimConfig
from verl_lite.distributed.fsdp import FSDPEngine
from verl_lite.distributed.process_group import RankContext


def step_with_gradients_3_and_4(context: RankContext) -> tuple[float, Tensor, Tensor, bool]:
    """Two parameters, one on each rank; gradients 3 and 4, clipped to norm 1."""
    engine = FSDPEngine(
        lambda on_meta: nn.Linear(1, 2, bias=False, device="meta" if on_meta else "cpu"),
        lambda module: [],
        context=context,
        fsdp=FSDPConfig(dtype="float32"),
    )
    optim = OptimConfig(betas=[0.0, 0.0])  # AdamW's first moment is then the gradient it was given
    engine.train_with(optim, grad_clip=1.0, sync_every_micro_batch=True, optimizer_offload=False)
    share = torch.tensor([3.0, 4.0]) / context.world_size
    engine.backward((engine.module(torch.ones(1, 1)) * share).sum(), last=True)
    outcome = engine.step(0.1)
    [state] = engine.optimizer.state.values()
    given = state["exp_avg"].full_tensor()

    engine.backward((engine.module(torch.ones(1, 1)) * share * float("nan" if context.rank else 1.0)).sum(), last=True)
    before = engine.module.weight.full_tensor().clone()
    skipped = engine.step(0.1)
    return outcome.grad_norm, given, engine.module.weight.full_tensor() - before, outcome.done and not skipped.done


def test_gradients_are_clipped_by_the_norm_over_all_ranks_and_nan_anywhere_stops_all() -> None:
    with Ranks(2) as ranks:
        for grad_norm, given, moved, right in ranks.run(step_with_gradients_3_and_4):
            assert grad_norm == pytest.approx(5.0)  # sqrt(3² + 4²), not 3 on one rank and 4 on the other
            assert given.flatten().tolist() == pytest.approx([0.6, 0.8], abs=1e-5)  # each divided by 5
            assert not moved.any() and right
