"""Rewards through the trainer: the real loop, data, reward processes and manager; engine and models are stand-ins."""

from __future__ import annotations

import json
import logging
import math
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import addition_rows, write_jsonl

from verl_lite.plan import compose_plan
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import build_manager
from verl_lite.rewards.pool import RewardError, RewardPool
from verl_lite.rollout.engine import Completion
from verl_lite.trainer.engines import Engines
from verl_lite.trainer.ppo import PPOTrainer
from verl_lite.trainer.setup import load_data, reward_function
from verl_lite.workers.rollout import build_batch
from verl_lite.workers.update import MiniBatchResult

# Scores a response by its text.
REWARD = """
import os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        return 1 / 0
    if solution_str == "sleep":
        time.sleep(3600)
    if solution_str == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "no acc":
        return {"score": 1.0, "acc": float("nan")}
    return None if solution_str == "none" else {"score": float(solution_str), "digits": len(solution_str)}
"""


class StandIn:
    """A worker group of one rank: what is asked of a worker class is answered by the function of that name here."""

    dp_size = world_size = 1

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.answers = answers

    def map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> list[Any]:
        return [self.answers[method.__name__](*(shard[0] for shard in shards), **same)]

    def call(self, method: Callable[..., Any], *args: Any, **same: Any) -> list[Any]:
        return [self.answers[method.__name__](*args, **same)]

    def only(self, ranks: Sequence[int]) -> StandIn:
        return self

    def start_map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> Any:
        results = self.map(method, *shards, **same)
        return types.SimpleNamespace(outcomes=lambda spared: results)


class Run:
    """A run of one training step whose engine gives the responses of `texts`, by the number of the prompt."""

    def __init__(self, trainer: PPOTrainer, texts: dict[int, list[str]]) -> None:
        self.trainer, self.texts = trainer, texts
        self.trained: list[DataProto] = []  # what the actor is updated with
        self.batches: list[DataProto] = []  # all that the driver knows of it
        self.metrics: dict[str, float] = {}

    def generate(self, prompts: DataProto, *, purpose: str, step: int) -> DataProto:
        tokenizer = self.trainer.data.tokenizer
        answers = []
        for uid in prompts.non_tensor_batch["uid"]:
            texts = self.texts[int(uid.split("-")[1])]
            tokens = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 1] for text in texts]
            answers.append([Completion(ids, [-1.0] * len(ids), "stop") for ids in tokens])
        return build_batch(prompts, answers, pad_token_id=0)

    def compute_log_probs(self, shard: DataProto, schedule: Any) -> DataProto:
        zeros = torch.zeros(shard.batch["response_mask"].shape)
        return DataProto.from_dict({"old_log_probs": zeros - 1, "entropies": zeros})

    def update(self, shard: DataProto, schedule: Any, **_: Any) -> list[MiniBatchResult]:
        self.trained.append(shard)
        return [MiniBatchResult("done") for _ in schedule.mini_sizes]

    def train(self) -> dict[str, float]:
        """The step's metrics."""
        self.trainer.fit()
        return self.metrics

    def describe(self, batch: DataProto) -> dict[str, float]:
        self.batches.append(batch)
        return PPOTrainer.describe(self.trainer, batch)

    def column(self, name: str) -> list[Any]:
        """Of the batch that trains, per response: its value at the last token of those that count, 0 without any."""
        [batch] = self.batches
        mask = batch.batch["response_mask"].bool()
        rows = zip(batch.batch[name], mask, strict=True)
        return [round(float(values[keep][-1]), 3) if keep.any() else 0.0 for values, keep in rows]


Start = Callable[..., Run]


