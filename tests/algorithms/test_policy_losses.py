from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ragged
import torch
from torch import Tensor

from verl_lite.algorithms import LOSS_AGGREGATIONS, POLICY_LOSSES
from verl_lite.algorithms import policy_losses as losses
from verl_lite.algorithms.aggregate import MiniBatchTotals, aggregate_loss
from verl_lite.algorithms.policy_losses import PolicyLossInputs, PolicyLossOutputs, row_keys, selector
from verl_lite.plugins import option_names, pick_options, resolve

OPTIONS = {
    "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0,
    "clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5,
    "tau_pos": 1.0, "tau_neg": 1.05,
}  # fmt: skip
NAMES = list(POLICY_LOSSES)
KEYS = row_keys(torch.arange(len(ragged.MASKS))[:, None])


def ragged_inputs(log_ratio_scale: float = 0.4) -> PolicyLossInputs:
    old = -ragged.randn(4).abs() - 0.1
    return PolicyLossInputs(
        log_probs=old + ragged.randn(5, log_ratio_scale),
        old_log_probs=old,
        advantages=ragged.randn(6),
        response_mask=ragged.mask(),
        rollout_weights=ragged.randn(7).abs(),
    )


def apply(name: str, inputs: PolicyLossInputs, keys: Tensor = KEYS) -> PolicyLossOutputs:
    """With the selection, where the loss declares one, made on these rows."""
    loss = resolve(name, POLICY_LOSSES, key="loss_mode")
    select = selector(loss)
    if select is not None and inputs.selected is None:
        inputs = replace(inputs, selected=select(inputs, row_keys=keys, **pick_options(select, OPTIONS)))
    return loss(inputs, **pick_options(loss, OPTIONS))


def total(name: str, inputs: PolicyLossInputs, mode: str = "token-mean") -> Tensor:
    totals = MiniBatchTotals.count(inputs.response_mask)
    return aggregate_loss(apply(name, inputs).losses, inputs.response_mask, mode, totals, 6)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def surrogate(advantage: float, ratio: float) -> float:
    return max(-advantage * ratio, -advantage * clip(ratio, 0.8, 1.28))


def slow_row(name: str, log_probs: list[float], old: list[float], advantages: list[float]) -> list[float]:
    """Losses of one row's trained tokens; clip_cov and kl_cov without any selection."""
    log_ratios = [a - b for a, b in zip(log_probs, old, strict=True)]
    ratios = [math.exp(x) for x in log_ratios]
    if name == "gspo":
        s = math.exp(sum(log_ratios) / len(log_ratios))
        return [surrogate(a, s) for a in advantages]
    if name == "geo_mean":
        bounded = [
            min(x, 0.28) if a > 0 else max(x, -0.2) if a < 0 else x for a, x in zip(advantages, log_ratios, strict=True)
        ]
        mean = sum(advantages) / len(advantages)
        return [-mean * math.exp(sum(bounded) / len(bounded))] * len(advantages)
    per_token = {
        "vanilla": lambda a, r, lp: min(-a * 3, surrogate(a, r)) if a < 0 else surrogate(a, r),
        "gpg": lambda a, r, lp: -a * lp,
        "clip_cov": lambda a, r, lp: surrogate(a, r),
        "kl_cov": lambda a, r, lp: -a * r,
        "cispo": lambda a, r, lp: -clip(r, 0.8, 1.28) * a * lp,
        "sapo": lambda a, r, lp: -a * 4 / (t := 1.0 if a > 0 else 1.05) / (1 + math.exp(-t * (r - 1))),
    }[name]
    return [per_token(a, r, lp) for a, r, lp in zip(advantages, ratios, log_probs, strict=True)]


def slow_selection(name: str, inputs: PolicyLossInputs) -> set[tuple[int, int]]:
    """All candidates of clip_cov; the choice of kl_cov."""
    places = [(row, place) for row, row_places in enumerate(ragged.trained()) for place in row_places]
    log_probs = [float(inputs.log_probs[p]) for p in places]
    advantages = [float(inputs.advantages[p]) for p in places]
    mean_log_prob, mean_advantage = sum(log_probs) / len(places), sum(advantages) / len(places)
    covariances = [(x - mean_log_prob) * (a - mean_advantage) for x, a in zip(log_probs, advantages, strict=True)]
    if name == "kl_cov":
        ranked = sorted(zip(covariances, places, strict=True), reverse=True)
        return {place for _, place in ranked[: int(0.1 * len(places))]}
    chosen = set()
    for covariance, place, a, x in zip(covariances, places, advantages, log_probs, strict=True):
        ratio = math.exp(x - float(inputs.old_log_probs[place]))
        clipped = -a * clip(ratio, 0.8, 1.28) > -a * ratio
        if not clipped and 0.1 < covariance < 5:
            chosen.add(place)
    return chosen


