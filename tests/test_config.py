"""The declared keys, how nulls are filled, what is refused, what is hidden."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from verl_lite import config as config_module
from verl_lite.config import (
    Config,
    flatten,
    leaf_keys,
    notices,
    resolve,
    unflatten,
    validate,
)

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}." for role in ("actor", "rollout", "ref"))


def resolved(values: dict[str, Any] | None = None, *, needs_values: bool = False) -> Config:
    return resolve(unflatten({"trainer.device": "cpu", **(values or {})}), needs_values=needs_values)


def problem_with(values: dict[str, Any]) -> str:
    """The one problem of an otherwise fine config."""
    problems = validate(resolved(values))
    assert len(problems) == 1, problems
    return problems[0]


def test_importing_the_package_and_the_config_loads_no_heavy_library() -> None:
    code = (
        "import sys, verl_lite, verl_lite.config; "
        "print([m for m in ('torch', 'ray', 'vllm', 'hydra', 'omegaconf', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_key_has_a_meaning_and_a_default_within_its_own_limits() -> None:
    for name, leaf in leaf_keys().items():
        assert leaf.doc, name
        assert leaf.in_range(leaf.default), name


def test_flatten_and_unflatten_are_inverse() -> None:
    values = {ACTOR + "optim.lr": 0.5, ROLLOUT + "engine_kwargs.vllm": {"a": 1}}
    config = unflatten(values)
    assert config.actor_rollout_ref.actor.optim.lr == 0.5
    assert unflatten(flatten(config)) == config
    with pytest.raises(ValueError, match="actor.lr"):
        unflatten({"actor.lr": 1.0})


def test_resolve_leaves_no_null_where_the_type_has_none() -> None:
    values = flatten(resolved({"actor_rollout_ref.model.path": "some/model"}))
    assert [name for name, leaf in leaf_keys().items() if leaf.filled and values[name] is None] == []


def test_the_default_config_is_valid() -> None:
    assert validate(resolved()) == []
    assert notices(resolved()) == []


def test_resolve_fills_keys_that_follow_others() -> None:
    config = resolved(
        {
            "actor_rollout_ref.model.path": "owner/model",
            "actor_rollout_ref.model.trust_remote_code": True,
            "data.max_prompt_length": 48,
            "data.max_response_length": 32,
            ACTOR + "clip_ratio": 0.3,
            ACTOR + "clip_ratio_high": 0.28,
            ACTOR + "ppo_mini_batch_size": 64,
            ACTOR + "ppo_micro_batch_size_per_gpu": 8,
            ACTOR + "use_dynamic_bsz": True,
            ACTOR + "ppo_max_token_len_per_gpu": 999,
            ACTOR + "ppo_epochs": 2,
            ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm",
            "critic.ppo_epochs": 3,
        }
    )
    actor, rollout, ref, critic = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.ref,
        config.critic,
    )
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.28)
    assert actor.loss_scale_factor == 32
    assert actor.checkpoint.load_contents == ["model", "optimizer", "extra"]
    assert rollout.max_model_len == 80  # 48 + 32
    for passes in (rollout, ref):
        assert passes.log_prob_micro_batch_size_per_gpu == 8
        assert passes.log_prob_use_dynamic_bsz is True
        assert passes.log_prob_max_token_len_per_gpu == 999
    assert (critic.ppo_mini_batch_size, critic.ppo_micro_batch_size_per_gpu, critic.ppo_epochs) == (64, 8, 3)
    assert critic.forward_micro_batch_size_per_gpu == 8
    assert critic.model.path == config.data.tokenizer == "owner/model"
    assert critic.model.trust_remote_code is True
    assert config.data.seed == 1


def test_resolve_follows_the_device() -> None:
    cpu = resolved()
    assert cpu.actor_rollout_ref.rollout.dtype == cpu.actor_rollout_ref.actor.fsdp_config.dtype == "float32"
    assert cpu.actor_rollout_ref.rollout.enforce_eager is True
    assert (cpu.trainer.n_gpus_per_node, cpu.num_slots, cpu.actor_rollout_ref.rollout.num_replicas) == (1, 1, 1)
    gpu = resolved(
        {
            "trainer.device": "cuda",
            "trainer.n_gpus_per_node": 8,
            "trainer.nnodes": 2,
            ROLLOUT + "tensor_model_parallel_size": 4,
        }
    )
    assert gpu.actor_rollout_ref.rollout.dtype == gpu.critic.fsdp.dtype == "bfloat16"
    assert gpu.actor_rollout_ref.rollout.enforce_eager is False
    assert gpu.num_slots == 16  # 8 · 2
    assert gpu.actor_rollout_ref.rollout.num_replicas == 4  # 16 slots / 4 per engine


def test_reference_model_computes_in_the_actors_dtype() -> None:
    config = resolved({ACTOR + "fsdp_config.dtype": "bf16"})
    assert config.actor_rollout_ref.ref.fsdp_config.dtype == "bfloat16"


@pytest.mark.parametrize(
    "visible, files, count",
    [(None, 4, 4), ("0,2", 4, 2), ("", 4, 0), ("-1", 4, 0), ("0,-1,1", 4, 1), ("0", 0, 0), ("MIG-a,MIG-b", 1, 2)],
)
def test_gpus_are_counted_without_torch(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, files: int, count: int
) -> None:
    monkeypatch.setattr("verl_lite.config.glob.glob", lambda pattern: [""] * files)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert config_module.gpus_here() == count


def test_critic_exists_exactly_when_values_are_needed() -> None:
    assert not resolved().needs_critic
    assert resolved(needs_values=True).needs_critic
    assert not resolved({"critic.enable": False}, needs_values=True).needs_critic


def test_reference_model_exists_only_when_a_kl_asks_for_it() -> None:
    assert not resolved().needs_ref
    assert resolved({ACTOR + "use_kl_loss": True}).needs_ref
    assert not resolved({ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_coef": 0.0}).needs_ref
    assert resolved({"algorithm.use_kl_in_reward": True}).needs_ref


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("data.truncation", "lefft", "did you mean left?"),
        (ACTOR + "ppo_epochs", 0, ">= 1"),
        (ACTOR + "optim.lr", -1.0, ">= 0"),
        (ACTOR + "optim.lr", float("nan"), ">= 0"),
        (ACTOR + "optim.lr", float("inf"), ">= 0"),
        (ACTOR + "optim.betas", [0.9], "two numbers"),
        (ROLLOUT + "gpu_memory_utilization", 1.5, "<= 1"),
        (ROLLOUT + "temperature", 0.0, "val_kwargs.do_sample=False"),
        (ROLLOUT + "do_sample", False, "val_kwargs.do_sample=False"),
        (ROLLOUT + "max_model_len", 1000, "512 + 512 = 1024"),
        ("trainer.total_epochs", 0, ">= 1"),
        ("trainer.logger", ["consol"], "did you mean console?"),
        ("trainer.critic_warmup", 2, "no critic"),
        ("data.custom_cls.path", "a.py", "set both"),
        ("trainer.run_dir", "", "is empty, perhaps from a variable that is not set"),
        ("data.train_files", ["a.parquet", ""], "is empty"),
        (ROLLOUT + "nnodes", 1, "not built yet"),
        ("algorithm.kl_ctrl.type", "adaptiv", "did you mean adaptive?"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_key_value_and_way_out(key: str, value: Any, words: str) -> None:
    message = problem_with({key: value})
    assert key in message
    assert words in message


@pytest.mark.parametrize("horizon, works", [(103, True), (102, False)])
def test_an_adaptive_kl_coefficient_can_never_reach_zero(horizon: int, works: bool) -> None:
    """0.2 · 128 prompts · 4 responses = 102.4."""
    values = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", ROLLOUT + "n": 4}
    values |= {"data.train_batch_size": 128, "algorithm.kl_ctrl.horizon": horizon}
    if works:
        assert validate(resolved(values)) == []
    else:
        assert "kl_ctrl.horizon=102" in (message := problem_with(values)) and "use a horizon >= 103" in message


def test_an_adaptive_kl_coefficient_does_not_start_at_zero() -> None:
    values = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.kl_coef": 0}
    assert "use a value > 0" in problem_with(values)


def test_the_hf_engine_on_more_than_one_slot_is_refused_before_anything_starts() -> None:
    assert "the hf engine runs on one slot" in problem_with(
        {ROLLOUT + "name": "hf", ROLLOUT + "tensor_model_parallel_size": 2}
    )


def test_validate_reports_every_problem() -> None:
    problems = validate(resolved({ACTOR + "ppo_epochs": 0, "trainer.total_epochs": -1, ROLLOUT + "top_p": 2.0}))
    assert len(problems) == 3


@pytest.mark.parametrize("freq", [-1, 0])
def test_no_checkpoints_is_a_fine_wish(freq: int) -> None:
    assert validate(resolved({"trainer.save_freq": freq})) == []


@pytest.mark.parametrize(
    "values, words",
    [
        ({ROLLOUT + "val_kwargs.n": 4}, "4 equal responses"),
        ({"trainer.test_freq": 5}, "validation is off"),
        ({ROLLOUT + "val_kwargs.temperature": 0.7}, "greedy"),
        ({ACTOR + "use_kl_loss": True, "algorithm.use_kl_in_reward": True}, "in the loss"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.0}, "saves its pass"),
        ({ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_type": "k1"}, "its gradient is 0 on average"),
        ({ACTOR + "entropy_coeff": -0.1}, "below 0 it lowers the entropy"),
        ({ACTOR + "optim.lr_warmup_steps": 5, "trainer.total_training_steps": 5}, "ends in its warm-up"),
        ({"trainer.critic_warmup": 3, ACTOR + "optim.lr_warmup_steps": 5}, "the actor starts at step 4 of it"),
        ({"trainer.critic_warmup": 3, ACTOR + "optim.lr_warmup_steps_ratio": 0.1}, "the actor starts at step 4 of it"),
        ({ACTOR + "optim.lr_warmup_steps": 5, ACTOR + "optim.lr_warmup_steps_ratio": 0.1}, "no effect"),
        ({"trainer.save_freq": 1, ACTOR + "checkpoint.save_contents": ["hf_model"]}, "nothing can go on"),
    ],
)
def test_a_doubtful_combination_is_said(values: dict[str, Any], words: str) -> None:
    assert any(words in notice for notice in notices(resolved(values)))


def test_a_critic_warmup_without_a_warmup_of_the_rate_is_not_said() -> None:
    values = {"trainer.critic_warmup": 3, "critic.optim.lr_warmup_steps": 5}
    assert notices(resolved(values, needs_values=True)) == []


def test_loggers_are_those_that_tracking_knows() -> None:
    from verl_lite.tracking import PACKAGES

    assert set(leaf_keys()["trainer.logger"].choices or ()) == set(PACKAGES)
