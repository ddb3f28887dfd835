"""`python -m verl_lite.plan`: the classic launch script's overrides, refusals, and what it costs to ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_lite import plan

CLASSIC = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=./model",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.critic_warmup=0",
    "trainer.logger=['console']",
    "trainer.project_name=p",
    "trainer.experiment_name=e",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=-1",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]
SEQUENCE = "actor_rollout_ref.actor.ppo_mini_batch_unit=sequence"
ONE_RANK = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]


def as_json(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert plan.main(["--json", *CLASSIC, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_classic_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    of = as_json(capsys)
    assert (of["prompts_per_step"], of["sequences_per_step"]) == (1024, 5120)  # 1024 * 5
    assert of["optimizer_steps_per_training_step"] == 4  # 5120 / (256 * 5)
    assert (of["rows_per_rank"], of["mini_batch_rows_per_rank"]) == (640, 160)  # 5120 / 8, 1280 / 8
    assert (of["micro_batch_rows"], of["gradient_accumulation_steps"]) == ([80, 80], 2)
    assert of["forward_micro_batch_rows"] == {"old_log_probs": [160] * 4, "ref_log_probs": [160] * 4}
    assert of["total_training_steps"] is None
    assert any("algorithm.kl_ctrl.kl_coef=0.001" in note for note in of["notes"])
    assert sum("not on this machine" in note for note in of["notes"]) == 3  # train, val, model


def test_classic_overrides_counted_in_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    of = as_json(capsys, SEQUENCE)
    assert of["optimizer_steps_per_training_step"] == 20  # 5120 / 256
    assert (of["mini_batch_rows_per_rank"], of["micro_batch_rows"]) == (32, [32])  # 256 / 8
    of = as_json(capsys, SEQUENCE, *ONE_RANK)
    assert (of["mini_batch_rows_per_rank"], of["micro_batch_rows"]) == (256, [80, 80, 80, 16])


def test_a_group_estimator_with_one_response_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = as_json(capsys, "actor_rollout_ref.rollout.n=1")["notes"]
    assert any("adv_estimator=grpo compares the responses" in note for note in notes)


A, OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"
MODE = f"{A}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        (["algorithm.gamma=0.9", "algorithm.lam=0.8"], ["algorithm.gamma=0.9", "algorithm.lam=0.8"]),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.lam=0.8"],
            ["algorithm.lam"],
        ),
        (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=False"], ["norm_adv_by_std_in_grpo"]),
        ([f"{MODE}=gpg", f"{A}.clip_ratio=0.1"], [f"{A}.clip_ratio=0.1"]),
        ([f"{MODE}=kl_cov", f"{A}.clip_ratio_low=0.1"], [f"{A}.clip_ratio_low=0.1"]),
        ([f"{MODE}=sapo", f"{A}.clip_ratio_high=0.1"], [f"{A}.clip_ratio_high=0.1"]),
        ([f"{MODE}=gspo", f"{A}.clip_ratio_high=0.1", f"{A}.clip_ratio_c=4"], [f"{A}.clip_ratio_c=4"]),
        ([f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.3"], [f"{A}.clip_ratio=0.1"]),
        ([f"{A}.loss_scale_factor=100"], [f"{A}.loss_scale_factor=100"]),
        (
            [f"{OPTIM}.num_cycles=2", f"{OPTIM}.min_lr_ratio=0.1"],
            [f"{OPTIM}.num_cycles=2", f"{OPTIM}.min_lr_ratio=0.1"],
        ),
        (
            [f"{OPTIM}.lr_scheduler_type=linear", f"{OPTIM}.num_cycles=2", f"{OPTIM}.min_lr_ratio=0.1"],
            [f"{OPTIM}.num_cycles=2"],
        ),
        (["algorithm.adv_estimator=gae", "critic.optim.num_cycles=2"], ["critic.optim.num_cycles=2"]),
        ([f"{CORRECTION}.rollout_rs_threshold=3"], [f"{CORRECTION}.rollout_rs_threshold=3"]),
        # read, or at their defaults, or nobody knows
        (["algorithm.norm_adv_by_std_in_grpo=False", "algorithm.gamma=1.0"], []),
        ([f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_high=0.3", f"{A}.clip_ratio_low=null"], []),
        (["algorithm.adv_estimator=own.py:mine", "algorithm.lam=0.9"], []),
        ([f"{MODE}=own.py:mine", f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_c=4"], []),
        ([f"{A}.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=100"], []),
        ([f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.num_cycles=2", f"{OPTIM}.min_lr_ratio=0.1"], []),
        ([f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=3"], []),
    ],
)
def test_keys_that_the_chosen_functions_do_not_read_are_named(
    overrides: list[str], unread: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, notes = as_json(capsys)["notes"], as_json(capsys, *overrides)["notes"]
    found = [note for note in notes if note.startswith("No effect: ") and note not in before]
    named = [part for note in found for part in note.removeprefix("No effect: ").split("; ")[0].split(", ")]
    assert len(named) == len(unread) and all(any(key in part for part in named) for key in unread), found


def test_what_cannot_work_exits_with_2_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*CLASSIC, "actor_rollout_ref.actor.ppo_mini_batch_size=96", "trainer.n_gpus_per_node=7"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "ppo_mini_batch_size=96 does not divide data.train_batch_size=1024; nearest: 64, 128" in err
    assert "tensor_model_parallel_size=2 does not divide trainer.n_gpus_per_node=7" in err


def test_problems_of_keys_and_of_sizes_come_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["actor_rollout_ref.rolout.n=4", "data.train_batch_size=100", "actor_rollout_ref.rollout.top_p=2"]
    assert plan.main([*CLASSIC, *wrong]) == 2
    err = capsys.readouterr().err
    assert "actor_rollout_ref.rolout.n" in err and "actor_rollout_ref.rollout.top_p=2" in err
    assert "ppo_mini_batch_size=256 is larger than data.train_batch_size=100; largest possible: 100" in err


def test_a_size_of_zero_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*CLASSIC, "data.train_batch_size=0"]) == 2
    assert capsys.readouterr().err.count("data.train_batch_size=0") == 1


def test_an_unknown_key_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*CLASSIC, "actor_rollout_ref.actor.ppo_mini_batchsize=96"]) == 2
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in capsys.readouterr().err


def test_it_answers_from_any_folder_within_3_seconds_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from verl_lite.plan import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'tensordict', 'ray', 'vllm', 'transformers'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code, *CLASSIC], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, env=os.environ | {"PYTHONPATH": str(Path(plan.__file__).parents[1])})  # fmt: skip
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert "optimizer steps" in done.stdout and "80 + 80" in done.stdout
    # Of the processor, since other work may share the machine; 0.4 s where none does.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3


@pytest.mark.parametrize("module", ["verl_lite.plan", "verl_lite.main_ppo"])
def test_a_terminal_that_cannot_show_every_character_gets_the_others(module: str) -> None:
    arguments = [*CLASSIC] if module == "verl_lite.plan" else ["--help"]
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONIOENCODING": "ascii"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert module == "verl_lite.main_ppo" or "1,024 prompts ? rollout.n=5 responses" in done.stdout


@pytest.mark.parametrize("module", ["verl_lite.plan", "verl_lite.main_ppo"])
def test_help_may_be_cut_off_by_its_reader(module: str) -> None:
    """`--help | head`: the pipe is closed before the text is through."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_table_in_the_docs_is_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(plan.__file__).parents[1] / "docs" / "batch-sizes.md").read_text(encoding="utf-8")
    shown = page.split("<!-- plan:")[1].split("```")[1].strip("\n").splitlines()
    assert plan.main(CLASSIC) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) > 5 and [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("module", ["main_ppo", "plan"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_ends_nothing(module: str, closed: str) -> None:
    command = [sys.executable, "-m", f"verl_lite.{module}", "trainer.total_epochs=0"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert ("trainer.total_epochs=0" in done.stderr) == ("2>&-" not in closed) and done.stdout == ""
