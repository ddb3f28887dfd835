from __future__ import annotations

import pytest
import ragged
import torch
from torch import Tensor

from verl_lite.algorithms import LOSS_AGGREGATIONS
from verl_lite.algorithms.aggregate import (
    MiniBatchTotals,
    aggregate_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)

MODES = list(LOSS_AGGREGATIONS)


def whole(losses: Tensor, mask: Tensor, mode: str, scale_factor: float | None = None) -> float:
    return float(aggregate_loss(losses.detach(), mask, mode, MiniBatchTotals.count(mask), scale_factor))


def slow_loss(losses: Tensor, mask: Tensor, mode: str, scale_factor: float) -> float:
    rows = [[float(x) for x, m in zip(lr, mr, strict=True) if m] for lr, mr in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = {
        "seq-mean-token-sum": [sum(row) for row in rows],
        "seq-mean-token-mean": [sum(row) / len(row) for row in rows],
        "seq-mean-token-sum-norm": [sum(row) / scale_factor for row in rows],
    }[mode]
    return sum(per_row) / len(rows)


# verl commits 4d722b176 (PR #931) and 3e3d9372a (PR #945): the modes by hand.
# Row sums 3 and 2, row means 1 and 2: 5/4; (3+2)/2; (1+2)/2; (3+2)/2/4.
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.25),
        ("seq-mean-token-sum", 2.5),
        ("seq-mean-token-mean", 1.5),
        ("seq-mean-token-sum-norm", 0.625),
    ],
)
def test_each_mode_has_its_own_denominator(mode: str, expected: float) -> None:
    losses = torch.tensor([[1.0, 1, 1, 9], [2, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert whole(losses, mask, mode, scale_factor=4) == expected


# verl-project/verl#5625, #906, NVIDIA-NeMo/RL#212; prime-rl commit 1d9ca9255, OpenRLHF commit 9673a87c
def test_token_mean_of_rows_cut_apart_is_not_the_mean_of_their_means() -> None:
    losses, mask = torch.tensor([[4.0, 0, 0], [0, 0, 0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    totals = MiniBatchTotals.count(mask)
    shares = [aggregate_loss(losses[i : i + 1], mask[i : i + 1], "token-mean", totals) for i in (0, 1)]
    assert float(sum(shares)) == 1.0  # 4 / 4; the mean of the means 4 and 0 would be 2


@pytest.mark.parametrize("mode", MODES)
def test_ragged_batch_against_a_loop(mode: str) -> None:
    losses, mask = ragged.randn(0), ragged.mask()
    assert whole(losses, mask, mode, 6) == pytest.approx(slow_loss(losses, mask, mode, 6), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 3, 5, 14])
def test_shares_add_up_to_the_whole_however_the_rows_are_cut(mode: str, size: int) -> None:
    losses, mask = ragged.randn(0), ragged.mask()
    totals = MiniBatchTotals.count(mask)
    cuts = zip(losses.split(size), mask.split(size), strict=True)
    shares = sum(float(aggregate_loss(x, m, mode, totals, 6)) for x, m in cuts)
    assert shares == pytest.approx(whole(losses, mask, mode, 6), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_nan_at_masked_places_reaches_neither_loss_nor_gradient(mode: str) -> None:
    clean = ragged.randn(0).requires_grad_()
    dirty = ragged.poisoned(ragged.randn(0)).requires_grad_()
    for losses in (clean, dirty):
        aggregate_loss(losses, ragged.mask(), mode, MiniBatchTotals.count(ragged.mask()), 6).backward()
    assert whole(dirty, ragged.mask(), mode, 6) == whole(clean, ragged.mask(), mode, 6)
    assert torch.equal(dirty.grad, clean.grad)
    assert not dirty.grad[ragged.mask() == 0].any()


@pytest.mark.parametrize("mode", MODES)
def test_fully_masked_rows_count_nowhere(mode: str) -> None:
    some = ragged.mask().any(-1)
    expected = whole(ragged.randn(0)[some], ragged.mask()[some], mode, 6)
    assert whole(ragged.randn(0), ragged.mask(), mode, 6) == pytest.approx(expected, abs=1e-12)


def test_totals_count_loss_tokens_and_rows_that_have_one() -> None:
    assert MiniBatchTotals.count(torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]])) == MiniBatchTotals(3, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_share_without_loss_tokens_is_zero_and_keeps_the_graph(mode: str) -> None:
    losses = torch.full((2, 3), torch.nan, requires_grad=True)
    aggregate_loss(losses, torch.zeros(2, 3), mode, MiniBatchTotals(0, 0), 6).backward()
    assert torch.equal(losses.grad, torch.zeros(2, 3))


def test_sum_norm_without_a_scale_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="loss_scale_factor > 0.*data.max_response_length"):
        whole(torch.ones(1, 2), torch.ones(1, 2), "seq-mean-token-sum-norm")


def test_unknown_mode_answers_with_near_names() -> None:
    with pytest.raises(ValueError, match="loss_agg_mode=token_mean is unknown.*nearest: token-mean"):
        whole(torch.ones(1, 2), torch.ones(1, 2), "token_mean")


# verl commit 4e9586a3a (PR #1527), huggingface/trl#7024
@pytest.mark.parametrize("padding", [0, 50])
def test_whitening_ignores_padding(padding: int) -> None:
    values = torch.tensor([[1.0, 3, 0, 0] + [0.0] * padding])
    whitened = masked_whiten(values, torch.tensor([[1, 1, 0, 0] + [0] * padding]))
    # mean 2, sample variance 2: -1 / sqrt(2), 1 / sqrt(2)
    assert torch.allclose(whitened, torch.tensor([[-0.70711, 0.70711, 0, 0] + [0.0] * padding]), atol=1e-5)


# alibaba/ROLL#475
@pytest.mark.parametrize("mask", [[[1, 0]], [[0, 0]]])
def test_whitening_one_or_no_value_gives_zero(mask: list[list[int]]) -> None:
    assert torch.equal(masked_whiten(torch.tensor([[0.7, torch.nan]]), torch.tensor(mask)), torch.zeros(1, 2))


def test_statistics_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2, torch.nan], [6, torch.nan, torch.nan]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(masked_sum(values, mask)) == 9
    assert masked_sum(values, mask, -1).tolist() == [3, 6]
    assert masked_mean(values, mask, -1).tolist() == [1.5, 6]
    assert float(masked_mean(values, mask)) == 3
    assert float(masked_var(values, mask)) == 7  # (4 + 1 + 9) / 2
    assert float(masked_mean(values, torch.zeros(2, 3))) == 0
