"""The examples of one's own estimator and loss are found by path and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import ragged
import torch

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from verl_lite.algorithms.advantages import AdvantageInputs
from verl_lite.algorithms.policy_losses import PolicyLossInputs
from verl_lite.plugins import check_options, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
ESTIMATOR, LOSS = (
    f"{EXAMPLES}/custom_advantage.py:median_baseline",
    f"{EXAMPLES}/custom_policy_loss.py:quadratic_penalty",
)


@pytest.mark.parametrize("name", ["custom_advantage.py", "custom_policy_loss.py"])
def test_an_extension_takes_at_most_sixty_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


def test_own_estimator() -> None:
    estimator = resolve(ESTIMATOR, ADVANTAGE_ESTIMATORS, key="algorithm.adv_estimator")
    rewards = torch.tensor([[0.0, 1], [0, 0], [0, 9], [torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])
    advantages = estimator(AdvantageInputs(rewards, mask, torch.zeros(4, dtype=torch.long))).advantages
    assert advantages.tolist() == [[0, 0], [-1, -1], [8, 8], [0, 0]]  # median of 1, 0, 9 is 1


def test_own_loss_with_its_own_option() -> None:
    loss = resolve(LOSS, POLICY_LOSSES, key="loss_mode")
    check_options(loss, {"penalty": 2.0}, key="actor_rollout_ref.actor.policy_loss")
    inputs = PolicyLossInputs(*(torch.tensor([[x]]) for x in (0.5, 0.0, 0.0)), response_mask=torch.ones(1, 1))
    assert float(loss(inputs, penalty=2.0).losses) == 0.25  # 2 / 2 * 0.5^2


def test_own_loss_ignores_masked_places() -> None:
    loss = resolve(LOSS, POLICY_LOSSES, key="loss_mode")
    log_probs = ragged.poisoned(ragged.randn(0)).requires_grad_()
    outputs = loss(PolicyLossInputs(log_probs, ragged.randn(1), ragged.randn(2), ragged.mask()))
    outputs.losses.sum().backward()
    assert outputs.losses.isfinite().all() and not log_probs.grad[ragged.mask() == 0].any()


def test_a_typo_in_an_option_of_ones_own_loss_is_told() -> None:
    loss = resolve(LOSS, POLICY_LOSSES, key="loss_mode")
    with pytest.raises(ValueError, match=r"policy_loss.penality is unknown \(nearest: penalty\)"):
        check_options(loss, {"penality": 2.0}, key="actor_rollout_ref.actor.policy_loss")