@pytest.fixture
def start(tiny_model_path: str, tmp_path: Path) -> Any:
    """Makes runs; afterwards all reward processes are gone."""
    pools: list[RewardPool] = []

    def make(texts: dict[int, list[str]], *overrides: str, prompts: int = 1) -> Run:
        (tmp_path / "reward.py").write_text(REWARD)
        config_line = [
            f"data.train_files={write_jsonl(addition_rows(len(texts)), tmp_path / 'train.jsonl')}",
            f"data.train_batch_size={prompts}", "data.shuffle=False",
            "data.max_prompt_length=8", "data.max_response_length=8",
            f"actor_rollout_ref.model.path={tiny_model_path}", "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.rollout.n={len(texts[0])}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "algorithm.adv_estimator=grpo",
            f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "reward.num_workers=2",
            "trainer.device=cpu", "trainer.total_training_steps=1", f"trainer.run_dir={tmp_path}",
        ]  # fmt: skip
        composed, plan = compose_plan([*config_line, *overrides])
        config, data = composed.config, load_data(composed.config)
        reward = config.reward
        pools.append(
            RewardPool(
                reward_function(config), num_workers=2, timeout_s=reward.timeout_s, on_error=reward.on_error
            )  # fmt: skip
        )
        run = Run(None, texts)  # type: ignore[arg-type]
        group: Any = StandIn(generate=run.generate, sleep=lambda: None, own_memory=int)
        actor: Any = StandIn(
            compute_log_probs=run.compute_log_probs,
            update=run.update,
            pop_peak_memory=dict,
            own_memory=int,
        )
        workers: Any = types.SimpleNamespace(
            rollout=Engines(group, actor, max_restarts=0), actor=actor,
            ref=None, critic=None, reward_model=None,
        )  # fmt: skip
        tracking: Any = types.SimpleNamespace(log=lambda metrics, step: run.metrics.update(metrics))
        rewards = build_manager(reward, pools[-1], data.tokenizer, max_response_length=8)
        run.trainer = PPOTrainer(config, plan, data, workers, rewards, tracking)
        run.trainer.send_weights = lambda: None  # type: ignore[method-assign]
        run.trainer.describe = run.describe  # type: ignore[method-assign]
        return run

    yield make
    for pool in pools:
        pids = [worker.process.pid for worker in pool._workers]
        pool.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_response_without_a_score_leaves_its_group(start: Start) -> None:
    run = start({0: ["1", "none", "0"]}, "algorithm.norm_adv_by_std_in_grpo=True")
    metrics = run.train()
    # Mean 0.5 and standard deviation sqrt((0.25 + 0.25) / (2 - 1)) = 0.7071 of the two scores: ±0.5 / 0.7071.
    assert run.column("advantages") == [0.707, 0.0, -0.707]
    assert metrics["critic/score/mean"] == 0.5
    assert (metrics["reward/unscored"], metrics["reward/errors"]) == (1.0, 0.0)
    assert run.trained[0].batch["response_mask"].sum(-1).tolist() == [2, 0, 2]  # digit and end token


def test_a_group_without_any_score_has_no_advantage_and_no_effect_on_the_others(start: Start) -> None:
    run = start({0: ["none", "none"], 1: ["3", "1"]}, prompts=2)
    metrics = run.train()
    assert run.column("advantages") == [0.0, 0.0, 0.707, -0.707]
    assert metrics["critic/score/mean"] == 2.0


def test_nothing_but_none_is_an_error(start: Start) -> None:
    with pytest.raises(RewardError, match="none of 3 samples has a score"):
        start({0: ["none"] * 3}).train()


@pytest.mark.parametrize("failing", ["raise", "kill", "nan"])
def test_a_failing_response_is_scored_by_the_policy_and_counted(failing: str, start: Start) -> None:
    run = start({0: ["1", failing, "0"]}, "reward.on_error=zero")
    metrics = run.train()
    # (1 + 0 + 0) / 3; standard deviation sqrt((0.4444 + 0.1111 + 0.1111) / 2) = 0.5774: 0.6667 / 0.5774.
    assert run.column("advantages") == [1.155, -0.577, -0.577]
    assert (metrics["reward/errors"], metrics["reward/unscored"]) == (1.0, 0.0)

    run = start({0: ["1", failing, "0"]}, "reward.on_error=mask")
    metrics = run.train()
    assert run.column("advantages") == [0.707, 0.0, -0.707]
    assert (metrics["reward/errors"], metrics["reward/unscored"]) == (1.0, 1.0)

    reason = {"raise": "ZeroDivisionError", "kill": "SIGKILL", "nan": "returned nan"}[failing]
    with pytest.raises(RewardError, match=rf"(?s)sample 1 .*{failing}.*{reason}"):
        start({0: ["1", failing, "0"]}).train()