@pytest.mark.parametrize("scale", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch_against_a_loop(name: str, scale: float) -> None:
    inputs = ragged_inputs(scale)
    if selector(resolve(name, POLICY_LOSSES, key="loss_mode")) is not None:
        inputs = replace(inputs, selected=ragged.randn(8) > 1)
    expected = torch.zeros_like(inputs.log_probs)
    for row, places in enumerate(ragged.trained()):
        if not places:
            continue
        columns = [inputs.log_probs[row, places], inputs.old_log_probs[row, places], inputs.advantages[row, places]]
        for place, value in zip(places, slow_row(name, *(c.tolist() for c in columns)), strict=True):
            if inputs.selected is not None and inputs.selected[row, place]:
                log_ratio = float(inputs.log_probs[row, place] - inputs.old_log_probs[row, place])
                value = 0.0 if name == "clip_cov" else value + 0.5 * abs(log_ratio)
            expected[row, place] = value * float(inputs.rollout_weights[row, place])
    torch.testing.assert_close(apply(name, inputs).losses, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_does_not_depend_on_how_the_mini_batch_is_cut_or_ordered(name: str, mode: str) -> None:
    inputs = ragged_inputs()
    loss = resolve(name, POLICY_LOSSES, key="loss_mode")
    if select := selector(loss):  # over the whole mini-batch, in another order of rows, as ranks would give it
        order = torch.randperm(len(ragged.MASKS), generator=torch.Generator().manual_seed(1))
        rows = PolicyLossInputs(
            *(getattr(inputs, f)[order] for f in ("log_probs", "old_log_probs", "advantages", "response_mask"))
        )
        chosen = select(rows, row_keys=KEYS[order], **pick_options(select, OPTIONS))
        inputs = replace(inputs, selected=torch.empty_like(chosen).index_copy(0, order, chosen))
    gradients = []
    for size in (14, 1, 3):
        log_probs = inputs.log_probs.clone().requires_grad_()
        for rows in torch.arange(14).split(size):
            micro = PolicyLossInputs(
                log_probs[rows], inputs.old_log_probs[rows], inputs.advantages[rows], inputs.response_mask[rows],
                inputs.rollout_weights[rows], None if inputs.selected is None else inputs.selected[rows],
            )  # fmt: skip
            totals = MiniBatchTotals.count(ragged.mask())
            outputs = loss(micro, **pick_options(loss, OPTIONS))
            aggregate_loss(outputs.losses, micro.response_mask, mode, totals, 6).backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=1e-12)
    assert gradients[0].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_masked_places_change_neither_value_nor_gradient_nor_metrics(name: str, poison: float) -> None:
    results = []
    for dirty in (False, True):
        inputs = ragged_inputs()
        if dirty:
            fields = ("log_probs", "old_log_probs", "advantages", "rollout_weights")
            inputs = replace(inputs, **{f: ragged.poisoned(getattr(inputs, f), poison) for f in fields})
        inputs = replace(inputs, log_probs=inputs.log_probs.requires_grad_())
        outputs = apply(name, inputs)
        outputs.losses.sum().backward()
        results.append((outputs.losses, inputs.log_probs.grad, *outputs.metrics.values()))
    for clean, dirty_result in zip(*results, strict=True):
        assert torch.equal(clean, dirty_result)
        assert not dirty_result[ragged.mask() == 0].any()


@pytest.mark.parametrize("name", NAMES)
def test_only_log_probs_get_a_gradient(name: str) -> None:
    inputs = ragged_inputs()
    fields = ("log_probs", "old_log_probs", "advantages", "rollout_weights")
    inputs = replace(inputs, **{f: getattr(inputs, f).requires_grad_() for f in fields})
    outputs = apply(name, inputs)
    outputs.losses.sum().backward()
    assert inputs.log_probs.grad.any()
    assert inputs.old_log_probs.grad is None and inputs.advantages.grad is None and inputs.rollout_weights.grad is None
    assert not any(metric.requires_grad for metric in outputs.metrics.values())


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("gspo", "cispo")]
)  # these two stop gradients on purpose
def test_gradcheck(name: str) -> None:
    inputs = ragged_inputs()
    selected = ragged.randn(8) > 1

    def loss(log_probs: Tensor) -> Tensor:
        return apply(name, replace(inputs, log_probs=log_probs, selected=selected)).losses

    assert torch.autograd.gradcheck(loss, inputs.log_probs.clone().requires_grad_())


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    log_probs = torch.tensor([[0.1, 0.05, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    inputs = PolicyLossInputs(log_probs, torch.zeros(1, 3), torch.full((1, 3), 2.0, dtype=torch.float64), mask)
    outputs = losses.gspo(inputs, clip_ratio_low=0.2, clip_ratio_high=0.2)
    aggregate_loss(outputs.losses, mask, "seq-mean-token-mean", MiniBatchTotals.count(mask)).backward()
    s = math.exp(0.075)  # d(-2 s) / d log_prob_t = -2 s / 2
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-s, -s, 0]], dtype=torch.float64))


