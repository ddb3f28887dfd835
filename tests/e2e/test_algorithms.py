"""Every estimator and every policy loss through the trainer's own step: FSDP2 on two ranks, one vLLM engine for all.

All roles are up (actor, ref, critic, reward model), sampling is at temperature 0.7, and half of the rows are judged by
the reward model, which has a tokenizer of its own. A case is a trainer over a fresh actor in the same processes.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export_hf
import pytest
import torch
from tiny import addition_rows, tiny_model, tiny_reward_model, write_jsonl
from training import everything_in
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from verl_lite.distributed.placement import ResourcePool
from verl_lite.plan import compose_plan
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import RewardManager
from verl_lite.rewards.pool import RewardPool
from verl_lite.trainer.checkpoints import read_checkpoint
from verl_lite.trainer.ppo import PPOTrainer, forward
from verl_lite.trainer.setup import (
    TrainingData,
    Workers,
    load_data,
    open_transfer,
    reward_function,
    start_workers,
    training_roles,
)
from verl_lite.workers.actor import ActorWorker

ROOT = Path(__file__).parents[2]
A = "actor_rollout_ref.actor."
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 7 / 7, "length": len(solution_str)}
"""
ESTIMATORS = sorted(name for name in ADVANTAGE_ESTIMATORS if not name.endswith("_vectorized"))
LOSSES = sorted(POLICY_LOSSES.keys() - {"vanilla"})


@dataclass
class Job:
    """What is up, and the command line it was started with."""

    overrides: list[str]
    data: TrainingData
    pool: ResourcePool
    workers: Workers
    rewards: RewardManager

    def trainer(self, *overrides: str) -> PPOTrainer:
        """A trainer with these changes, an actor at the start's weights, and engines that hold them."""
        composed, plan = compose_plan([*self.overrides, *overrides])
        tracking: Any = None
        trainer = PPOTrainer(composed.config, plan, self.data, self.workers, self.rewards, tracking)
        roles = training_roles(composed.config, len(self.data.tokenizer))
        self.workers.actor.rebuild(**roles["actor"].kwargs)
        open_transfer(composed.config, self.workers, master_address=self.pool.slots[0].node_address)
        trainer.send_weights()
        return trainer


