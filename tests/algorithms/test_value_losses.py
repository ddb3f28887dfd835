from __future__ import annotations

import pytest
import ragged
import torch

from verl_lite.algorithms.value_losses import ValueLossInputs, clipped


def one_token(value: float, old: float, ret: float) -> ValueLossInputs:
    return ValueLossInputs(torch.tensor([[value]]), torch.tensor([[old]]), torch.tensor([[ret]]), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("value", "old", "ret", "loss", "is_clipped"),
    [
        (1.0, 1.0, 2.0, 0.5, 0),  # (1 - 2)^2 / 2
        (2.0, 1.0, 2.0, 0.125, 1),  # free 0; held at 1.5: (1.5 - 2)^2 / 2
        (0.0, 1.0, 2.0, 2.0, 0),  # free (0 - 2)^2 / 2 is larger than (0.5 - 2)^2 / 2
    ],
)
def test_clipped_by_hand(value: float, old: float, ret: float, loss: float, is_clipped: int) -> None:
    outputs = clipped(one_token(value, old, ret), cliprange_value=0.5)
    assert float(outputs.losses) == loss
    assert float(outputs.metrics["vf_clipfrac"]) == is_clipped
    assert float(outputs.metrics["vpred_mean"]) == value


def test_ragged_batch_against_a_loop() -> None:
    inputs = ValueLossInputs(ragged.randn(0), ragged.randn(1), ragged.randn(2), ragged.mask())
    expected = torch.zeros_like(inputs.values)
    for row, places in enumerate(ragged.trained()):
        for place in places:
            v, old, ret = (float(x[row, place]) for x in (inputs.values, inputs.old_values, inputs.returns))
            expected[row, place] = max((v - ret) ** 2, (min(max(v, old - 0.5), old + 0.5) - ret) ** 2) / 2
    got = clipped(inputs, cliprange_value=0.5).losses
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_nan_at_masked_places_reaches_neither_value_nor_gradient() -> None:
    gradients = []
    for dirty in (False, True):
        values, old, ret = (ragged.poisoned(ragged.randn(i)) if dirty else ragged.randn(i) for i in (0, 1, 2))
        values.requires_grad_()
        outputs = clipped(ValueLossInputs(values, old, ret, ragged.mask()), cliprange_value=0.5)
        outputs.losses.sum().backward()
        gradients.append((outputs.losses, values.grad, *outputs.metrics.values()))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*gradients, strict=True))
    assert not gradients[1][1][ragged.mask() == 0].any()


def test_gradcheck_and_only_values_get_a_gradient() -> None:
    values, old, ret = (ragged.randn(i).requires_grad_() for i in (0, 1, 2))
    assert torch.autograd.gradcheck(
        lambda v: (
            clipped(ValueLossInputs(v, ragged.randn(1), ragged.randn(2), ragged.mask()), cliprange_value=0.5).losses
        ),
        values,
    )
    outputs = clipped(ValueLossInputs(values, old, ret, ragged.mask()), cliprange_value=0.5)
    outputs.losses.sum().backward()
    assert values.grad.any() and old.grad is None and ret.grad is None
    assert not any(metric.requires_grad for metric in outputs.metrics.values())