def test_cispo_gradient_is_the_clipped_weight_times_the_advantage() -> None:
    log_probs = torch.tensor([[0.5, -0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    inputs = PolicyLossInputs(log_probs, torch.zeros(1, 3), torch.tensor([[2.0, -1.0, 1.0]]), torch.ones(1, 3))
    losses.cispo(inputs, clip_ratio_low=0.2, clip_ratio_high=0.28).losses.sum().backward()
    # weights clip(e^0.5) = 1.28, clip(e^-0.5) = 0.8, e^0.1: every token learns, clipped or not
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-2.56, 0.8, -math.exp(0.1)]], dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name: str) -> None:
    inputs = replace(ragged_inputs(0.0), rollout_weights=None, advantages=torch.ones(14, 6, dtype=torch.float64))
    inputs = replace(inputs, log_probs=inputs.log_probs.requires_grad_())
    outputs = apply(name, replace(inputs, selected=torch.zeros(14, 6)))
    outputs.losses.sum().backward()
    torch.testing.assert_close(inputs.log_probs.grad, -ragged.mask().double())
    assert not outputs.metrics["ppo_kl"].any()
    assert not outputs.metrics["pg_clipfrac"].any()


@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_stay_finite(name: str) -> None:
    inputs = PolicyLossInputs(
        torch.tensor([[-1.0, -2000.0]], requires_grad=True), torch.tensor([[-2000.0, -1.0]]),
        torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2),
    )  # fmt: skip
    outputs = apply(name, inputs, KEYS[:1])
    outputs.losses.sum().backward()
    assert outputs.losses.isfinite().all()
    assert inputs.log_probs.grad.isfinite().all()


def test_log_ratios_are_cut_at_20() -> None:
    log_probs = torch.tensor([[15.0, 25.0]], dtype=torch.float64)
    inputs = PolicyLossInputs(
        log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), selected=torch.zeros(1, 2)
    )
    assert apply("kl_cov", inputs).losses[0].tolist() == pytest.approx([-math.exp(15), -math.exp(20)])


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_reports_the_same_metrics(name: str) -> None:
    outputs = apply(name, ragged_inputs())
    assert set(outputs.metrics) == {"pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert all(metric.shape == outputs.losses.shape for metric in outputs.metrics.values())


def test_ppo_kl_is_minus_the_mean_log_ratio_of_trained_tokens() -> None:
    mask = torch.tensor([[1, 1, 0]])
    inputs = PolicyLossInputs(
        torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-0.5, -1.0, 5.0]]), torch.ones(1, 3), mask
    )
    metric = apply("vanilla", inputs).metrics["ppo_kl"]
    # log ratios -0.5 and -1: mean 0.75
    assert float(aggregate_loss(metric, mask, "token-mean", MiniBatchTotals.count(mask))) == 0.75


def one_row(ratios: list[float], advantages: list[float]) -> PolicyLossInputs:
    log_probs = torch.tensor([ratios], dtype=torch.float64).log()
    return PolicyLossInputs(
        log_probs,
        torch.zeros_like(log_probs),
        torch.tensor([advantages], dtype=torch.float64),
        torch.ones_like(log_probs),
    )


# verl commit 88db55407 (PR #972)
@pytest.mark.parametrize(
    ("advantage", "ratio", "high", "loss", "clipped", "lower"),
    [
        (-1, 5, 0.2, 3.0, 0, 1),  # max(5, 1.2) = 5, dual clip at 3
        (1, 5, 0.2, -1.2, 1, 0),
        (1, 1, 0.2, -1.0, 0, 0),
        (1, 1.25, 0.28, -1.25, 0, 0),
        (-1, 0.5, 0.2, 0.8, 1, 0),  # max(0.5, 0.8)
    ],
)
def test_vanilla_by_hand(advantage: float, ratio: float, high: float, loss: float, clipped: int, lower: int) -> None:
    outputs = losses.vanilla(one_row([ratio], [advantage]), clip_ratio_low=0.2, clip_ratio_high=high, clip_ratio_c=3)
    assert float(outputs.losses) == pytest.approx(loss, abs=1e-12)
    assert float(outputs.metrics["pg_clipfrac"]) == clipped
    assert float(outputs.metrics["pg_clipfrac_lower"]) == lower


