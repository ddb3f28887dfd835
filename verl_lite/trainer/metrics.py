"""What the driver reports of a step: pure functions from a batch and timings to named numbers.

Padding counts nowhere. Scores and rewards speak of the rows that take part in the update (at least one token under
`response_mask`), lengths of all rows. A number that nothing speaks of is left out, never NaN.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING, Any

import psutil
import torch

from verl_lite.protocol import DataProto

if TYPE_CHECKING:
    from verl_lite.trainer.samples import Sample


def compute_data_metrics(batch: DataProto, *, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """critic/{score, rewards, advantages, returns, values}/…, critic/vf_explained_var, {response, prompt}_length/….

    Score and rewards are sums over a row's tokens; advantages, returns and values are per token. clip_ratio is the
    share of rows whose length reaches the configured maximum. vf_explained_var is 1 - var(returns - values) /
    var(returns) over tokens: 1 for a perfect critic, 0 for one as good as a constant.
    """
    columns = dict(batch.batch.items())
    mask = columns["response_mask"].bool()
    taking_part = mask.any(-1)
    metrics: dict[str, float] = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if key in columns:
            metrics |= _summary(f"critic/{name}", columns[key].float().sum(-1)[taking_part])
    tokens = {key: columns[key][mask].float() for key in ("advantages", "returns", "values") if key in columns}
    for key, values in tokens.items():
        metrics |= _summary(f"critic/{key}", values)
    if "values" in tokens and "returns" in tokens:
        variance = tokens["returns"].var(correction=0) if tokens["returns"].numel() else torch.zeros(())
        if variance > 0:
            left = (tokens["returns"] - tokens["values"]).var(correction=0)
            metrics["critic/vf_explained_var"] = float(1 - left / variance)
    for name, lengths, limit in zip(
        ("prompt_length", "response_length"),
        _lengths(columns["attention_mask"], mask.shape[1]),
        (max_prompt_length, max_response_length),
        strict=True,
    ):
        metrics |= _summary(name, lengths)
        if lengths.numel():
            metrics[f"{name}/clip_ratio"] = float((lengths >= limit).float().mean())
    return metrics


def compute_timing_metrics(timing_s: Mapping[str, float], batch: DataProto) -> dict[str, float]:
    """timing_s/{phase}, and timing_per_token_ms/{phase}: of response tokens for gen, of all tokens for the others."""
    prompts, responses = _lengths(batch.batch["attention_mask"], batch.batch["response_mask"].shape[1])
    all_tokens, response_tokens = float(prompts.sum() + responses.sum()), float(responses.sum())
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in timing_s.items()}
    for phase in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        tokens = response_tokens if phase == "gen" else all_tokens
        if phase in timing_s and tokens:
            metrics[f"timing_per_token_ms/{phase}"] = timing_s[phase] * 1000 / tokens
    return metrics


def compute_throughput_metrics(batch: DataProto, *, step_s: float, num_slots: int) -> dict[str, float]:
    """perf/{total_num_tokens, time_per_step, throughput}; throughput in tokens per second and slot."""
    tokens = float(batch.batch["attention_mask"].sum())
    metrics = {"perf/total_num_tokens": tokens, "perf/time_per_step": step_s}
    return metrics | ({"perf/throughput": tokens / (step_s * num_slots)} if step_s > 0 else {})


def compute_seqlen_metrics(lengths: Sequence[int], rank_rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """global_seqlen/…: tokens per rank, of the `lengths` [B] of the rows.

    min, max and minmax_diff: had the rows been dealt in order; balanced_min and balanced_max: as they were dealt,
    `rank_rows[rank]` being that rank's rows; mean is the same for both.
    """
    num_ranks = len(rank_rows)
    cuts = [len(lengths) * rank // num_ranks for rank in range(num_ranks + 1)]
    in_order = [sum(lengths[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    dealt = [sum(lengths[row] for row in rows) for rows in rank_rows]
    return {
        "global_seqlen/min": float(min(in_order)),
        "global_seqlen/max": float(max(in_order)),
        "global_seqlen/minmax_diff": float(max(in_order) - min(in_order)),
        "global_seqlen/balanced_min": float(min(dealt)),
        "global_seqlen/balanced_max": float(max(dealt)),
        "global_seqlen/mean": sum(lengths) / num_ranks,
    }


def compute_memory_metrics() -> dict[str, float]:
    """perf/cpu_memory_used_gb: GiB of the driver's machine that are not available."""
    memory = psutil.virtual_memory()
    return {"perf/cpu_memory_used_gb": (memory.total - memory.available) / 2**30}


# Dense bfloat16 FLOP/s without sparsity, from NVIDIA's data sheets; matched against the device's name in this order.
PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100": 989e12, "H800": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "4090": 165e12,
}  # fmt: skip


def compute_mfu(
    model: Mapping[str, Any], lengths: Iterable[int], *, passes: int, seconds: float, num_gpus: int, device_name: str
) -> dict[str, float]:
    """perf/mfu/actor: the update's model FLOP/s over the GPUs' peak; recomputation does not count as work.

    Left out where it would be a guess: on CPU, on a GPU that PEAK_FLOPS does not know, and for a mixture of experts.

    Args:
        model: the fields of the model's Hugging Face config.
        lengths: tokens of each row (prompt and response).
        passes: how often each row was trained on (`ppo_epochs`).
        device_name: as torch.cuda.get_device_name says.
    """
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
    if peak is None or seconds <= 0 or "num_experts_per_tok" in model or "intermediate_size" not in model:
        return {}
    return {"perf/mfu/actor": training_flops(model, lengths) * passes / (seconds * num_gpus * peak)}


