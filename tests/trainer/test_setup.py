"""What is refused before anything heavy starts: rows that nobody can judge, a reward model that cannot read."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from tiny import char_tokenizer, tiny_model, tiny_reward_model

from verl_lite.config import Config, RewardConfig, RewardModelBackboneConfig, RewardModelConfig
from verl_lite.data.dataset import load_tokenizer
from verl_lite.trainer.setup import check_rewards, load_transcriber


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