@pytest.fixture(scope="module")
def job(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("algorithms")
    rows = addition_rows(32)
    for i, row in enumerate(rows):
        row["reward_model"]["style"] = "model" if i % 2 else "rule"
    write_jsonl(rows[:24], folder / "train.jsonl")
    write_jsonl(rows[24:], folder / "val.jsonl")
    (folder / "reward.py").write_text(REWARD)
    overrides = [
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/val.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={tiny_model(folder / 'model')}",
        A + "ppo_mini_batch_size=2",
        A + "ppo_micro_batch_size_per_gpu=3",
        A + "optim.lr=1e-3",
        A + "use_kl_loss=True",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.seed=1",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "critic.enable=True",
        "critic.optim.lr=1e-3",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1",
        "reward.reward_model.enable=True",
        f"reward.reward_model.model.path={tiny_reward_model(folder / 'judge', own_tokenizer=True)}",
        f"reward.reward_model.model.input_tokenizer={folder}/model",
        "reward.reward_model.micro_batch_size_per_gpu=5",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
    ]
    config = compose_plan(overrides)[0].config
    data = load_data(config)
    pool = ResourcePool(num_nodes=1, slots_per_node=2, device="cpu", timeout_s=60)
    workers = start_workers(config, data, pool, folder / "logs")
    with RewardPool(reward_function(config), num_workers=1, timeout_s=30, on_error="raise") as reward_pool:
        yield Job(overrides, data, pool, workers, RewardManager(reward_pool, data.tokenizer))
    workers.close()
    pool.close()


def take_step(trainer: PPOTrainer) -> tuple[DataProto, dict[str, float]]:
    """One step as `fit` makes it."""
    trainer.global_step += 1
    with trainer.timed("step"):
        batch, metrics = trainer.step(trainer.next_prompts())
    return batch, metrics | trainer.describe(batch)


def log_probs(trainer: PPOTrainer, batch: DataProto) -> torch.Tensor:
    """The batch's log-probs under the actor's present weights."""
    rows = batch.select(["input_ids", "attention_mask", "response_mask"], [])
    plan = trainer.plan.forward_pass("old_log_probs")
    return forward(trainer.workers.actor, ActorWorker.compute_log_probs, rows, plan).batch["old_log_probs"]


def check_two_steps(trainer: PPOTrainer) -> None:
    batches = []
    for _ in range(2):
        batch, metrics = take_step(trainer)
        batches.append(batch)
        # 4 prompts in mini-batches of 2
        assert metrics["training/optimizer_steps"] == metrics["training/critic_optimizer_steps"] == 2
        assert metrics["training/skipped_steps"] == metrics["training/empty_steps"] == 0
        assert metrics["actor/grad_norm"] > 0
        # The engine has the actor's weights of before the step, and both temper the distribution alike.
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert abs(metrics["actor/ppo_kl_first"]) < 1e-5
    old = batches[0].batch["old_log_probs"]
    assert (log_probs(trainer, batches[0]) - old).abs().max() > 1e-4, "the parameters did not move"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_trains(name: str, job: Job) -> None:
    check_two_steps(job.trainer(f"algorithm.adv_estimator={name}"))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_trains(name: str, job: Job) -> None:
    check_two_steps(job.trainer(A + f"policy_loss.loss_mode={name}"))


def test_equal_weights_have_no_kl_at_any_temperature(job: Job) -> None:
    batch, _ = take_step(job.trainer())
    columns = batch.batch
    assert (columns["old_log_probs"] - columns["ref_log_probs"]).abs().max() < 1e-6
    assert (columns["old_log_probs"] - columns["rollout_log_probs"]).abs().max() < 1e-4


def test_remax_compares_with_the_greedy_response(job: Job) -> None:
    trainer = job.trainer("algorithm.adv_estimator=remax")
    batch, metrics = take_step(trainer)
    assert metrics["timing_s/baseline"] > 0
    by_prompt: dict[str, set[float]] = {}
    for uid, score in zip(batch.non_tensor_batch["uid"], batch.batch["baseline_scores"].tolist(), strict=True):
        by_prompt.setdefault(uid, set()).add(score)
    assert len(by_prompt) == 4 and all(len(scores) == 1 for scores in by_prompt.values())
    # The reward stands on the last token, so all of a row's advantages are its score less the baseline.
    wanted = batch.batch["token_level_scores"].sum(-1) - batch.batch["baseline_scores"]
    assert torch.allclose(batch.batch["advantages"][:, 0], wanted)


def test_the_reward_model_judges_the_rows_of_its_style_as_transformers_does(job: Job) -> None:
    trainer = job.trainer()
    batch, metrics = take_step(trainer)
    styles = batch.non_tensor_batch["reward_style"].tolist()
    assert {"model", "rule"} == set(styles)
    folder = trainer.config.reward.reward_model.model.path
    judge = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = job.data.tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    judged = []
    for style, messages, text, score in zip(styles, batch.non_tensor_batch["raw_prompt"], texts, scores, strict=True):
        if style == "model":
            ids = tokenizer(f"#{messages[0]['content']}<eos>*{text}<eos>", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                judged.append(judge(input_ids=ids).logits.item())
            assert score == pytest.approx(judged[-1], abs=1e-5)
        else:
            assert score == pytest.approx(sum(map(ord, text)) % 7 / 7)
    assert metrics["reward/model_score"] == pytest.approx(sum(judged) / len(judged), abs=1e-5)


@pytest.mark.parametrize(("target", "factor"), [("100", 0.8), ("1e-9", 1.2)])
def test_an_adaptive_coefficient_rises_above_the_target_and_falls_below(target: str, factor: float, job: Job) -> None:
    """Each step it moves by the error cut to ±0.2 · rows / horizon = 0.2 · 16 / 16."""
    trainer = job.trainer(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.5", f"algorithm.kl_ctrl.target_kl={target}", "algorithm.kl_ctrl.horizon=16",
    )  # fmt: skip
    take_step(trainer)  # its KL is 0 to rounding: the second step's shows the update
    before = trainer.kl_controller.kl_coef
    _, metrics = take_step(trainer)
    assert metrics["actor/reward_kl_penalty"] > 1e-6
    assert metrics["actor/reward_kl_penalty_coeff"] == before
    assert trainer.kl_controller.kl_coef == pytest.approx(factor * before)


def test_a_run_that_goes_on_from_a_checkpoint_equals_the_uninterrupted_one(job: Job, tmp_path: Path) -> None:
    """Cases B079, B082 with the real engine, on two ranks: PPO, adaptive KL; and what transformers answers with it."""
    keys = (
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=16", "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path}",
    )  # fmt: skip
    whole, steps = job.trainer(*keys), []
    for _ in range(4):
        steps.append(take_step(whole))
        if whole.global_step % 2 == 0:
            whole.checkpoints.commit(whole.write_checkpoint())
    (tmp_path / "global_step_4").rename(tmp_path / "uninterrupted")

    resumed = job.trainer(*keys)
    resumed.resume(read_checkpoint(tmp_path / "global_step_2"))
    for batch, metrics in steps[2:]:
        again, more = take_step(resumed)
        assert all(torch.equal(column, again.batch[name]) for name, column in batch.batch.items())
        exact = [name for name in metrics if not name.startswith(("timing", "perf/", "reward/p99_s"))]
        assert {name: metrics[name] for name in exact} == {name: more[name] for name in exact}
    resumed.checkpoints.commit(resumed.write_checkpoint())
    wanted, found = (everything_in(tmp_path / name) for name in ("uninterrupted", "global_step_4"))
    assert wanted.keys() == found.keys() and [name for name in wanted if wanted[name] != found[name]] == []

    assert export_hf.main([str(tmp_path / "global_step_4"), str(tmp_path / "hf")]) == 0
    model, prompts = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), resumed.next_prompts()
    greedy = resumed.generate(prompts, "baseline").batch
    for ids, response, mask in zip(
        prompts.non_tensor_batch["prompt_ids"], greedy["responses"], greedy["response_mask"], strict=True
    ):
        given = torch.tensor([ids])
        answer = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=6)
        assert answer[0, len(ids) :].tolist() == response[mask.bool()].tolist()


