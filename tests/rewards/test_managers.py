"""Scores stand on the last response token; what has no score is marked; shaping and filtering as in DAPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import char_tokenizer

from verl_lite.config import RewardConfig, RewardManagerConfig
from verl_lite.data.dataset import load_tokenizer
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import DapoRewardManager, RewardManager, build_manager, rows_of_differing_groups
from verl_lite.rewards.pool import RewardFunction, RewardPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(char_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def batch_of(responses: list[str], truths: list[str], tokenizer: Any, width: int = 6) -> DataProto:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in responses]
    pad = tokenizer.pad_token_id
    rows = len(ids)
    return DataProto.from_dict(
        tensors={
            "responses": torch.tensor([row + [pad] * (width - len(row)) for row in ids]),
            "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids]),
        },
        non_tensors={"data_source": ["verl_lite/addition"] * rows, "ground_truth": truths, "extra_info": [{}] * rows},
    )


def pool_with(path: Path | None = None, on_error: str = "raise", **kwargs: Any) -> RewardPool:
    function = RewardFunction(str(path) if path else None, kwargs=kwargs)
    return RewardPool(function, num_workers=2, timeout_s=30, on_error=on_error)


def test_the_score_is_on_the_last_response_token(tokenizer: Any):
    # The end token is the last one the policy chose: "46<eos>" is right, with its score on <eos>.
    batch = batch_of(["46<eos>", "46", "47<eos>", ""], ["46"] * 4, tokenizer)
    with pool_with() as pool:
        rewards = RewardManager(pool, tokenizer).score(batch)
    assert rewards.token_level_scores.dtype == torch.float32
    assert rewards.token_level_scores.tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert rewards.scored.tolist() == [True] * 4
    assert (rewards.metrics["reward/errors"], rewards.metrics["reward/timeouts"]) == (0.0, 0.0)
    assert 0 <= rewards.metrics["reward/p99_s"] < 5


def test_a_batch_of_empty_responses_scores_nothing_and_does_not_fail(tokenizer: Any):
    with pool_with() as pool:
        rewards = RewardManager(pool, tokenizer).score(batch_of(["", ""], ["46"] * 2, tokenizer, width=0))
    assert rewards.token_level_scores.shape == (2, 0)


def test_zeros_inside_the_mask_do_not_cut_the_response(tokenizer: Any):
    batch = batch_of(["1234"], ["1234"], tokenizer)
    mask = batch.batch["response_mask"].clone()
    mask[0, 1:3] = 0  # tokens the policy did not choose, between those it chose
    batch = DataProto.from_dict(
        tensors={"responses": batch.batch["responses"], "response_mask": mask}, non_tensors=batch.non_tensor_batch
    )
    with pool_with() as pool:
        assert RewardManager(pool, tokenizer).score(batch).token_level_scores.tolist() == [[0, 0, 0, 1, 0, 0]]


def test_samples_without_score_are_marked_and_failures_counted(tokenizer: Any, tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == '3': return 1 / 0\n"
        "    if solution_str == '4': time.sleep(3600)\n"
        "    return None if solution_str == '2' else {'score': 0.5, 'acc': 1.0}\n"
    )
    function = RewardFunction(str(tmp_path / "reward.py"))
    with RewardPool(function, num_workers=2, timeout_s=1, on_error="mask") as pool:
        rewards = RewardManager(pool, tokenizer).score(batch_of(["1", "2", "3", "4"], [""] * 4, tokenizer))
    assert rewards.token_level_scores.sum(1).tolist() == [0.5, 0, 0, 0]
    assert rewards.scored.tolist() == [True, False, False, False]
    counts = {name: rewards.metrics[f"reward/{name}"] for name in ("errors", "timeouts", "unscored", "acc")}
    assert counts == {"errors": 1, "timeouts": 1, "unscored": 3, "acc": 1.0}
    assert rewards.columns["acc"].tolist() == [1.0, None, None, None]


def test_the_example_of_a_custom_reward_works(tokenizer: Any):
    with pool_with(EXAMPLE, length_bonus=0.3) as pool:
        rewards = RewardManager(pool, tokenizer).score(batch_of(["46", "7"], ["46", "8"], tokenizer))
    # Right with two characters: 1 + 0.3 / (1 + 2) = 1.1.
    assert rewards.token_level_scores.sum(1).tolist() == pytest.approx([1.1, 0.0])
    assert rewards.columns["acc"].tolist() == [1.0, 0.0]
    assert rewards.columns["pred"].tolist() == ["46", "7"]


@pytest.mark.parametrize(
    "length, penalty",
    [(5, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0)],  # limit 10, buffer 4: -(length - 6) / 4
)
def test_dapo_penalises_the_last_tokens_before_the_limit(length: int, penalty: float, tokenizer: Any):
    options = {"enable": True, "len": 4, "penalty_factor": 1.0}
    manager = DapoRewardManager(pool_with(), tokenizer, max_resp_len=10, overlong_buffer_cfg=options)
    reported = {"acc": 1.0, "overlong_reward": penalty, "overlong": float(penalty < 0)}
    assert manager.shape(1.0, length) == (1.0 + penalty, reported)


def test_dapo_puts_the_penalty_into_the_scores(tokenizer: Any):
    config = RewardConfig(
        reward_manager=RewardManagerConfig(name="dapo"),
        reward_kwargs={"overlong_buffer_cfg": {"enable": True, "len": 2, "penalty_factor": 0.5}},
    )
    with pool_with() as pool:
        manager = build_manager(config, pool, tokenizer, max_response_length=4)
        rewards = manager.score(batch_of(["12", "123", "1234"], ["12", "123", "0"], tokenizer))
    # Limit 4, buffer 2: lengths 2, 3, 4 cost 0, 0.25, 0.5.
    assert rewards.token_level_scores.sum(1).tolist() == [1.0, 0.75, -0.5]
    assert rewards.metrics["reward/overlong"] == pytest.approx(2 / 3)
    assert rewards.columns["acc"].tolist() == [1.0, 1.0, 0.0]


def test_dapo_leaves_the_functions_own_acc_alone(tokenizer: Any):
    with pool_with(EXAMPLE, length_bonus=0.3) as pool:
        rewards = DapoRewardManager(pool, tokenizer, max_resp_len=4).score(batch_of(["46"], ["46"], tokenizer))
    assert rewards.token_level_scores.sum().item() == pytest.approx(1.1)  # 1 + 0.3 / (1 + 2)
    assert rewards.columns["acc"].tolist() == [1.0]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("naiv", {}, "reward.reward_manager.name=naiv is unknown .nearest: naive"),
        ("naive", {"max_resp_len": 4}, "reward.reward_kwargs.max_resp_len is unknown"),
        ("dapo", {"overlong_buffer_cfg": {"enable": True, "len": 9}}, "len=9 must be in 1 … .*max_resp_len=4"),
        ("dapo", {"overlong_buffer_cfg": {"enabled": True}}, "unknown enabled; known: enable, len"),
    ],
)
def test_wrong_managers_and_options_are_refused(name: str, options: dict, message: str, tokenizer: Any):
    config = RewardConfig(reward_manager=RewardManagerConfig(name=name), reward_kwargs=options)
    with pytest.raises(ValueError, match=message):
        build_manager(config, pool_with(), tokenizer, max_response_length=4)


def test_groups_with_equal_values_are_filtered():
    values = [1.0, 1.0, 0.0, 1.0, None, 0.0, None, 0.5, None, None, 1.0, None]
    groups = ["equal"] * 2 + ["differ"] * 2 + ["one left"] * 2 + ["two"] * 2 + ["none"] * 2 + ["single"] + ["nothing"]
    # "one left" and "two" have one value each besides None: nothing to compare it with.
    assert rows_of_differing_groups(values, groups) == [2, 3, 10]


def test_rows_that_a_reward_model_judged_have_its_score_and_the_others_the_functions(tokenizer: Any):
    batch = batch_of(["46", "46", "47"], ["46"] * 3, tokenizer, width=2)
    with pool_with() as pool:
        rewards = RewardManager(pool, tokenizer).score(batch, {1: -2.5})
        alone = RewardManager(pool, tokenizer).score(batch, {0: 0.5, 1: 0.25, 2: -1.0})
    assert rewards.token_level_scores.tolist() == [[0, 1], [0, -2.5], [0, 0]]
    assert rewards.columns["model_score"].tolist() == [None, -2.5, None]
    assert rewards.metrics["reward/model_score"] == -2.5
    assert alone.token_level_scores[:, 1].tolist() == [0.5, 0.25, -1.0]
    assert (alone.metrics["reward/errors"], alone.metrics["reward/p99_s"]) == (0.0, 0.0)


def test_a_long_answer_is_penalised_whoever_judged_it(tokenizer: Any):
    batch = batch_of(["1234"], ["46"], tokenizer)
    with pool_with() as pool:
        dapo = DapoRewardManager(pool, tokenizer, max_resp_len=4, overlong_buffer_cfg={"enable": True, "len": 2})
        # All of the buffer of 2 tokens is used: 3 - 2/2 = 2
        assert dapo.score(batch, {0: 3.0}).token_level_scores.tolist() == [[0, 0, 0, 2, 0, 0]]