def test_a_response_that_is_never_scored_costs_its_time_limit_and_is_counted(start: Start) -> None:
    run = start({0: ["1", "sleep", "0", "1"]}, "reward.timeout_s=5")
    started = time.monotonic()
    metrics = run.train()
    assert time.monotonic() - started < 15
    assert (metrics["reward/timeouts"], metrics["reward/errors"], metrics["critic/score/mean"]) == (1.0, 0.0, 0.5)


def test_validation_writes_every_response_and_shows_the_first(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(
        {0: ["1"], 1: ["none"], 2: ["30"]}, f"data.val_files={tmp_path / 'train.jsonl'}", "trainer.val_only=True",
        f"trainer.validation_data_dir={tmp_path / 'samples'}", "trainer.log_val_generations=2",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "verl_lite.trainer.ppo"):
        metrics = run.train()
    assert metrics["val-core/verl_lite/addition/reward/mean@1"] == 15.5  # (1 + 30) / 2: one has no score
    prompts = [row["prompt"][0]["content"] for row in addition_rows(3)]
    truths = [row["reward_model"]["ground_truth"] for row in addition_rows(3)]
    shown = [message for message in caplog.messages if "ground truth" in message]
    assert shown == [
        f"  {prompts[0]!r} → '1'  (score 1, ground truth {truths[0]!r})",
        f"  {prompts[1]!r} → 'none'  (score none, ground truth {truths[1]!r})",
    ]
    rows = [json.loads(line) for line in (tmp_path / "samples" / "0.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["response"], row["score"]) for row in rows] == [
        (prompts[0], "1", 1.0), (prompts[1], "none", None), (prompts[2], "30", 30.0),
    ]  # fmt: skip
    assert {"step": 0, "uid": "0-2", "ground_truth": truths[2], "extra": {"digits": 2}}.items() <= rows[2].items()


def test_validation_counts_every_row_once_whatever_the_size_of_its_batches(start: Start, tmp_path: Path) -> None:
    texts = {row: [score] for row, score in enumerate("11001")}
    run = start(texts, f"data.val_files={tmp_path / 'train.jsonl'}", "data.val_batch_size=2", "trainer.val_only=True")
    # (1 + 1 + 0 + 0 + 1) / 5; the mean of the batches' means would be (1 + 0 + 1) / 3, without the last row 2 / 4.
    assert run.train()["val-core/verl_lite/addition/reward/mean@1"] == 0.6


def test_a_validation_value_that_is_no_number_does_not_get_into_checkpoints(start: Start, tmp_path: Path) -> None:
    # JSON knows no NaN: the checkpoint would be refused as damaged.
    run = start({0: ["no acc"]}, f"data.val_files={tmp_path / 'train.jsonl'}", "trainer.val_only=True")
    assert math.isnan(run.train()["val-core/verl_lite/addition/acc/mean@1"])
    assert run.trainer.validations == {}


def test_prompts_that_never_fill_a_batch_are_told_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        start({0: ["1"], 1: ["2"], 2: ["3"]}, prompts=2)
    assert [r.getMessage() for r in caplog.records if "do not fill" in r.message] == [
        "the last 1 of 3 prompts of every epoch do not fill a batch of 2 and are left out"
    ]


def test_prompts_whose_responses_score_alike_are_replaced_by_the_next(start: Start, tmp_path: Path) -> None:
    texts = {0: ["1", "1"], 1: ["0", "5"], 2: ["none", "2"], 3: ["7", "7"], 4: ["4", "3"], 5: ["8", "9"]}
    run = start(
        texts, "algorithm.filter_groups.enable=True", f"trainer.rollout_data_dir={tmp_path / 'samples'}", prompts=2
    )  # fmt: skip
    metrics = run.train()
    assert run.column("token_level_scores") == [0.0, 5.0, 4.0, 3.0]
    assert metrics["training/optimizer_steps"] == run.trainer.plan.actor.optimizer_steps == 1
    # Rounds of two: 0 and 1, 2 and 3, 4 and 5; three prompts do not differ, the last one is not needed.
    assert [metrics[f"training/{name}"] for name in ("num_gen_batches", "filtered_prompts", "surplus_prompts")] == [
        3, 3, 1,
    ]  # fmt: skip
    assert run.trainer.sampler is not None and run.trainer.sampler.state_dict()["position"] == 6  # as drawn
    [file] = (tmp_path / "samples").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "1.jsonl" and [row["response"] for row in rows] == sum(texts.values(), [])


def test_another_value_of_the_reward_can_tell_the_groups_apart(start: Start) -> None:
    filtered = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=digits")
    run = start({0: ["1", "2"], 1: ["10", "2"]}, *filtered)
    run.train()
    assert run.column("token_level_scores") == [10.0, 2.0]
    with pytest.raises(ValueError, match="metric=acc is not among what the reward function gives: reward, digits"):
        start({0: ["1", "2"]}, *filtered[:1], "algorithm.filter_groups.metric=acc").train()


def test_the_search_for_prompts_that_differ_ends(start: Start) -> None:
    run = start({0: ["1", "1"]}, "algorithm.filter_groups.enable=True")
    with pytest.raises(RuntimeError, match="only 0 of data.train_batch_size=1 prompts .* 10 rounds in a row"):
        run.train()
    run = start(
        {0: ["1", "1"]}, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.on_limit=fill",
        "algorithm.filter_groups.max_num_gen_batches=2",
    )  # fmt: skip
    metrics = run.train()
    assert run.column("advantages") == [0.0, 0.0]
    assert metrics["training/optimizer_steps"] == 1


def test_the_engines_sleep_from_the_last_response_to_the_new_weights(start: Start) -> None:
    """Two rounds of dynamic sampling and the greedy baseline all need the engines awake."""
    run = start(
        {0: ["1", "1"], 1: ["0", "1"]}, "algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=2", "trainer.val_before_train=False",
    )  # fmt: skip
    order: list[str] = []
    for group in (run.trainer.workers.rollout.group, run.trainer.workers.actor):
        for name, answer in group.answers.items():
            group.answers[name] = lambda *args, _name=name, _answer=answer, **same: (
                order.append(_name) or _answer(*args, **same)
            )
    run.trainer.send_weights = lambda: order.append("send_weights")
    run.train()
    assert order[:3] == ["generate"] * 3
    assert order[3:7] == ["sleep", "compute_log_probs", "update", "send_weights"]


def test_a_row_whose_last_token_is_rejected_keeps_its_reward_and_trains_its_other_tokens(start: Start) -> None:
    run = start(
        {0: ["1", "0"]}, "algorithm.norm_adv_by_std_in_grpo=False", "algorithm.rollout_correction.rollout_rs=token",
        "algorithm.rollout_correction.rollout_is=token",
    )  # fmt: skip

    def compute_log_probs(shard: DataProto, schedule: Any) -> DataProto:
        log_probs = run.compute_log_probs(shard, schedule)
        log_probs.batch["old_log_probs"][0, 1] = 0.0  # e times the engine's probability, more than twice
        return log_probs

    run.trainer.workers.actor.answers["compute_log_probs"] = compute_log_probs  # type: ignore[attr-defined]
    metrics = run.train()
    trained = run.trained[0].batch
    # The digit and the end token, on which the reward stands; mean score 0.5.
    rows = sorted(zip(trained["response_mask"].tolist(), trained["advantages"].tolist(), strict=True))
    assert rows == [([1, 0], [0.5, 0.5]), ([1, 1], [-0.5, -0.5])]
    assert trained["rollout_weights"].max() == 2  # cut from e
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25
