"""The driver's numbers, worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite.protocol import DataProto
from verl_lite.trainer.metrics import (
    compute_data_metrics,
    compute_memory_metrics,
    compute_mfu,
    compute_seqlen_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    expected_best,
    majority_value,
    training_flops,
    validation_metrics,
)


def two_rows() -> DataProto:
    """Prompts of 1 and 2 tokens (width 2), responses of 3 and 1 tokens (width 3)."""
    return DataProto.from_dict(
        {
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[-0.25, 0.0, 1.0], [0.5, 0.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 1.0, 1.0], [-1.0, 9.0, 9.0]]),
            "returns": torch.tensor([[1.0, 1.0, 1.0], [5.0, float("nan"), 9.0]]),
            "values": torch.tensor([[1.0, 1.0, 1.0], [3.0, 9.0, 9.0]]),
        }
    )


def test_data_metrics_speak_of_real_tokens_only() -> None:
    metrics = compute_data_metrics(two_rows(), max_prompt_length=2, max_response_length=4)
    # values - returns = 0, 0, 0, -2 has variance 0.75; returns 1, 1, 1, 5 have mean 2 and variance (3·1 + 9)/4 = 3
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.75, "critic/score/max": 1.0, "critic/score/min": 0.5,
            "critic/rewards/mean": 0.625, "critic/rewards/max": 0.75, "critic/rewards/min": 0.5,
            "critic/advantages/mean": 0.5, "critic/advantages/max": 1.0, "critic/advantages/min": -1.0,
            "critic/returns/mean": 2.0, "critic/returns/max": 5.0, "critic/returns/min": 1.0,
            "critic/values/mean": 1.5, "critic/values/max": 3.0, "critic/values/min": 1.0,
            "critic/vf_explained_var": 1 - 0.75 / 3,
            "prompt_length/mean": 1.5, "prompt_length/max": 2.0, "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 0.5,
            "response_length/mean": 2.0, "response_length/max": 3.0, "response_length/min": 1.0,
            "response_length/clip_ratio": 0.0,
        }
    )  # fmt: skip


def test_clip_ratio_compares_with_the_configured_maximum_not_with_the_longest() -> None:
    metrics = compute_data_metrics(two_rows(), max_prompt_length=8, max_response_length=3)
    assert metrics["prompt_length/clip_ratio"] == 0.0 and metrics["response_length/clip_ratio"] == 0.5


def test_rows_that_take_no_part_have_a_length_but_no_score() -> None:
    batch = two_rows().batch.clone()
    batch["response_mask"][1] = 0
    metrics = compute_data_metrics(DataProto(batch), max_prompt_length=2, max_response_length=4)
    assert metrics["critic/score/mean"] == 1.0 and metrics["critic/advantages/min"] == 1.0
    assert metrics["response_length/mean"] == 2.0
    assert "critic/vf_explained_var" not in metrics  # the returns left do not vary: nothing to explain


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_empty_responses_give_finite_or_no_numbers(rows: int) -> None:
    batch = DataProto.from_dict(
        {
            "attention_mask": torch.tensor([[0, 1, 0]] * rows, dtype=torch.int64).view(rows, 3),
            "response_mask": torch.zeros(rows, 1, dtype=torch.int64),
            **{key: torch.zeros(rows, 1) for key in ("token_level_scores", "advantages", "returns", "values")},
        }
    )
    metrics = compute_data_metrics(batch, max_prompt_length=2, max_response_length=4)
    metrics |= compute_timing_metrics({"gen": 1.0, "adv": 1.0}, batch)
    metrics |= compute_throughput_metrics(batch, step_s=0.0, num_slots=1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert "timing_per_token_ms/gen" not in metrics and "critic/score/mean" not in metrics


def test_columns_that_are_not_there_have_no_metrics() -> None:
    batch = two_rows().select(["attention_mask", "response_mask", "token_level_scores"])
    metrics = compute_data_metrics(batch, max_prompt_length=2, max_response_length=4)
    assert {key.rsplit("/", 1)[0] for key in metrics} == {"critic/score", "prompt_length", "response_length"}


def test_timings_are_given_per_response_token_for_gen_and_per_token_else() -> None:
    metrics = compute_timing_metrics({"step": 10.0, "gen": 2.0, "update_actor": 3.5}, two_rows())
    # 4 response tokens, 7 tokens in all
    assert metrics == {
        "timing_s/step": 10.0,
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 3.5,
        "timing_per_token_ms/gen": 500.0,
        "timing_per_token_ms/update_actor": 500.0,
    }


def test_throughput_is_tokens_per_second_and_slot() -> None:
    assert compute_throughput_metrics(two_rows(), step_s=0.5, num_slots=7) == {
        "perf/total_num_tokens": 7.0,
        "perf/time_per_step": 0.5,
        "perf/throughput": 2.0,  # 7 tokens / (0.5 s · 7 slots)
    }


def test_seqlen_metrics_compare_the_order_of_arrival_with_the_deal() -> None:
    assert compute_seqlen_metrics([9, 1, 2, 8], [[0, 1], [2, 3]]) == compute_seqlen_metrics(
        [9, 1, 2, 8], [[1, 0], [3, 2]]
    )
    assert compute_seqlen_metrics([9, 8, 2, 1], [[0, 3], [1, 2]]) == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 17.0,
        "global_seqlen/minmax_diff": 14.0,
        "global_seqlen/balanced_min": 10.0,
        "global_seqlen/balanced_max": 10.0,
        "global_seqlen/mean": 10.0,
    }


def test_used_memory_is_between_nothing_and_a_lot() -> None:
    used = compute_memory_metrics().get("perf/cpu_memory_used_gb", 1.0)
    assert 0.01 < used < 100_000


# --- model FLOPs ----------------------------------------------------------------------------------------------------

TINY = {
    "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 8, "vocab_size": 10,
}  # fmt: skip


def test_training_flops_of_a_model_counted_by_hand() -> None:
    # per layer: q 4·4, k and v 2·(4·2), o 4·4 = 48, MLP 3·4·8 = 96; two layers 288, head 10·4 = 40: 328 parameters
    # rows of 3 and 1 tokens: 6·328·4 = 7872; attention 6·2 layers·2 heads·2·(9 + 1) = 480
    assert training_flops(TINY, [3, 1]) == 7872 + 480


def test_mfu_is_the_share_of_the_peak() -> None:
    arguments: dict[str, Any] = {"passes": 2, "seconds": 0.5, "num_gpus": 4}
    mfu = compute_mfu(TINY, [3, 1], device_name="NVIDIA H100 80GB HBM3", **arguments)
    assert mfu == {"perf/mfu/actor": pytest.approx(8352 * 2 / (0.5 * 4 * 989e12))}
    assert compute_mfu(TINY, [3], device_name="NVIDIA H20", **arguments)["perf/mfu/actor"] > 0
    assert compute_mfu(TINY, [3, 1], device_name="cpu", **arguments) == {}
    assert compute_mfu({**TINY, "num_experts_per_tok": 2}, [3, 1], device_name="NVIDIA H100", **arguments) == {}


# --- validation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    uid: str
    score: float | None
    data_source: str = "gsm8k"
    extra: dict[str, Any] = field(default_factory=dict)


def test_one_answer_per_prompt_gives_mean_at_1_only() -> None:
    assert validation_metrics([Answer("a", 1.0), Answer("b", 0.0)]) == {"val-core/gsm8k/reward/mean@1": 0.5}


def test_two_answers_per_prompt_give_exact_best_and_worst() -> None:
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    metrics = validation_metrics([Answer("a", 1.0), Answer("a", 0.0), Answer("b", 0.0), Answer("b", 0.0)])
    assert metrics == {
        "val-core/gsm8k/reward/mean@2": 0.25,
        "val-core/gsm8k/reward/best@2/mean": 0.5,  # exact pass@2; drawing with replacement would give about 0.375
        "val-aux/gsm8k/reward/std@2": 0.25,  # 0.5 and 0
        "val-aux/gsm8k/reward/worst@2/mean": 0.0,
    }
    assert state == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_acc_is_the_core_variable_where_the_reward_function_returns_it() -> None:
    answers = [
        Answer("a", -1.0, extra={"acc": False, "pred": "7", "note": "text"}),
        Answer("b", 1.0, extra={"acc": True, "pred": "8", "note": "text"}),
        Answer("c", 0.5, data_source="math"),
    ]
    assert validation_metrics(answers) == {
        "val-core/gsm8k/acc/mean@1": 0.5,
        "val-aux/gsm8k/reward/mean@1": 0.0,
        "val-core/math/reward/mean@1": 0.5,
    }


def test_smaller_numbers_of_draws_are_auxiliary() -> None:
    metrics = validation_metrics(
        [Answer("a", score, extra={"pred": str(score)}) for score in (0.0, 0.0, 0.0, 0.0, 1.0)]
    )
    assert metrics["val-aux/gsm8k/reward/best@2/mean"] == pytest.approx(2 / 5)  # 4 of the 10 pairs hold the 1
    assert metrics["val-aux/gsm8k/reward/best@4/mean"] == pytest.approx(4 / 5)
    assert metrics["val-core/gsm8k/reward/best@5/mean"] == 1.0
    assert metrics["val-core/gsm8k/reward/maj@5/mean"] == 0.0


def test_answers_without_a_score_count_nowhere() -> None:
    answers = [Answer("a", 1.0), Answer("a", None, extra={"acc": 1.0}), Answer("b", None), Answer("b", None)]
    metrics = validation_metrics([*answers, Answer("c", None, data_source="math")])
    assert metrics["val-core/gsm8k/reward/mean@2"] == 1.0
    assert not any(key.startswith(("val-core/math", "val-aux/math")) for key in metrics)
    assert validation_metrics([]) == {}


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_expected_best_is_the_mean_over_all_choices(n: int) -> None:
    values = [0.5, -1.0, 2.0, 2.0, 0.0]
    choices = [max(choice) for choice in itertools.combinations(values, n)]
    assert expected_best(values, n) == pytest.approx(sum(choices) / len(choices))


def test_expected_best_of_many_answers_is_finite() -> None:
    assert expected_best([1.0] + [0.0] * 2047, 1024) == pytest.approx(0.5)
    assert expected_best([1.0, 3.0], 4) == 3.0


def test_a_majority_needs_no_coin() -> None:
    assert majority_value([1.0, 0.0, 1.0], ["72", "71", "72"]) == 1.0
    assert majority_value([1.0, 0.0, 0.0], ["72", "71", "71"]) == 0.0
    assert majority_value([1.0, 0.0], ["72", "71"]) == 0.5  # a tie: either wins half of the time
