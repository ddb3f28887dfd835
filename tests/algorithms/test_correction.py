from __future__ import annotations

import logging
import math

import pytest
import ragged
import torch
from torch import Tensor

from verl_lite.algorithms import correction
from verl_lite.algorithms.correction import correct_rollout, rollout_probs_diff

LOG2 = math.log(2.0)


def corrected(log_ratios: list[list[float]], mask: list[list[int]] | None = None, **options: object):  # noqa: ANN201
    rollout = torch.full((len(log_ratios), len(log_ratios[0])), -1.0, dtype=torch.float64)
    old = rollout + torch.tensor(log_ratios, dtype=torch.float64)
    return correct_rollout(old, rollout, torch.ones_like(old) if mask is None else torch.tensor(mask), **options)


def test_token_weights_are_truncated_ratios() -> None:
    result = corrected([[0.0, LOG2, 3 * LOG2, -LOG2]], rollout_is="token", rollout_is_threshold=2.0)
    assert result.weights[0].tolist() == pytest.approx([1, 2, 2, 0.5])
    assert result.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(11.5 / 4)  # of 1, 2, 8, 1/2
    assert result.metrics["rollout_corr/rollout_is_max"] == pytest.approx(8)
    assert result.metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    assert result.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25  # above 2: only 8
    # of the truncated 1, 2, 2, 1/2: (5.5 / 4)^2 / (9.25 / 4)
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.890625 / 2.3125)


def test_sequence_weight_is_the_truncated_product() -> None:
    result = corrected([[LOG2, LOG2, 9.0], [-LOG2, 0, 9.0]], [[1, 1, 0], [1, 1, 0]], rollout_is="sequence")
    assert result.weights.tolist() == [[pytest.approx(2)] * 2 + [0], [pytest.approx(0.5)] * 2 + [0]]
    assert result.metrics["rollout_corr/rollout_is_max"] == pytest.approx(4)
    assert result.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(2.25)  # over rows: (4 + 1/2) / 2


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[1, 0, 1], [1, 1, 1]]),  # ratios 1/2, 8, 1/2 and 3/2 each
        ("sequence", [[1, 1, 1], [0, 0, 0]]),  # products 2 and 27/8
        ("geometric", [[1, 1, 1], [1, 1, 1]]),  # geometric means 2^(1/3) and 3/2
    ],
)
def test_rejection_by_hand(level: str, expected: list[list[int]]) -> None:
    log_ratios = [[-LOG2, 3 * LOG2, -LOG2], [math.log(1.5)] * 3]
    result = corrected(log_ratios, rollout_rs=level, rollout_rs_threshold=2.0001)
    assert result.response_mask.tolist() == expected
    assert result.weights is None
    share = 1 - sum(map(sum, expected)) / 6
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)


def test_a_step_without_a_token_left_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    correction._warn_of_nothing_kept.cache_clear()
    with caplog.at_level(logging.WARNING):
        corrected([[5.0, 0.0], [5.0, 5.0]], rollout_rs="token")
        corrected([[5.0, 5.0]], [[0, 0]], rollout_rs="token")  # nothing was rejected: there was nothing
        assert caplog.records == []
        for _ in range(3):
            corrected([[5.0, 5.0], [-5.0, 5.0]], rollout_rs="token")
    assert [record.message.count("rejected every token") for record in caplog.records] == [1]


def test_perplexities_are_cut_and_stay_finite() -> None:
    low = torch.full((1, 2), -2000.0)
    result = correct_rollout(low, low, torch.ones(1, 2))
    assert result.metrics["rollout_corr/training_ppl"] == pytest.approx(math.exp(20))
    assert result.metrics["rollout_corr/rollout_ppl"] == pytest.approx(math.exp(20))


def test_rejection_threshold_follows_the_importance_threshold_unless_set() -> None:
    assert corrected([[3 * LOG2]], rollout_rs="token", rollout_is_threshold=9.0).response_mask.tolist() == [[1]]
    assert corrected([[3 * LOG2]], rollout_rs="token", rollout_is_threshold=7.0).response_mask.tolist() == [[0]]


def test_without_correction_it_only_measures() -> None:
    result = corrected([[LOG2, -LOG2, 5.0]], [[1, 1, 0]])
    assert result.weights is None
    assert result.response_mask.tolist() == [[1, 1, 0]]
    assert result.metrics["rollout_corr/kl"] == pytest.approx(0)  # -(log 2 - log 2) / 2
    assert result.metrics["rollout_corr/k3_kl"] == pytest.approx(0.25)  # (2 - 1 - log 2 + 1/2 - 1 + log 2) / 2
    assert result.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)
    assert result.metrics["rollout_corr/rollout_ppl"] == pytest.approx(math.e)  # every log-prob is -1


