"""From command lines and recipes to the config: what users type, mistype and bring along."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_lite.cli import ConfigError, compose, recipe_folder
from verl_lite.config import Config, flatten, leaf_keys

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}." for role in ("actor", "rollout", "ref"))
GRPO = "algorithm.adv_estimator=grpo"

CLASSIC = shlex.split("""
algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet data.val_files=/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True
data.truncation='error' actor_rollout_ref.model.path=owner/model actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger=['console'] trainer.project_name=project
trainer.experiment_name=experiment trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5
trainer.total_epochs=15
""")


def config_of(*argv: str) -> Config:
    return compose([GRPO, *argv]).config


def value_of(key: str, *argv: str) -> Any:
    return flatten(config_of(*argv))[key]


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose([GRPO, *argv])
    return caught.value.problems


def problem_of(*argv: str) -> str:
    problems = problems_of(*argv)
    assert len(problems) == 1, problems
    return problems[0]


def test_the_classic_launch_line_works_to_the_letter() -> None:
    composed = compose(CLASSIC)
    config = composed.config
    assert composed.warnings == []
    assert len(composed.raw) == len(CLASSIC)
    assert config.data.train_files == ["/data/gsm8k/train.parquet"]
    assert config.data.truncation == "error"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.trainer.logger == ["console"]
    assert config.num_slots == 8
    assert config.needs_ref and not config.needs_critic


def test_composing_takes_under_a_second_and_loads_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from verl_lite.cli import compose; compose(sys.argv[1:]); "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'tensordict') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, *CLASSIC]
    root = str(recipe_folder().parent)
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": root})
    after = os.times()
    assert done.stdout.strip() == "[]", done.stderr
    # Of the processor: other work may share the machine.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument, key, value",
    [
        ("data.train_batch_size=1e3", "data.train_batch_size", 1000),
        ("data.train_batch_size='64'", "data.train_batch_size", 64),
        (ACTOR + "clip_ratio=1", ACTOR + "clip_ratio", 1.0),
        (ACTOR + "use_kl_loss=true", ACTOR + "use_kl_loss", True),
        ("data.shuffle=False", "data.shuffle", False),
        ("trainer.experiment_name=007", "trainer.experiment_name", "007"),
        ("trainer.experiment_name=1.10", "trainer.experiment_name", "1.10"),
        ("trainer.experiment_name='two words'", "trainer.experiment_name", "two words"),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.logger=[console,tensorboard]", "trainer.logger", ["console", "tensorboard"]),
        ("trainer.logger=['console']", "trainer.logger", ["console"]),
        ("data.val_files=null", "data.val_files", []),
        ("data.train_files=[/a.parquet,/b.parquet]", "data.train_files", ["/a.parquet", "/b.parquet"]),
        ("data.train_files=/data/x=1/a.parquet", "data.train_files", ["/data/x=1/a.parquet"]),
        ("data.val_batch_size=1312", "data.val_batch_size", 1312),
        ("data.val_batch_size=None", "data.val_batch_size", None),
        (ROLLOUT + "stop='</s>'", ROLLOUT + "stop", ["</s>"]),
        (ROLLOUT + "stop_token_ids=[1,2]", ROLLOUT + "stop_token_ids", [1, 2]),
        ("+data.seed=3", "data.seed", 3),
        ("++data.seed=3", "data.seed", 3),
        (ROLLOUT + "val_kwargs={n: 2, do_sample: true, temperature: 1}", ROLLOUT + "val_kwargs.n", 2),
        (ROLLOUT + "engine_kwargs.vllm.max_logprobs=5", ROLLOUT + "engine_kwargs.vllm", {"max_logprobs": 5}),
        ("+ray_kwargs.ray_init.runtime_env.env_vars.A=1", "ray_kwargs.ray_init.runtime_env", {"env_vars": {"A": 1}}),
    ],
)
def test_a_value_arrives_as_its_declared_type(argument: str, key: str, value: Any) -> None:
    got = value_of(key, argument)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "argument, words",
    [
        ("data.train_batch_size=1.5", "must be int >= 1"),
        ("data.train_batch_size=many", "must be int >= 1"),
        ("data.train_batch_size=True", "must be int >= 1"),
        ("data.train_batch_size=null", "must be int >= 1"),
        ("data.train_batch_size=[1,2]", "must be int >= 1"),
        (ACTOR + "optim.lr=fast", "must be float >= 0"),
        ("data.shuffle=maybe", "must be bool"),
        ("data.truncation=null", "error, left, right, middle"),
        ("data.apply_chat_template_kwargs=3", "must be dict"),
        ("data.train_batch_size=1,2", "sweep"),
        ("data.train_batch_size", "key=value"),
        ("trainer.logger=[console", "cannot be read"),
        ("actor_rollout_ref.rollout=vllm", "section"),
        ("data@x=1", "packages"),
        ("--n=5", "no such option"),
        (ROLLOUT + "name=sglang", "not supported"),
        (ACTOR + "strategy=megatron", "must be one of fsdp2, fsdp"),
        (ACTOR + "loss_agg_mode=token_mean", "did you mean token-mean?"),
        (ACTOR + "kl_loss_type=low_var", "did you mean low_var_kl?"),
        (ACTOR + "policy_loss.loss_mode=vanila", "did you mean vanilla?"),
        ("trainer.run_dir=${trainer.nowhere}/x", "trainer.run_dir"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_is_wanted(argument: str, words: str) -> None:
    message = problem_of(argument)
    assert argument.split("=")[0].split("@")[0] in message
    assert words in message


def test_every_problem_is_reported_at_once() -> None:
    problems = problems_of(
        "trainer.nothing=1", "data.train_batch_size=x", ACTOR + "ppo_epochs=0", ROLLOUT + "temperature=0", "bad"
    )
    assert len(problems) == 5


def test_an_override_wins_over_an_earlier_one() -> None:
    assert value_of("data.seed", "data.seed=2", "data.seed=3") == 3


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_an_unknown_key_answers_with_near_names(sign: str) -> None:
    message = problem_of(f"{sign}{ACTOR}ppo_minibatch_size=4")
    assert message.startswith(f"{ACTOR}ppo_minibatch_size: no such key; nearest: {ACTOR}ppo_mini_batch_size")


def test_a_key_without_its_section_answers_with_the_whole_name() -> None:
    assert f"nearest: {ROLLOUT}n," in problem_of("rollout.n=4")
    assert f"nearest: {ACTOR}ppo_mini_batch_size" in problem_of("actor.ppo_mini_batch_size=4")


@pytest.mark.parametrize(
    "typo, meant",
    [
        ("algorithm.filter_groups.metrics=acc", "algorithm.filter_groups.metric"),
        ("algorithm.rollout_correction.rollout_iss=token", "algorithm.rollout_correction.rollout_is"),
        ("actor_rollout_ref.model.lora_ranks=8", "actor_rollout_ref.model.lora_rank"),
        ("reward.reward_model.model.input_tokeniser=x", "reward.reward_model.model.input_tokenizer"),
    ],
)
def test_a_typo_among_keys_that_are_known_but_not_supported_answers_with_the_near_name(typo: str, meant: str) -> None:
    assert meant in problem_of(typo)


def test_no_key_is_taken_for_an_npus_because_it_says_input() -> None:
    assert "no such key" in problem_of("data.input_key=question")
    assert "not supported (NPUs)" in problem_of(f"{ACTOR}npu_fusion=True")


def test_taking_back_an_unknown_key_is_an_error() -> None:
    assert "no such key" in problem_of("~trainer.nothing")


@pytest.mark.parametrize(
    "old, new, value",
    [
        ("trainer.val_generations_to_log_to_wandb=3", "trainer.log_val_generations", 3),
        (ACTOR + "optim.warmup_style=cosine", ACTOR + "optim.lr_scheduler_type", "cosine"),
        (ACTOR + "checkpoint.contents=[model]", ACTOR + "checkpoint.save_contents", ["model"]),
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp.param_offload", True),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("ray_init.num_cpus=4", "ray_kwargs.ray_init.num_cpus", 4),
        ("+ray_init={num_cpus: 4}", "ray_kwargs.ray_init.num_cpus", 4),
        (ACTOR + "tis_imp_ratio_cap=3", "algorithm.rollout_correction.rollout_is_threshold", 3.0),
        (ACTOR + "tis_imp_ratio_cap=3", "algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_is=True", "algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_is=False", "algorithm.rollout_correction.rollout_is", None),
        ("trainer.remove_previous_ckpt_in_save=True", "trainer.max_actor_ckpt_to_keep", 1),
        ("trainer.remove_previous_ckpt_in_save=False", "trainer.max_actor_ckpt_to_keep", None),
        (ROLLOUT + "response_length=77", "data.max_response_length", 77),
    ],
)
def test_an_old_name_is_mapped_with_one_warning(old: str, new: str, value: Any) -> None:
    composed = compose([GRPO, old])
    assert flatten(composed.config)[new] == value
    assert [warning for warning in composed.warnings if warning.startswith(old.lstrip("+").split("=")[0])]
    assert len(composed.warnings) == 1


@pytest.mark.parametrize(
    "argument, key, value",
    [
        ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
        ("reward_model.enable=False", "reward.reward_model.enable", False),
        (ACTOR + "optim.clip_grad=0.5", ACTOR + "grad_clip", 0.5),
        ("critic.optim.clip_grad=0.5", "critic.grad_clip", 0.5),
    ],
)
def test_second_names_that_stay_work_without_a_warning(argument: str, key: str, value: Any) -> None:
    composed = compose([GRPO, argument])
    assert flatten(composed.config)[key] == value
    assert composed.warnings == []


def test_two_names_of_one_setting_must_agree() -> None:
    old, new = "trainer.val_generations_to_log_to_wandb=3", "trainer.log_val_generations=4"
    message = problem_of(old, new)
    assert old in message and new in message
    assert value_of("trainer.log_val_generations", old, "trainer.log_val_generations=3") == 3
    assert "set the same thing" in problem_of(f"{ACTOR}grad_clip=1", f"{ACTOR}optim.clip_grad=2")


@pytest.mark.parametrize(
    "argument",
    [
        ACTOR + "fsdp_config.grad_offload=True",
        "data.return_raw_chat=True",
        ROLLOUT + "load_format=dummy_dtensor",
        ROLLOUT + "mode=async",
        ACTOR + "use_torch_compile=False",
        "hydra.run.dir=out",
        ACTOR + "profiler.enable=False",
        ROLLOUT + "multi_turn={enable: False, format: hermes}",
        ROLLOUT + "pipeline_model_parallel_size=1",
        "critic.strategy=fsdp",
    ],
)
def test_a_key_of_verl_that_asks_for_nothing_is_ignored_with_a_warning(argument: str) -> None:
    composed = compose([GRPO, argument])
    assert len(composed.warnings) == 1
    assert argument.split("=")[0].split(".")[0] in composed.warnings[0]
    assert flatten(composed.config) == flatten(config_of())


@pytest.mark.parametrize(
    "argument",
    [
        ACTOR + "megatron.tensor_model_parallel_size=2",
        ROLLOUT + "multi_turn.enable=True",
        ROLLOUT + "pipeline_model_parallel_size=2",
        "data.image_key=pictures",
        "+" + ROLLOUT + "engine_kwargs.sglang.attention_backend=fa3",
        "reward_model.sandbox_fusion.url=http://x",
        "trainer.default_hdfs_dir=hdfs://x",
        "algorithm.use_pf_ppo=True",
    ],
)
def test_a_key_of_verl_that_is_not_here_says_so(argument: str) -> None:
    assert "not supported" in problem_of(argument)


# --- sizes that count all ranks ---------------------------------------------------------------------------------------


def test_a_global_micro_batch_size_is_divided_by_the_ranks() -> None:
    composed = compose([GRPO, f"{ACTOR}ppo_micro_batch_size=8", "trainer.n_gpus_per_node=2", "trainer.nnodes=2"])
    assert composed.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2  # 8 / (2 · 2)
    assert composed.config.critic.ppo_micro_batch_size_per_gpu == 2
    assert len(composed.warnings) == 1


def test_a_global_micro_batch_size_that_does_not_divide_is_refused() -> None:
    message = problem_of(f"{REF}log_prob_micro_batch_size=7", "trainer.n_gpus_per_node=2")
    assert "7" in message and "nearest: 6, 8" in message


def test_global_and_per_rank_size_together_must_agree() -> None:
    both = (f"{ACTOR}ppo_micro_batch_size=8", f"{ACTOR}ppo_micro_batch_size_per_gpu=3", "trainer.n_gpus_per_node=2")
    message = problem_of(*both)
    assert f"{ACTOR}ppo_micro_batch_size=8" in message and f"{ACTOR}ppo_micro_batch_size_per_gpu=3" in message


# --- the chosen algorithm ---------------------------------------------------------------------------------------------


def test_options_of_the_chosen_loss_are_keys() -> None:
    config = config_of(f"{ACTOR}policy_loss.loss_mode=clip_cov", f"+{ACTOR}policy_loss.clip_cov_lb=2.0")
    assert config.actor_rollout_ref.actor.policy_loss.options == {"clip_cov_lb": 2.0}


def test_an_option_of_another_loss_is_refused() -> None:
    message = problem_of(f"{ACTOR}policy_loss.clip_cov_lb=2.0")
    assert "loss_mode=vanilla has no such option" in message
    assert "clip_cov has it" in message


@pytest.mark.parametrize(
    ("mode", "option", "words"),
    [
        ("sapo", "tau_neg=-1", "tau_neg=-1: must be float > 0"),
        ("sapo", "tau_pos=nan", "tau_pos=nan: must be float > 0"),
        ("clip_cov", "clip_cov_ratio=0", "clip_cov_ratio=0: must be float > 0 and <= 1"),
        ("clip_cov", "clip_cov_lb=6", "clip_cov_lb=6: must be < clip_cov_ub=5"),
        ("clip_cov", "clip_cov_ub=1.0", "clip_cov_lb=1: must be < clip_cov_ub=1.0"),
        ("kl_cov", "kl_cov_ratio=2", "kl_cov_ratio=2: must be float > 0 and <= 1"),
        ("kl_cov", "ppo_kl_coef=-0.5", "ppo_kl_coef=-0.5: must be float >= 0"),
        ("kl_cov", "ppo_kl_coef=much", "ppo_kl_coef=much: must be a number"),
        ("clip_cov", "clip_cov_ub=much", "clip_cov_ub=much: must be a number"),
    ],
)
def test_an_option_that_the_loss_cannot_use_is_refused(mode: str, option: str, words: str) -> None:
    assert words in problem_of(f"{ACTOR}policy_loss.loss_mode={mode}", f"{ACTOR}policy_loss.{option}")


def test_a_loss_option_with_a_key_of_its_own_points_there() -> None:
    assert f"set {ACTOR}clip_ratio_low" in problem_of(f"{ACTOR}policy_loss.clip_ratio_low=0.1")


def test_options_of_the_users_own_loss_are_left_to_the_check_that_imports_it(tmp_path: Path) -> None:
    config = config_of(f"{ACTOR}policy_loss.loss_mode={tmp_path}/l.py:mine", f"{ACTOR}policy_loss.beta=2")
    assert config.actor_rollout_ref.actor.policy_loss.options == {"beta": 2}


def test_an_estimator_that_needs_values_needs_a_critic() -> None:
    assert compose([]).config.needs_critic
    with pytest.raises(ConfigError, match="needs a critic"):
        compose(["critic.enable=False"])
    assert any("uses no values" in warning for warning in compose([GRPO, "critic.enable=True"]).warnings)


# --- paths and recipes ------------------------------------------------------------------------------------------------


def test_relative_paths_count_from_the_start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    config = config_of(
        "data.train_files=data/a.parquet",
        "actor_rollout_ref.model.path=models/small",
        "reward.custom_reward_function.path=reward.py",
        f"{ACTOR}policy_loss.loss_mode=loss.py:mine",
        "trainer.project_name=p",
    )
    assert config.data.train_files == [f"{tmp_path}/data/a.parquet"]
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/models/small"
    assert config.reward.custom_reward_function.path == f"{tmp_path}/reward.py"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"{tmp_path}/loss.py:mine"
    assert config.trainer.default_local_dir == f"{tmp_path}/checkpoints/p/default"
    assert config.trainer.run_dir == f"{tmp_path}/outputs/p/default"


def test_hub_ids_and_urls_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("actor_rollout_ref.model.path=owner/model", "data.train_files=hdfs://host/a.parquet")
    assert config.actor_rollout_ref.model.path == config.data.tokenizer == "owner/model"
    assert config.data.train_files == ["hdfs://host/a.parquet"]


def test_values_may_refer_to_other_keys_and_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LITE_HOME", "/prepared")
    config = config_of(
        "actor_rollout_ref.model.path=${verl_lite_home:}/model",
        f"{ROLLOUT}max_num_batched_tokens=${{data.max_prompt_length}}",
    )
    assert config.actor_rollout_ref.model.path == "/prepared/model"
    assert config.actor_rollout_ref.rollout.max_num_batched_tokens == 512


def test_a_recipe_of_ones_own_builds_on_another_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8, seed: 5}\n"
        "actor_rollout_ref: {rollout: {engine_kwargs: {vllm: {a: 1, b: 1}}}}\n"
    )
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ndata:\n  train_batch_size: 16\n")
    flags = ["--config-dir", str(tmp_path), "--config-name=mine"]
    config = config_of(*flags, f"{ROLLOUT}engine_kwargs.vllm.b=2")
    assert (config.data.train_batch_size, config.data.seed) == (16, 5)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"a": 1, "b": 2}
    assert value_of("data.train_batch_size", *flags, "data.train_batch_size=4") == 4
    assert value_of("data.seed", *flags, "~data.seed") == 1
    assert value_of("data.seed", "--config-name", str(tmp_path / "base.yaml")) == 5


def test_a_recipe_is_held_to_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("data: {train_bach_size: 8}\ntrainer: {total_epochs: none}\n")
    problems = problems_of("--config-dir", str(tmp_path), "--config-name", "bad")
    assert "nearest: data.train_batch_size" in problems[0]
    assert problems[1] == "trainer.total_epochs=none: must be int >= 1 and <= 1e+09"


def test_a_recipe_that_is_no_yaml_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("data:\n  train_batch_size: [\n")
    problem = problem_of("--config-dir", str(tmp_path), "--config-name", "broken")
    assert "broken.yaml cannot be read" in problem and "line 3" in problem


def test_a_recipe_that_is_not_there_answers_with_those_that_are(tmp_path: Path) -> None:
    assert "ppo_trainer" in problem_of("--config-name", "ppo_traner")
    assert "no such folder" in problem_of("--config-dir", str(tmp_path / "no"))


@pytest.mark.parametrize("recipe", sorted(path.stem for path in recipe_folder().glob("*.yaml")))
def test_every_recipe_composes_without_a_warning_and_stays_short(recipe: str) -> None:
    assert compose(["--config-name", recipe]).warnings == []
    lines = (recipe_folder() / f"{recipe}.yaml").read_text().splitlines()
    assert sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines) <= 30


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compose(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name.rpartition('.')[2]}=" in text for name in leaf_keys())