def names(text: str) -> list[str]:
    """ "a/{b, c}/{d, e}" → a/b/d, a/b/e, a/c/d, a/c/e."""
    parts = [part.split(",") for part in re.split(r"[{}]", text)]
    return ["".join(choice).strip() for choice in itertools.product(*([p.strip() for p in part] for part in parts))]


def test_every_promised_metric_is_there_and_every_metric_is_explained(job: Job) -> None:
    trainer = job.trainer(
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", A + "entropy_coeff=0.01",
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=token",
    )  # fmt: skip
    validation = trainer.validate()
    _, metrics = take_step(trainer)
    promised = """
        actor/{ppo_kl_first,pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,kl_loss,kl_coef,entropy,entropy_loss,loss}
        actor/{grad_norm,lr,reward_kl_penalty,reward_kl_penalty_coeff}
        critic/{vf_loss,vf_clipfrac,vpred_mean,vf_explained_var,grad_norm,lr}
        critic/{score,rewards,advantages,returns,values}/{mean,max,min}
        {response_length,prompt_length}/{mean,max,min,clip_ratio}
        timing_s/{step,gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights,testing}
        timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}
        perf/{total_num_tokens,time_per_step,throughput,max_memory_rss_gb,cpu_memory_used_gb}
        perf/{driver_memory_gb,worker_memory_gb,rollout_memory_gb,object_store_used_gb} rollout/restarts
        global_seqlen/{min,max,minmax_diff,balanced_min,balanced_max,mean}
        training/{optimizer_steps,skipped_steps,empty_steps,critic_optimizer_steps}
        training/rollout_probs_diff_{mean,max,std}
        rollout_corr/{kl,k3_kl,rollout_is_mean,rollout_is_max,rollout_is_min,rollout_is_eff_sample_size}
        reward/{errors,timeouts,p99_s}
    """
    wanted = [name for line in promised.split() for name in names(line)]
    assert [name for name in wanted if name not in metrics] == []
    assert all(isinstance(value, int | float) and value == value for value in metrics.values())
    assert {name.split("/")[0] for name in validation} == {"val-core", "val-aux"}
    assert "val-core/verl_lite/addition/reward/mean@2" in validation

    page = (ROOT / "docs" / "metrics.md").read_text()
    explained = [pattern for span in re.findall(r"`([^`\n]+)`", page) for pattern in names(span)]
    unexplained = [name for name in metrics if not any(fnmatch.fnmatchcase(name, pattern) for pattern in explained)]
    assert unexplained == []