def test_spread_and_tails_of_the_ratios_by_hand() -> None:
    metrics = corrected([[2 * LOG2, 0.0, -2 * LOG2, 0.0]], rollout_rs="token").metrics
    for prefix in ("rollout_corr/rollout_is", "rollout_corr/rollout_rs"):
        # ratios 4, 1, 1/4, 1: mean 1.5625; (2.4375^2 + 2 * 0.5625^2 + 1.3125^2) / 3 = 2.765625
        assert metrics[f"{prefix}_std"] == pytest.approx(math.sqrt(2.765625))
        assert metrics[f"{prefix}_ratio_fraction_high"] == metrics[f"{prefix}_ratio_fraction_low"] == 0.25
    # rejection bounds both sides: 2, 1, 1/2, 1; truncation the upper only: 2, 1, 1/4, 1
    assert metrics["rollout_corr/rollout_rs_eff_sample_size"] == pytest.approx((4.5 / 4) ** 2 / (6.25 / 4))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx((4.25 / 4) ** 2 / (6.0625 / 4))
    # all log-probs of the engine are -1, the trainer's mean too
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(math.e)


def test_kl_is_of_the_engine_against_the_trainer() -> None:
    metrics = corrected([[-LOG2, -LOG2]]).metrics  # the trainer gives every sampled token half of the engine's
    assert metrics["rollout_corr/kl"] == pytest.approx(LOG2)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.5 - 1 + LOG2)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(2 * math.e)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_prob_far_off_stays_finite(level: str) -> None:
    result = corrected([[600.0, 0.0], [-600.0, 0.0]], rollout_is=level, rollout_rs="geometric")
    assert result.weights.isfinite().all() and result.weights.max() == 2
    assert all(math.isfinite(value) for value in result.metrics.values())


def slow_weights(old: Tensor, rollout: Tensor, level: str) -> Tensor:
    weights = torch.zeros_like(old)
    for row, places in enumerate(ragged.trained()):
        log_ratios = {p: float(old[row, p] - rollout[row, p]) for p in places}
        for place in places:
            log_ratio = log_ratios[place] if level == "token" else sum(log_ratios.values())
            weights[row, place] = min(math.exp(log_ratio), 1.5)
    return weights


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ragged_weights_against_a_loop(level: str) -> None:
    old, rollout = ragged.randn(0), ragged.randn(1)
    got = correct_rollout(old, rollout, ragged.mask(), rollout_is=level, rollout_is_threshold=1.5).weights
    torch.testing.assert_close(got, slow_weights(old, rollout, level), rtol=0, atol=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ragged_rejection_against_a_loop(level: str) -> None:
    old, rollout = ragged.randn(0), ragged.randn(1)
    got = correct_rollout(old, rollout, ragged.mask(), rollout_rs=level, rollout_rs_threshold=1.5)
    expected = ragged.mask()
    for row, places in enumerate(ragged.trained()):
        log_ratios = [float(old[row, p] - rollout[row, p]) for p in places]
        for place, log_ratio in zip(places, log_ratios, strict=True):
            level_ratio = {"token": log_ratio, "sequence": sum(log_ratios), "geometric": sum(log_ratios) / len(places)}
            if abs(level_ratio[level]) > math.log(1.5):
                expected[row, place] = 0
    assert torch.equal(got.response_mask, expected)
    lost_rows = sum((expected[row] != ragged.mask()[row]).any() for row in range(14)) / 12  # 12 rows have tokens
    assert got.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(float(lost_rows))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nan_at_masked_places_changes_nothing(level: str) -> None:
    clean = correct_rollout(ragged.randn(0), ragged.randn(1), ragged.mask(), rollout_is=level, rollout_rs="geometric")
    old, rollout = ragged.poisoned(ragged.randn(0)), ragged.poisoned(ragged.randn(1), 99.0)
    dirty = correct_rollout(old, rollout, ragged.mask(), rollout_is=level, rollout_rs="geometric")
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.response_mask, dirty.response_mask)
    assert clean.metrics == dirty.metrics


def test_no_gradient_flows_and_the_inputs_stay() -> None:
    old, mask = ragged.randn(0).requires_grad_(), ragged.mask()
    result = correct_rollout(old, ragged.randn(1), mask, rollout_is="token", rollout_rs="token")
    assert not result.weights.requires_grad
    assert torch.equal(mask, ragged.mask())


def test_a_batch_without_tokens_has_no_ratio_metrics_and_no_nan() -> None:
    metrics = corrected([[1.0, 2.0]], [[0, 0]], rollout_is="token", rollout_rs="sequence").metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_probability_gap_by_hand() -> None:
    old, rollout = torch.tensor([[0.5, 0.75, 9.0]]).log(), torch.tensor([[0.25, 0.25, 0.1]]).log()
    metrics = rollout_probs_diff(old, rollout, torch.tensor([[1, 1, 0]]))
    assert metrics == {
        "training/rollout_probs_diff_mean": pytest.approx(0.375),  # gaps 0.25 and 0.5
        "training/rollout_probs_diff_max": pytest.approx(0.5),
        "training/rollout_probs_diff_std": pytest.approx(0.125 * math.sqrt(2)),
    }