# gspo: s = sqrt(4 * 1) = 2, clipped to 1.28 where A > 0. gpg: -A log 4. kl_cov, nothing selected: -A r.
# geo_mean: A = 0 -> 0, see below. cispo: -1.28 log 4. sapo: -4 sigmoid(3), and (4 / 1.05) / 2 at r = 1.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gspo", [-1.28, 2.0]),
        ("gpg", [-1.386294, 0.0]),
        ("clip_cov", [-1.28, 1.0]),
        ("kl_cov", [-4.0, 1.0]),
        ("geo_mean", [0.0, 0.0]),
        ("cispo", [-1.774457, 0.0]),
        ("sapo", [-3.810297, 1.904762]),
    ],
)
def test_two_tokens_by_hand(name: str, expected: list[float]) -> None:
    inputs = replace(one_row([4, 1], [1, -1]), selected=torch.zeros(1, 2))
    assert apply(name, inputs).losses[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_geo_mean_by_hand() -> None:
    outputs = apply("geo_mean", one_row([math.exp(0.5), math.exp(0.1)], [2, 2]))
    # log ratios min(0.5, 0.28) and 0.1: -2 exp(0.19) on both tokens
    assert outputs.losses[0].tolist() == pytest.approx([-2 * math.exp(0.19)] * 2, abs=1e-12)
    assert outputs.metrics["pg_clipfrac"].tolist() == [[1, 0]]


# Ratios 4, 1/4, 1 with A = 1, -1, 1: the first is held at 1.28, the second at 0.8.
@pytest.mark.parametrize(
    ("name", "clipped", "lower"),
    [
        ("vanilla", [1, 1, 0], [0, 0, 0]),
        ("clip_cov", [1, 1, 1], [0, 0, 0]),  # the third was selected
        ("kl_cov", [0, 0, 0], [0, 0, 0]),
        ("gpg", [0, 0, 0], [0, 0, 0]),
        ("sapo", [0, 0, 0], [0, 0, 0]),
        ("cispo", [1, 1, 0], [0, 1, 0]),
        ("geo_mean", [1, 0, 0], [0, 1, 0]),  # log ratios 1.39 and -1.39 are held at 0.28 and -0.2
    ],
)
def test_clip_fractions_by_hand(name: str, clipped: list[int], lower: list[int]) -> None:
    inputs = replace(one_row([4, 0.25, 1], [1, -1, 1]), selected=torch.tensor([[0, 0, 1]]))
    metrics = apply(name, inputs).metrics
    assert metrics["pg_clipfrac"].tolist() == [clipped]
    assert metrics["pg_clipfrac_lower"].tolist() == [lower]


def test_gspo_clips_all_tokens_of_a_row_by_its_one_ratio() -> None:
    # s = sqrt(4 * 1) = 2 is held at 1.28 where A > 0 only.
    assert apply("gspo", one_row([4, 1], [1, -1])).metrics["pg_clipfrac"].tolist() == [[1, 0]]


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    assert apply("vanilla", one_row([0.1], [1])).losses.tolist() == [[pytest.approx(-0.1)]]


def test_rollout_weights_multiply_the_loss() -> None:
    inputs = replace(one_row([1, 1], [1, 1]), rollout_weights=torch.tensor([[0.5, 2.0]]))
    assert apply("vanilla", inputs).losses.tolist() == [[-0.5, -2.0]]


def places(selected: Tensor) -> set[tuple[int, int]]:
    return {(int(row), int(place)) for row, place in selected.nonzero()}


def test_kl_cov_selects_the_tokens_of_highest_covariance() -> None:
    inputs = ragged_inputs()
    selected = losses.select_kl_cov(inputs, row_keys=KEYS, kl_cov_ratio=0.1)
    assert places(selected) == slow_selection("kl_cov", inputs)
    assert int(selected.sum()) == 3  # floor(0.1 * 39 trained tokens)


def test_clip_cov_draws_the_asked_number_among_the_candidates() -> None:
    inputs = ragged_inputs()
    candidates = slow_selection("clip_cov", inputs)
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    selected = losses.select_clip_cov(inputs, row_keys=KEYS, clip_cov_ratio=0.1, **options)
    assert len(places(selected)) == 3 < len(candidates)
    assert places(selected) < candidates
    everything = losses.select_clip_cov(inputs, row_keys=KEYS, clip_cov_ratio=1.0, **options)
    assert places(everything) == candidates


@pytest.mark.parametrize("select", [losses.select_clip_cov, losses.select_kl_cov])
def test_a_mini_batch_of_few_tokens_has_one_selected(select: Callable[..., Tensor]) -> None:
    """0.0002 of less than 5,000 tokens is less than one: the loss would be another's without a word."""
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
    selected = select(ragged_inputs(), row_keys=KEYS, **pick_options(select, options))  # the default ratio
    assert int(selected.sum()) == 1


# Log-probs -3, -1, -1, -1 (mean -1.5) and advantages a, 0, 0, 0: cov of the first -1.5 (a - a / 4), of the others
# 0.5 (0 - a / 4). With a = -8: 9 and 1; a = -4: 4.5 and 0.5.
@pytest.mark.parametrize(("advantage", "expected"), [(-8.0, {(0, 1), (0, 2), (0, 3)}), (-4.0, {(0, 0)})])
def test_clip_cov_takes_covariances_between_its_bounds_only(advantage: float, expected: set[tuple[int, int]]) -> None:
    log_probs = torch.tensor([[-3.0, -1, -1, -1]])
    inputs = PolicyLossInputs(log_probs, log_probs, torch.tensor([[advantage, 0, 0, 0]]), torch.ones(1, 4))
    selected = losses.select_clip_cov(
        inputs, row_keys=KEYS[:1], clip_ratio_low=0.2, clip_ratio_high=0.2,
        clip_cov_ratio=1.0, clip_cov_lb=0.9, clip_cov_ub=5.0,
    )  # fmt: skip
    assert places(selected) == expected


def test_defaults_of_options_are_those_of_the_docs() -> None:
    defaults = {
        option: parameter.default
        for name in NAMES
        for loss in [resolve(name, POLICY_LOSSES, key="loss_mode")]
        for option, parameter in option_names(loss, *([selector(loss)] if selector(loss) else [])).items()
        if not option.startswith("clip_ratio") and option != "row_keys"
    }
    assert defaults == {
        "clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0,
        "tau_pos": 1.0, "tau_neg": 1.05,
    }  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    said = dict(re.findall(r"`(\w+)` \(([\d.]+)\)", text))
    assert {option: float(said[option]) for option in defaults} == defaults


def test_clip_cov_draws_other_tokens_with_another_seed() -> None:
    ids = torch.arange(14)[:, None]
    drawn = {
        frozenset(places(losses.select_clip_cov(ragged_inputs(), row_keys=row_keys(ids, seed=seed), **{
            k: v for k, v in OPTIONS.items() if k.startswith("clip_") and k != "clip_ratio_c"
        })))
        for seed in range(20)
    }  # fmt: skip
    assert len(drawn) > 10


def test_row_keys_tell_rows_apart_and_follow_them() -> None:
    ids = torch.tensor([[1, 2, 3], [3, 2, 1], [1, 2, 4], [0, 0, 0], [1, 2, 3]])
    keys = row_keys(ids).tolist()
    assert len(set(keys)) == 4 and keys[0] == keys[4]
    assert row_keys(ids.flip(0)).tolist() == keys[::-1]


def test_draw_is_uniform_over_rows_and_places() -> None:
    ids = torch.randint(0, 50_000, (200, 12), generator=torch.Generator().manual_seed(0))
    draw = losses._mix(row_keys(ids)[:, None] + torch.arange(10)).double() / 2**63
    # uniform on -1..1: mean 0 and variance 1/3, to 4 standard errors of 2,000 values
    assert abs(float(draw.mean())) < 4 * math.sqrt(1 / 3 / 2000)
    assert abs(float(draw.var()) - 1 / 3) < 4 * math.sqrt(4 / 45 / 2000)
    assert len(draw.unique()) == 2000


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_that_selects_refuses_to_run_without_selection(name: str) -> None:
    loss = resolve(name, POLICY_LOSSES, key="loss_mode")
    with pytest.raises(AssertionError, match="chooses tokens over the whole mini-batch"):
        loss(ragged_inputs(), **pick_options(loss, OPTIONS))


def test_options_of_the_config_reach_the_loss_or_its_selection() -> None:
    names = {
        name: set(option_names(loss, *([selector(loss)] if selector(loss) else [])))
        for name in NAMES
        for loss in [resolve(name, POLICY_LOSSES, key="loss_mode")]
    }
    assert {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"} <= names["clip_cov"]
    assert {"kl_cov_ratio", "ppo_kl_coef"} <= names["kl_cov"]
    assert {"tau_pos", "tau_neg"} == names["sapo"]
