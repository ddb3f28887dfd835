from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import ragged
import torch
from torch import Tensor

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS, ESTIMATORS_WITH_GROUPS
from verl_lite.algorithms import advantages as estimators
from verl_lite.algorithms.advantages import AdvantageInputs, Advantages, group_ids
from verl_lite.plugins import pick_options, resolve

OPTIONS = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": True}
Rows = list[list[float]]


def estimate(name: str, inputs: AdvantageInputs, **options: object) -> Advantages:
    function = resolve(name, ADVANTAGE_ESTIMATORS, key="adv_estimator")
    return function(inputs, **pick_options(function, OPTIONS | options))


def scored(scores: list[float], uids: list[str], tokens: int = 2) -> AdvantageInputs:
    """Rows of `tokens` trained tokens and one of padding; the score stands on the last token."""
    rewards = torch.zeros(len(scores), tokens + 1, dtype=torch.float64)
    rewards[:, tokens - 1] = torch.tensor(scores, dtype=torch.float64)
    mask = torch.ones_like(rewards)
    mask[:, tokens] = 0
    return AdvantageInputs(rewards, mask, group_ids(uids))


def ragged_inputs() -> AdvantageInputs:
    return AdvantageInputs(
        token_level_rewards=ragged.outcome_rewards(1),
        response_mask=ragged.mask(),
        group_ids=torch.tensor(ragged.GROUPS),
        values=ragged.randn(2),
        baseline_scores=ragged.randn(3)[:, 0],
    )


def slow_whiten(rows: Rows) -> Rows:
    values = [x for row in rows for x in row]
    mean = sum(values) / len(values)
    variance = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def at_tokens(rows: Rows) -> Tensor:
    result = torch.zeros(len(ragged.MASKS), len(ragged.MASKS[0]), dtype=torch.float64)
    for row, places in enumerate(ragged.trained()):
        for value, place in zip(rows[row], places, strict=True):
            result[row, place] = value
    return result


def slow_gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    advantages, returns = [], []
    for row, places in enumerate(ragged.trained()):
        carried, next_value, reverse = 0.0, 0.0, []
        for place in reversed(places):
            value = float(inputs.values[row, place])
            delta = float(inputs.token_level_rewards[row, place]) + 0.9 * next_value - value
            carried = delta + 0.9 * 0.8 * carried
            next_value = value
            reverse.append(carried)
        advantages.append(reverse[::-1])
        returns.append([a + float(inputs.values[row, p]) for a, p in zip(reverse[::-1], places, strict=True)])
    return at_tokens(slow_whiten(advantages)), at_tokens(returns)


def slow_returns(inputs: AdvantageInputs, gamma: float) -> Rows:
    rewards = [
        [float(inputs.token_level_rewards[row, p]) for p in places] for row, places in enumerate(ragged.trained())
    ]
    return [[sum(gamma**k * x for k, x in enumerate(row[t:])) for t in range(len(row))] for row in rewards]


def slow_reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    returns = slow_returns(inputs, 0.9)
    return at_tokens(slow_whiten(returns)), at_tokens(returns)


def slow_remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    returns = slow_returns(inputs, 1.0)
    baselines = inputs.baseline_scores.tolist()
    return at_tokens([[x - baselines[row] for x in values] for row, values in enumerate(returns)]), at_tokens(returns)


def by_group(of_group: Callable[[list[float], list[int]], list[float]]) -> Callable[[AdvantageInputs], list[float]]:
    """Scores and lengths of each group's valid rows -> one advantage per row."""

    def per_row(inputs: AdvantageInputs) -> list[float]:
        groups: dict[int, list[int]] = defaultdict(list)
        for row, places in enumerate(ragged.trained()):
            if places:
                groups[ragged.GROUPS[row]].append(row)
        result = [0.0] * len(ragged.MASKS)
        for rows in groups.values():
            scores = [sum(float(inputs.token_level_rewards[r, p]) for p in ragged.trained()[r]) for r in rows]
            lengths = [len(ragged.trained()[r]) for r in rows]
            for row, advantage in zip(rows, of_group(scores, lengths), strict=True):
                result[row] = advantage
        return result

    return per_row


def slow_std(scores: list[float]) -> float:
    mean = sum(scores) / len(scores)
    return math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) if len(scores) > 1 else 1.0


def slow_centred(scores: list[float], _: list[int]) -> list[float]:
    mean = sum(scores) / len(scores) if len(scores) > 1 else 0.0
    return [s - mean for s in scores]


