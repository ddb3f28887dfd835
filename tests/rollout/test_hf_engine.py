from __future__ import annotations

import math

import pytest
import torch

from verl_lite.rollout.engine import SamplingOptions
from verl_lite.rollout.hf_engine import keep_likeliest, sample

PROBABILITIES = [0.1, 0.5, 0.15, 0.25]
LOGITS = torch.tensor([PROBABILITIES]).log()
NEVER = -math.inf


def kept(top_k: int, top_p: float) -> list[bool]:
    return (keep_likeliest(LOGITS, top_k, top_p)[0] > NEVER).tolist()


def test_top_k_keeps_the_k_likeliest() -> None:
    assert kept(2, 1.0) == [False, True, False, True]
    assert kept(-1, 1.0) == [True] * 4


def test_top_p_keeps_the_likeliest_until_their_mass_reaches_p() -> None:
    assert kept(-1, 0.6) == [False, True, False, True]  # 0.5 < 0.6 <= 0.5 + 0.25
    assert kept(-1, 0.4) == [False, True, False, False]  # 0.4 <= 0.5
    assert kept(-1, 1e-9) == [False, True, False, False]  # never none


def test_top_p_counts_the_mass_after_top_k() -> None:
    # Of 0.5 and 0.25 alone the first has 2/3 of the mass.
    assert kept(2, 0.6) == [False, True, False, False]


def test_log_probs_are_renormalised_over_what_is_kept() -> None:
    _, log_probs = sample(LOGITS, SamplingOptions(top_k=1), [None])
    assert log_probs.item() == pytest.approx(0.0, abs=1e-6)


def test_samples_follow_the_distribution() -> None:
    # 20,000 draws: standard error of a frequency at most sqrt(0.25 / 20000) = 0.0035.
    rows = LOGITS.expand(20_000, -1)
    generators = [torch.Generator().manual_seed(i * 31) for i in range(20_000)]
    chosen, _ = sample(rows, SamplingOptions(), generators)
    frequencies = torch.bincount(chosen, minlength=4) / 20_000
    assert frequencies.tolist() == pytest.approx(PROBABILITIES, abs=0.015)


def test_temperature_divides_the_logits() -> None:
    # Temperature 0.5 squares the probabilities: 0.25 / (0.01 + 0.25 + 0.0225 + 0.0625) = 0.72464.
    _, log_probs = sample(LOGITS, SamplingOptions(temperature=0.5, top_k=-1), [torch.Generator().manual_seed(3)])
    assert round(math.exp(log_probs.item()), 5) in (0.72464, 0.18116, 0.06522, 0.02899)
