"""What is refused before anything heavy starts: rows that nobody can judge, a reward model that cannot read."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
from tiny import char_tokenizer, tiny_model, tiny_reward_model

from verl_lite.config import Config, RewardConfig, RewardModelBackboneConfig, RewardModelConfig, resolve, unflatten
from verl_lite.data.dataset import load_tokenizer
from verl_lite.trainer.setup import check_functions, check_rewards, end_token_ids, load_transcriber, training_roles


def config(enable: bool) -> Config:
    return Config(reward=RewardConfig(reward_model=RewardModelConfig(enable=enable)))


def rows(**sources_by_style: list[str]) -> Any:
    return types.SimpleNamespace(sources_by_style=sources_by_style)


def test_a_source_that_only_the_reward_model_judges_needs_no_reward_function() -> None:
    check_rewards(config(True), [rows(rule=["verl_lite/addition"]), rows(model=["my/chats"])])
    for enable, style in ((False, "model"), (True, "rule")):
        both = rows(**{"model": ["other"], style: ["my/chats"]})
        with pytest.raises(ValueError, match="no built-in reward for data_source .*'my/chats'"):
            check_rewards(config(enable), [both])


def test_a_reward_model_without_a_row_to_judge_is_refused() -> None:
    with pytest.raises(ValueError, match=r'enable=True: no row .*style "model" \(found: rule\)'):
        check_rewards(config(True), [rows(rule=["verl_lite/addition"])])


def reward_model(path: str, input_tokenizer: str | None = None, *, enable: bool = True) -> RewardModelConfig:
    return RewardModelConfig(enable=enable, model=RewardModelBackboneConfig(path=path, input_tokenizer=input_tokenizer))


def test_a_reward_model_with_other_tokens_needs_the_policys_tokenizer(tmp_path: Path) -> None:
    path = char_tokenizer(tmp_path / "policy")
    policy = load_tokenizer(path)
    same = tiny_reward_model(tmp_path / "same", layers=1)
    other = tiny_reward_model(tmp_path / "other", layers=1, own_tokenizer=True)
    assert load_transcriber(reward_model(same, enable=False), policy) is None
    transcriber = load_transcriber(reward_model(same), policy)
    assert transcriber is not None and transcriber.own is None
    with pytest.raises(ValueError, match="another tokenizer than the policy; set .*input_tokenizer to the policy's"):
        load_transcriber(reward_model(other), policy)
    transcriber = load_transcriber(reward_model(other, path), policy)
    assert transcriber is not None and transcriber.own is not None
    with pytest.raises(ValueError, match="has another vocabulary than data.tokenizer"):
        load_transcriber(reward_model(other, other), policy)


def test_a_language_model_is_refused_as_reward_model(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "lm", layers=1)
    with pytest.raises(ValueError, match="a Qwen2ForCausalLM of 2 labels; a reward model is a sequence classifier"):
        load_transcriber(reward_model(path), load_tokenizer(path))


@pytest.mark.parametrize(
    ("eos", "ids"), [(None, [1]), (5, [1, 5]), ([5, 1, 0], [1, 5, 0]), (0, [1, 0])], ids=["none", "one", "list", "zero"]
)  # fmt: skip
def test_end_tokens_are_those_of_tokenizer_and_generation_config(tmp_path: Path, eos: Any, ids: list[int]) -> None:
    """NovaSky-AI/SkyRL#1232; prime-rl commit deecddc4a (B126): lists are taken, 0 is a token like any other."""
    tokenizer = load_tokenizer(char_tokenizer(tmp_path))
    if eos is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert end_token_ids(str(tmp_path), tokenizer) == ids


def test_the_critic_is_told_no_temperature() -> None:
    """slime commit d9d149dce (PR #1928) (B041): values cannot depend on it."""

    def roles(temperature: float) -> Any:
        values = {"actor_rollout_ref.rollout.temperature": temperature, "trainer.device": "cpu"}
        return training_roles(resolve(unflatten(values), needs_values=True), vocab_size=8)

    one, half = roles(1.0), roles(0.5)
    assert one["critic"].kwargs == half["critic"].kwargs
    assert one["actor"].kwargs != half["actor"].kwargs


def test_an_own_estimators_option_without_a_key_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def mine(inputs, *, alpha, gamma): ...\n\ndef with_a_value(inputs, *, gamma, beta=1.0): ...\n"
    )

    def check(name: str) -> None:
        values = {"trainer.device": "cpu", "algorithm.adv_estimator": f"{tmp_path}/own.py:{name}"}
        check_functions(resolve(unflatten(values), needs_values=False))

    check("with_a_value")
    with pytest.raises(ValueError, match=r"algorithm.alpha is required.* no such key: give it a default"):
        check("mine")
