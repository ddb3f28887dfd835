from __future__ import annotations

import json
import math

import pytest
import ragged
import torch
from torch import Tensor

from verl_lite.algorithms import KL_ESTIMATORS
from verl_lite.algorithms.aggregate import MiniBatchTotals, aggregate_loss
from verl_lite.algorithms.kl import AdaptiveKLController, apply_kl_penalty, kl_penalty, make_kl_controller

# (log_prob, ref) = (-1, -2), (-2, -1), (-30, 0); verl-project/verl#2953, NVIDIA-NeMo/RL#2506, allenai/open-instruct#535
POINTS = torch.tensor([[-1.0, -2, -30]]), torch.tensor([[-2.0, -1, 0]])
VALUES = {
    "k1": [1, -1, -30],
    "abs": [1, 1, 30],
    "k2": [0.5, 0.5, 450],
    "k3": [0.367879, 0.718282, 10],  # e^-1 - 1 + 1; e - 1 - 1; e^20 - 1 - 20, cut at 10
}
OTHER_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_by_hand(name: str) -> None:
    expected = VALUES[OTHER_NAMES[name.removesuffix("+")]]
    assert kl_penalty(name)(*POINTS)[0].tolist() == pytest.approx(expected, abs=1e-5)


# k1: 1; |d|: sign; k2: d; k3: 1 - e^-d, 0 where it is cut; "+": always d
GRADIENTS = {"k1": [1, 1, 1], "abs": [1, -1, -1], "k2": [1, -1, -30], "k3": [0.632121, -1.718282, 0]}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradients_against_closed_forms(name: str) -> None:
    log_probs = POINTS[0].clone().requires_grad_()
    kl_penalty(name)(log_probs, POINTS[1]).sum().backward()
    expected = [1, -1, -30] if name.endswith("+") else GRADIENTS[OTHER_NAMES[name]]
    assert log_probs.grad[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_ragged_batch_against_a_loop(name: str) -> None:
    log_probs, ref = ragged.randn(0), ragged.randn(1, 3.0)
    formula = {
        "k1": lambda d: d,
        "abs": abs,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: min(math.exp(-d) - 1 + d, 10),
    }[OTHER_NAMES[name.removesuffix("+")]]
    expected = torch.zeros_like(log_probs)
    for row, places in enumerate(ragged.trained()):
        for place in places:
            expected[row, place] = formula(float(log_probs[row, place]) - float(ref[row, place]))
    torch.testing.assert_close(kl_penalty(name)(log_probs, ref, ragged.mask()), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if not n.endswith("+")])
def test_gradcheck(name: str) -> None:
    ref = ragged.randn(1)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(name)(x, ref), ragged.randn(0).requires_grad_())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_of_equal_log_probs_is_zero(name: str) -> None:
    assert not kl_penalty(name)(ragged.randn(0), ragged.randn(0)).any()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_nan_at_masked_places_reaches_neither_value_nor_gradient(name: str) -> None:
    clean, dirty = ragged.randn(0).requires_grad_(), ragged.poisoned(ragged.randn(0)).requires_grad_()
    results = [kl_penalty(name)(x, r, ragged.mask()) for x, r in [
        (clean, ragged.randn(1)), (dirty, ragged.poisoned(ragged.randn(1)))
    ]]  # fmt: skip
    for result in results:
        result.sum().backward()
    assert torch.equal(results[0], results[1])
    assert torch.equal(clean.grad, dirty.grad)
    assert not dirty.grad[ragged.mask() == 0].any()


def mean_loss(kl: Tensor, mask: Tensor) -> Tensor:
    return aggregate_loss(kl, mask, "token-mean", MiniBatchTotals.count(mask))


# NovaSky-AI/SkyRL#1340, allenai/open-instruct#530
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_loss_has_a_gradient(name: str) -> None:
    log_probs = ragged.randn(0).requires_grad_()
    mean_loss(kl_penalty(name)(log_probs, ragged.randn(1)), ragged.mask()).backward()
    assert log_probs.grad.any()


# verl commit a65c9157b (PR #179)
@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n not in ("kl", "k1")])
def test_a_step_against_the_kl_gradient_brings_the_policy_nearer_to_the_reference(name: str) -> None:
    logits, ref = torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([0.0, 0.0])

    def exact_kl() -> Tensor:
        return (logits.softmax(0) * (logits.log_softmax(0) - ref.log_softmax(0))).sum()

    before = exact_kl().item()
    probs = logits.softmax(0).detach()  # the expectation over tokens drawn from the policy
    loss = (probs * kl_penalty(name)(logits.log_softmax(0)[None], ref.log_softmax(0)[None])[0]).sum()
    loss.backward()
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    assert exact_kl().item() < before


def test_unknown_name_answers_with_near_names() -> None:
    with pytest.raises(ValueError, match="kl_loss_type=low_var is unknown.*low_var_kl"):
        kl_penalty("low_var")


# THUDM/slime commit 045310b2b (PR #2114), CarperAI/trlx#361
def test_kl_in_the_reward_leaves_the_scores_alone() -> None:
    scores, kl = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.1, -0.2, 0.3]])
    rewards, mean_kl = apply_kl_penalty(scores, kl, torch.zeros(1, 3), torch.ones(1, 3), kl_coef=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.01, 0.02, 0.97])
    assert scores.tolist() == [[0, 0, 1]]
    assert mean_kl == pytest.approx(0.066667, abs=1e-6)  # (0.1 - 0.2 + 0.3) / 3


def test_kl_in_the_reward_reads_response_tokens_only_and_averages_over_sequences() -> None:
    nan = torch.nan
    old = torch.tensor([[0.5, 0.5, nan], [0.2, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards, mean_kl = apply_kl_penalty(torch.zeros(3, 3), old, torch.zeros(3, 3), mask, kl_coef=1.0)
    assert rewards.tolist() == [[-0.5, -0.5, 0], [pytest.approx(-0.2), 0, 0], [0, 0, 0]]
    assert mean_kl == pytest.approx(0.35)  # (0.5 + 0.2) / 2; the row without tokens counts nowhere


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (0.2, 0.1 * (1 + 0.2 * 64 / 10_000)),  # twice the target: +1, cut to +0.2
        (0.11, 0.1 * (1 + 0.1 * 64 / 10_000)),
        (0.1, 0.1),
        (0.0, 0.1 * (1 - 0.2 * 64 / 10_000)),
    ],
)
def test_adaptive_coefficient_follows_the_kl(current: float, expected: float) -> None:
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10_000)
    controller.update(current, num_sequences=64)
    assert controller.kl_coef == pytest.approx(expected, rel=1e-12)


def test_fixed_coefficient_stays() -> None:
    controller = make_kl_controller("fixed", kl_coef=0.1, target_kl=0.1, horizon=10)
    controller.update(5.0, num_sequences=64)
    controller.load_state_dict({"kl_coef": 7.0})
    assert controller.kl_coef == 0.1


def test_adaptive_coefficient_survives_a_checkpoint_as_json() -> None:
    saved = make_kl_controller("adaptive", kl_coef=0.1, target_kl=0.1, horizon=10)
    saved.update(1.0, num_sequences=5)
    loaded = make_kl_controller("adaptive", kl_coef=0.1, target_kl=0.1, horizon=10)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert loaded.kl_coef == saved.kl_coef == pytest.approx(0.11)