def slow_grpo(scores: list[float], lengths: list[int]) -> list[float]:
    return [c / (slow_std(scores) + 1e-6) for c in slow_centred(scores, lengths)]


def slow_passk(scores: list[float], _: list[int]) -> list[float]:
    ranked = sorted(scores, reverse=True) + ([0.0] if len(scores) == 1 else [])
    gap = ranked[0] - ranked[1]
    return [gap / (slow_std(scores) + 1e-6) if s == ranked[0] else 0.0 for s in scores]


def slow_rloo(scores: list[float], _: list[int]) -> list[float]:
    if len(scores) == 1:
        return scores
    return [s - (sum(scores) - s) / (len(scores) - 1) for s in scores]


def slow_opo(scores: list[float], lengths: list[int]) -> list[float]:
    if len(scores) == 1:
        return scores
    baseline = sum(s * n for s, n in zip(scores, lengths, strict=True)) / sum(lengths)
    return [s - baseline for s in scores]


def slow_gpg(inputs: AdvantageInputs) -> list[float]:
    # 12 rows with tokens; the 3 of the group with equal rewards give no gradient.
    return [12 / 9 * a for a in by_group(slow_centred)(inputs)]


def slow_whitened_baseline(inputs: AdvantageInputs) -> Rows:
    return slow_whiten([[a] * len(p) for a, p in zip(by_group(slow_centred)(inputs), ragged.trained(), strict=True)])


def slow(name: str, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    per_token = {"gae": slow_gae, "reinforce_plus_plus": slow_reinforce_plus_plus, "remax": slow_remax}
    if name in per_token:
        return per_token[name](inputs)
    if name == "reinforce_plus_plus_baseline":
        advantages = at_tokens(slow_whitened_baseline(inputs))
        return advantages, advantages
    per_row = {
        "grpo": by_group(slow_grpo),
        "grpo_passk": by_group(slow_passk),
        "rloo": by_group(slow_rloo),
        "opo": by_group(slow_opo),
        "gpg": slow_gpg,
    }[name.removesuffix("_vectorized")](inputs)
    advantages = at_tokens([[a] * len(p) for a, p in zip(per_row, ragged.trained(), strict=True)])
    return advantages, advantages


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_ragged_batch_against_a_loop(name: str) -> None:
    inputs = ragged_inputs()
    got, (advantages, returns) = estimate(name, inputs), slow(name, inputs)
    torch.testing.assert_close(got.advantages, advantages, rtol=0, atol=1e-9)
    torch.testing.assert_close(got.returns, returns, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_nan_at_masked_places_changes_nothing(name: str) -> None:
    inputs = ragged_inputs()
    dirty = replace(
        inputs,
        token_level_rewards=ragged.poisoned(inputs.token_level_rewards),
        values=ragged.poisoned(inputs.values),
    )
    got, expected = estimate(name, dirty), estimate(name, inputs)
    assert torch.equal(got.advantages, expected.advantages)
    assert torch.equal(got.returns, expected.returns)
    assert not got.advantages[ragged.mask() == 0].any()
    assert not got.returns[ragged.mask() == 0].any()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_order_of_rows_and_names_of_groups_do_not_matter(name: str) -> None:
    inputs = ragged_inputs()
    order = torch.randperm(len(ragged.MASKS), generator=torch.Generator().manual_seed(0))
    renamed = torch.tensor([3, 0, 4, 1, 2])[inputs.group_ids]
    shuffled = AdvantageInputs(
        inputs.token_level_rewards[order], inputs.response_mask[order], renamed[order],
        inputs.values[order], inputs.baseline_scores[order],
    )  # fmt: skip
    torch.testing.assert_close(
        estimate(name, shuffled).advantages, estimate(name, inputs).advantages[order], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_inputs_are_not_written_and_the_dtype_is_kept(name: str) -> None:
    inputs = ragged_inputs()
    inputs = replace(inputs, token_level_rewards=inputs.token_level_rewards.float(), values=inputs.values.float())
    copies = [inputs.token_level_rewards.clone(), inputs.values.clone(), inputs.response_mask.clone()]
    result = estimate(name, inputs)
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    assert torch.equal(inputs.token_level_rewards, copies[0])
    assert torch.equal(inputs.values, copies[1])
    assert torch.equal(inputs.response_mask, copies[2])


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_one_response_of_one_token_is_finite(name: str) -> None:  # alibaba/ROLL#475
    inputs = AdvantageInputs(
        torch.tensor([[0.7]]), torch.ones(1, 1), torch.tensor([0]), torch.zeros(1, 1), torch.zeros(1)
    )
    assert estimate(name, inputs).advantages.isfinite().all()


def test_gae_by_hand() -> None:
    inputs = AdvantageInputs(
        torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), torch.tensor([0]), values=torch.tensor([[0.5, 0.25]])
    )
    result = estimators.gae(inputs, gamma=0.5, lam=0.5)
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75 = -0.1875
    # returns = A + V = 0.3125, 1; whitened: mean 0.28125, deviations -+0.46875, std 0.46875 * sqrt(2)
    torch.testing.assert_close(result.returns, torch.tensor([[0.3125, 1.0]]))
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.70711, 0.70711]]), rtol=0, atol=1e-5)