def training_flops(model: Mapping[str, Any], lengths: Iterable[int]) -> float:
    """FLOPs of forward and backward of a dense decoder with a gated MLP.

    6 per parameter that multiplies and token, and 6 · layers · heads · head_dim · length² for causal attention (Kaplan
    et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361; half of the square is masked).
    """
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    key_value_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or hidden // heads
    per_layer = 2 * hidden * (heads + key_value_heads) * head_dim + 3 * hidden * model["intermediate_size"]
    parameters = layers * per_layer + model["vocab_size"] * hidden
    rows = list(lengths)
    return float(6 * parameters * sum(rows) + 6 * layers * heads * head_dim * sum(length**2 for length in rows))


def validation_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """val-core/{source}/{acc|reward}/{mean@N, best@N/mean, maj@N/mean}, and all the rest under val-aux/.

    N is the largest number of answers to one prompt of the source. Each number is a mean over the source's prompts of:

    - mean@N, std@N: mean and population standard deviation of the prompt's answers;
    - best@n/mean, worst@n/mean for n = 2, 4, 8, … and N: the exact expectation of the best (worst) of n answers drawn
      *without* replacement. For 0/1 scores best@n is the unbiased pass@n of Chen et al. 2021, equation 1
      (https://arxiv.org/abs/2107.03374); verl draws with replacement, which is lower (scores 1, 0: best@2 is 1, verl's
      about 0.75), and reports the spread of its draws, which an exact value does not have;
    - maj@N/mean: value of the most frequent `pred` (mean over its answers; over tied preds the mean of their values).

    With one answer per prompt there is mean@1 only. No random number is drawn. `acc` is the core variable of a source
    whose reward function returns it, else the score, as `reward`. A prompt with fewer answers uses those it has.
    """
    by_source: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_source[sample.data_source][sample.uid].append(sample)
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        num_answers = max(len(answers) for answers in prompts.values())
        scored = [[a for a in answers if a.score is not None] for answers in prompts.values()]
        names = dict.fromkeys(name for answers in scored for a in answers for name in _numbers(a))
        core = "acc" if "acc" in names else "reward"
        for name in names:
            having = [[a for a in answers if name in _numbers(a)] for answers in scored]
            for statistic, value in _prompt_statistics(name, [h for h in having if h], num_answers).items():
                in_core = name == core and statistic in {
                    f"mean@{num_answers}", f"best@{num_answers}/mean", f"maj@{num_answers}/mean"
                }  # fmt: skip
                metrics[f"val-{'core' if in_core else 'aux'}/{source}/{name}/{statistic}"] = value
    return metrics


def _numbers(sample: Sample) -> dict[str, float]:
    extra = {name: float(value) for name, value in sample.extra.items() if isinstance(value, bool | int | float)}
    return extra if sample.score is None else {**extra, "reward": sample.score}


def _prompt_statistics(name: str, prompts: Sequence[Sequence[Sample]], num_answers: int) -> dict[str, float]:
    """Means over `prompts`, each the answers of one that have the variable `name`."""
    collected: dict[str, list[float]] = defaultdict(list)
    for answers in prompts:
        values = [_numbers(answer)[name] for answer in answers]
        mean = sum(values) / len(values)
        collected[f"mean@{num_answers}"].append(mean)
        if num_answers == 1:
            continue
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        collected[f"std@{num_answers}"].append(variance**0.5)
        for n in sorted({2**k for k in range(1, num_answers.bit_length())} | {num_answers}):
            collected[f"best@{n}/mean"].append(expected_best(values, n))
            collected[f"worst@{n}/mean"].append(-expected_best([-value for value in values], n))
        if all(answer.extra.get("pred") is not None for answer in answers):
            predictions = [str(answer.extra["pred"]) for answer in answers]
            collected[f"maj@{num_answers}/mean"].append(majority_value(values, predictions))
    return {statistic: sum(values) / len(values) for statistic, values in collected.items()}


def expected_best(values: Sequence[float], n: int) -> float:
    """E[max of n of the values drawn without replacement] = sum_i x_(i) C(i-1, n-1) / C(N, n), x_(1) ≤ … ≤ x_(N).

    With fewer than n values: the largest.
    """
    n = min(n, len(values))
    # x_(i) is the largest of a draw when the other n - 1 come from the i - 1 below it.
    draws = comb(len(values), n)
    return sum(value * (comb(i, n - 1) / draws) for i, value in enumerate(sorted(values)))


def majority_value(values: Sequence[float], predictions: Sequence[str]) -> float:
    """The mean value of the answers whose prediction is the most frequent; of tied predictions the mean."""
    counts = Counter(predictions)
    most = max(counts.values())
    winning = [v for v, prediction in zip(values, predictions, strict=True) if counts[prediction] == most]
    return sum(winning) / len(winning)  # tied predictions have equally many answers


def _lengths(attention_mask: torch.Tensor, response_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each row's prompt and of its response: two [B] tensors."""
    prompt_width = attention_mask.shape[1] - response_width
    return attention_mask[:, :prompt_width].sum(-1), attention_mask[:, prompt_width:].sum(-1)


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
