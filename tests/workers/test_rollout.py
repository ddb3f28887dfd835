from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny import CHARACTERS

from verl_lite.config import EngineKwargs, PolicyModelConfig, RolloutConfig, ValKwargs
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.rollout.engine import Completion
from verl_lite.workers.rollout import RolloutWorker, build_batch, join_batches, request_seed, sampling_options


def prompts(*prompt_ids: list[int], epoch: int = 0) -> DataProto:
    ids = np.empty(len(prompt_ids), dtype=object)
    ids[:] = prompt_ids
    uids = [f"{epoch}-{i}" for i in range(len(prompt_ids))]
    return DataProto.from_dict(non_tensors={"uid": uids, "prompt_ids": ids, "ground_truth": uids})


def rollout_config(**changes: Any) -> RolloutConfig:
    values: dict[str, Any] = dict(
        name="hf", n=3, dtype="float32", enforce_eager=True, max_model_len=40, seed=0,
        log_prob_use_dynamic_bsz=False, log_prob_max_token_len_per_gpu=1000, num_replicas=1, n_gpus_per_node=1,
        engine_kwargs=EngineKwargs(), val_kwargs=ValKwargs(),
    )  # fmt: skip
    return RolloutConfig(**values | changes)


def worker(model_path: str, rank: int = 0, **changes: Any) -> RolloutWorker:
    return RolloutWorker(
        RankContext(rank, 2),
        rollout=rollout_config(**changes),
        model=PolicyModelConfig(path=model_path),
        max_response_length=16,
        vocab_size=len(CHARACTERS) + 2,
        eos_token_ids=[1],
        pad_token_id=0,
        start_timeout_s=60,
        step_timeout_s=60,
    )


def completion(*token_ids: int, reason: str = "stop") -> Completion:
    return Completion(list(token_ids), [-0.5] * len(token_ids), reason)


def test_batch_is_padded_left_and_right_and_masked_by_length() -> None:
    # Pad and end token are both 0; 0 also occurs inside a prompt: only lengths tell padding from text.
    batch = build_batch(
        prompts([5, 0, 6], [7]),
        [[completion(5, 6, 0)], [completion(5, 6, 7, 8, 9, reason="length")]],
        pad_token_id=0,
    )
    assert batch.batch["prompts"].tolist() == [[5, 0, 6], [0, 0, 7]]
    assert batch.batch["responses"].tolist() == [[5, 6, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.batch["input_ids"].tolist() == [[5, 0, 6, 5, 6, 0, 0, 0], [0, 0, 7, 5, 6, 7, 8, 9]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 5, 5], [0, 0, 0, 1, 2, 3, 4, 5]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, -0.5, -0.5, 0, 0], [-0.5] * 5]
    assert batch.batch["rollout_log_probs"].dtype == torch.float32


def test_rows_are_prompt_major_and_keep_their_object_columns() -> None:
    batch = build_batch(
        prompts([5], [7]), [[completion(2), completion(3)], [completion(4), completion(5)]], pad_token_id=0
    )
    assert batch.batch["responses"].tolist() == [[2], [3], [4], [5]]
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-0", "0-1", "0-1"]
    assert batch.non_tensor_batch["prompt_ids"].tolist() == [[5], [5], [7], [7]]


def test_batches_of_replicas_with_other_widths_join_to_the_batch_of_one_engine() -> None:
    all_prompts = prompts([5, 0, 6], [7], [8, 9])
    completions = [[completion(5, 6, 0)], [completion(5, 6, 7, 8, 9)], [completion(4)]]
    whole = build_batch(all_prompts, completions, pad_token_id=11)
    parts = [
        build_batch(all_prompts[:1], completions[:1], pad_token_id=11),
        build_batch(all_prompts[1:], completions[1:], pad_token_id=11),
    ]
    assert join_batches(parts, pad_token_id=11) == whole
    idle = build_batch(all_prompts[:0], [], pad_token_id=11)  # fewer prompts than replicas
    assert join_batches([*parts, idle], pad_token_id=11) == whole


def test_training_samples_and_validation_decodes_as_its_own_keys_say() -> None:
    rollout = rollout_config(temperature=0.9, top_p=0.8, top_k=7, n=5, val_kwargs=ValKwargs(n=2, do_sample=True))
    train = sampling_options(rollout, 16, "train")
    assert (train.n, train.temperature, train.top_p, train.top_k, train.max_tokens) == (5, 0.9, 0.8, 7, 16)
    greedy = sampling_options(rollout_config(temperature=0.9), 16, "validate")
    assert (greedy.n, greedy.temperature, greedy.max_tokens) == (1, 0.0, 16)
    assert sampling_options(rollout, 16, "train") == train


def test_a_baseline_is_one_greedy_response_whatever_the_keys_of_sampling_say() -> None:
    rollout = rollout_config(temperature=0.9, n=5, val_kwargs=ValKwargs(n=2, do_sample=True, temperature=1.0))
    baseline = sampling_options(rollout, 16, "baseline")
    assert (baseline.n, baseline.temperature, baseline.max_tokens) == (1, 0.0, 16)


def test_seeds_differ_by_run_step_and_prompt_and_leave_room_for_n() -> None:
    seeds = [request_seed(s, t, u) for s in (0, 1) for t in range(5) for u in ("0-0", "0-1", "1-0")]
    values = sorted(seed for seed in seeds if seed is not None)
    assert len(values) == 30
    assert min(b - a for a, b in zip(values, values[1:], strict=False)) > 2**40
    assert values[0] >= 0 and values[-1] < 2**63
    assert request_seed(None, 1, "0-0") is None


def test_each_prompt_gets_n_responses_in_training_and_validation(tiny_model_path: str) -> None:
    rollout = worker(tiny_model_path, val_kwargs=ValKwargs(n=2, do_sample=True, temperature=1.0))
    assert len(rollout.generate(prompts([5], [6, 7]), purpose="train", step=1)) == 6
    assert len(rollout.generate(prompts([5], [6], [7], [8], [9]), purpose="validate", step=1)) == 10


def test_samples_depend_on_seed_step_and_uid_alone(tiny_model_path: str) -> None:
    first, second = worker(tiny_model_path), worker(tiny_model_path, rank=1)
    both = first.generate(prompts([5, 6], [5, 6]), purpose="train", step=1)
    responses = both.batch["responses"].tolist()
    assert len({tuple(row) for row in responses}) == 6
    again = second.generate(prompts([5, 6], [5, 6])[1:], purpose="train", step=1).batch["responses"]
    width = again.shape[1]
    assert again.tolist() == [row[:width] for row in responses[3:]]
    assert first.generate(prompts([5, 6], [5, 6]), purpose="train", step=2).batch["responses"].tolist() != responses


def test_validation_is_repeatable_and_training_after_it_still_samples(tiny_model_path: str) -> None:
    rollout = worker(tiny_model_path, seed=None)
    problems = prompts([5, 6], [7, 8])
    one, two = (rollout.generate(problems, purpose="validate", step=step).batch["responses"] for step in (1, 2))
    assert one.tolist() == two.tolist()
    train = rollout.generate(problems, purpose="train", step=2).batch["responses"].tolist()
    assert len({tuple(row) for row in train}) > 2


def test_log_probs_are_left_out_when_not_asked_for(tiny_model_path: str) -> None:
    batch = worker(tiny_model_path, calculate_log_probs=False).generate(prompts([5]), purpose="train", step=1)
    assert "rollout_log_probs" not in batch.batch