def test_gae_carries_over_a_gap_with_one_decay_per_trained_token() -> None:  # radixark/miles#1827, Search-R1#21
    gap = AdvantageInputs(
        torch.tensor([[0.0, 0, 9, 9, 1]]), torch.tensor([[1, 1, 0, 0, 1]]), torch.tensor([0]),
        values=torch.tensor([[0.5, 0.25, 7, 7, 0.125]]),
    )  # fmt: skip
    dense = AdvantageInputs(
        torch.tensor([[0.0, 0, 1]]), torch.ones(1, 3), torch.tensor([0]), values=torch.tensor([[0.5, 0.25, 0.125]])
    )
    with_gap, without = (estimators.gae(x, gamma=0.9, lam=0.8) for x in (gap, dense))
    torch.testing.assert_close(with_gap.advantages[:, [0, 1, 4]], without.advantages)
    torch.testing.assert_close(with_gap.returns[:, [0, 1, 4]], without.returns)


def test_gae_without_values_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match="needs values.*critic.enable"):
        estimators.gae(scored([1.0], ["a"]), gamma=1, lam=1)


def test_reinforce_plus_plus_by_hand() -> None:
    result = estimators.reinforce_plus_plus(scored([1.0], ["a"]), gamma=0.5)
    # returns 0.5, 1: mean 0.75, sample std sqrt(0.125)
    torch.testing.assert_close(result.returns, torch.tensor([[0.5, 1, 0]], dtype=torch.float64))
    torch.testing.assert_close(
        result.advantages, torch.tensor([[-0.70711, 0.70711, 0]], dtype=torch.float64), rtol=0, atol=1e-5
    )


def test_remax_by_hand() -> None:
    inputs = AdvantageInputs(
        torch.tensor([[0.25, 1.0, 5.0]]),
        torch.tensor([[1, 1, 0]]),
        torch.tensor([0]),
        baseline_scores=torch.tensor([0.5]),
    )
    result = estimators.remax(inputs)
    assert result.returns.tolist() == [[1.25, 1.0, 0.0]]
    assert result.advantages.tolist() == [[0.75, 0.5, 0.0]]


def test_remax_without_baselines_is_refused() -> None:
    with pytest.raises(ValueError, match="baseline_scores"):
        estimators.remax(scored([1.0], ["a"]))


A_SCORES, UIDS = [1.0, 0.0, 0.0, 0.0], ["a"] * 4
# mean 0.25, sample std 0.5: 0.75 / 0.500001, -0.25 / 0.500001; passk: gap 1 / 0.500001;
# rloo: 1 - 0, 0 - 1/3; gpg: all rows vary, alpha 1; opo: equal lengths, so the plain mean.
BY_HAND: dict[str, list[float]] = {
    "grpo": [1.499997, -0.499999, -0.499999, -0.499999],
    "grpo_vectorized": [1.499997, -0.499999, -0.499999, -0.499999],
    "grpo_passk": [1.999996, 0, 0, 0],
    "rloo": [1, -1 / 3, -1 / 3, -1 / 3],
    "opo": [0.75, -0.25, -0.25, -0.25],
    "gpg": [0.75, -0.25, -0.25, -0.25],
    # whitened over 8 tokens: mean 0, variance (2 * 0.5625 + 6 * 0.0625) / 7 = 0.2142857
    "reinforce_plus_plus_baseline": [1.620185, -0.540062, -0.540062, -0.540062],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_one_of_four_right_by_hand(name: str) -> None:
    advantages = estimate(name, scored(A_SCORES, UIDS)).advantages
    for place in (0, 1):
        assert advantages[:, place].tolist() == pytest.approx(BY_HAND[name], abs=1e-6)
    assert not advantages[:, 2].any()


# XU-YIJIE/grpo-flat#2, trl commit 35702ce37 (PR #3992), PeterGriffinJin/Search-R1#65
@pytest.mark.parametrize(("by_std", "expected"), [(True, [1.499997, -0.499999]), (False, [0.75, -0.25])])
def test_grpo_normalises_over_the_group_and_not_the_batch(by_std: bool, expected: list[float]) -> None:
    inputs = scored([1, 3, 0, 3, 0, 3, 0, 3], list("abababab"))
    advantages = estimators.grpo(inputs, norm_adv_by_std_in_grpo=by_std).advantages[:, 0]
    assert advantages[::2].tolist() == pytest.approx([expected[0]] + [expected[1]] * 3, abs=1e-6)
    assert advantages[1::2].tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS_WITH_GROUPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype) -> None:
    inputs = scored([0.1] * 5, ["a"] * 5)  # 0.1 has no exact sum: (0.1 * 5) / 5 may differ from 0.1
    inputs = replace(inputs, token_level_rewards=inputs.token_level_rewards.to(dtype))
    assert not estimate(name, inputs).advantages.any()


# NVIDIA-NeMo/labs-molt#8, verl-project/verl#7581, OpenRLHF commit b3d29278 (PR #1250)
@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", 0.6999993), ("grpo_vectorized", 0.6999993), ("grpo_passk", 0.6999993), ("rloo", 0.7), ("opo", 0.7)],
)
def test_group_of_one_keeps_its_score(name: str, expected: float) -> None:
    advantages = estimate(name, scored([1.0, 0.0, 0.7], list("aab"))).advantages
    assert float(advantages[2, 0]) == pytest.approx(expected, abs=1e-9)  # 0.7 / (1 + 1e-6)
    assert advantages.isfinite().all()


def test_group_of_one_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    estimators._warn_of_single_rows.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            estimate("grpo", scored([0.7], ["a"]))
    assert [record.message.count("rollout.n=1") for record in caplog.records] == [1]


def test_gpg_makes_up_for_groups_without_gradient() -> None:
    advantages = estimators.gpg(scored([1, 0, 1, 1], list("aabb"))).advantages[:, 0]
    assert advantages.tolist() == [1.0, -1.0, 0.0, 0.0]  # alpha = 4 rows / 2 in groups that vary


def test_opo_weighs_the_baseline_by_length() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    advantages = estimators.opo(AdvantageInputs(rewards, mask, torch.tensor([0, 0]))).advantages
    # baseline (1 * 1 + 3 * 0) / 4 = 0.25
    assert advantages.tolist() == [[0.75, 0, 0], [-0.25, -0.25, -0.25]]


def test_passk_gives_nothing_to_rows_that_tie_for_the_best() -> None:
    assert not estimate("grpo_passk", scored([1, 1, 0], ["a"] * 3)).advantages.any()


def test_passk_of_two_is_the_gap_between_them() -> None:
    advantages = estimate("grpo_passk", scored([0.75, 0.5], ["a"] * 2), norm_adv_by_std_in_grpo=False).advantages
    assert advantages[:, 0].tolist() == [0.25, 0.0]


# Rows are worked on in blocks of 512 and 1024: a batch of thousands must be that of its parts.
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS.keys() - {"reinforce_plus_plus_baseline"}))
def test_copies_of_a_batch_have_its_returns_whatever_their_number(name: str) -> None:
    once, copies = ragged_inputs(), 200  # 2800 rows
    tiled = AdvantageInputs(
        once.token_level_rewards.repeat(copies, 1),
        once.response_mask.repeat(copies, 1),
        torch.cat([once.group_ids + 5 * copy for copy in range(copies)]),
        once.values.repeat(copies, 1),
        once.baseline_scores.repeat(copies),
    )
    result, expected = estimate(name, tiled), estimate(name, once)
    torch.testing.assert_close(result.returns, expected.returns.repeat(copies, 1), rtol=0, atol=1e-9)
    if name not in ("gae", "reinforce_plus_plus"):  # whitened over the batch, whose n - 1 differs
        torch.testing.assert_close(result.advantages, expected.advantages.repeat(copies, 1), rtol=0, atol=1e-9)


def test_fully_masked_row_does_not_move_its_group() -> None:
    inputs = scored([1.0, 0.0, 50.0], ["a"] * 3)
    inputs.response_mask[2] = 0
    assert estimators.rloo(inputs).advantages[:, 0].tolist() == [1.0, -1.0, 0.0]


def test_group_ids_name_groups_in_order_of_appearance() -> None:
    assert group_ids(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]
