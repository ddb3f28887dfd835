"""The driver's loop. `PPOTrainer.step` is the whole algorithm, top to bottom; the driver never touches a model."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS, ESTIMATORS_WITH_GREEDY_BASELINE
from verl_lite.algorithms.advantages import AdvantageInputs, group_ids
from verl_lite.algorithms.aggregate import MiniBatchTotals, masked_mean
from verl_lite.algorithms.correction import correct_rollout, rollout_probs_diff
from verl_lite.algorithms.kl import apply_kl_penalty, make_kl_controller
from verl_lite.algorithms.lr_schedule import learning_rate
from verl_lite.batching import BatchPlan, PassPlan, UpdatePlan
from verl_lite.config import Config, OptimConfig, redacted, show
from verl_lite.data.sampler import validation_batches
from verl_lite.distributed.cluster import object_store_used_bytes
from verl_lite.distributed.memory import own_memory_bytes
from verl_lite.distributed.placement import ResourcePool
from verl_lite.distributed.worker_group import WorkerGroup, phase
from verl_lite.plugins import pick_options, resolve
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import RewardManager, Rewards, build_manager
from verl_lite.rewards.pool import RewardPool
from verl_lite.tracking import Tracking
from verl_lite.trainer.checkpoints import Checkpoint, CheckpointError, Checkpoints, architecture, changed_keys, plain
from verl_lite.trainer.group_filter import RETURNED, GroupFilter
from verl_lite.trainer.metrics import (
    compute_data_metrics,
    compute_memory_metrics,
    compute_mfu,
    compute_seqlen_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    validation_metrics,
)
from verl_lite.trainer.nonfinite import describe_first_skipped
from verl_lite.trainer.samples import Sample, read_samples, write_samples
from verl_lite.trainer.setup import TrainingData, Workers, make_sampler, reward_function, start_workers
from verl_lite.trainer.stopping import StoppedEarly, StopRequest
from verl_lite.workers.actor import ActorWorker
from verl_lite.workers.critic import CriticWorker
from verl_lite.workers.ref import RefWorker
from verl_lite.workers.reward_model import RewardModelWorker
from verl_lite.workers.rollout import Purpose, join_batches
from verl_lite.workers.update import LOSS_COLUMNS, MODEL_COLUMNS, MiniBatchResult, UpdateSummary, summarise_updates

logger = logging.getLogger(__name__)

# What generating and scoring read.
PROMPT_COLUMNS = ["uid", "prompt_ids", "raw_prompt", "data_source", "reward_style", "ground_truth", "extra_info"]


def run(
    config: Config, plan: BatchPlan, data: TrainingData, pool: ResourcePool, log_dir: Path, stop: StopRequest
) -> None:
    """Start the workers on `pool`, train, and end what was started; raises `StoppedEarly` once `stop` is set."""
    trainer, checkpoint = config.trainer, data.checkpoint
    if checkpoint is not None and checkpoint.step >= data.total_training_steps and not trainer.val_only:
        logger.info(
            "nothing left to do: %s is of step %d of %d (more: trainer.total_training_steps or trainer.total_epochs; "
            "anew: trainer.resume_mode=disable)", checkpoint.folder, checkpoint.step, data.total_training_steps,
        )  # fmt: skip
        return
    with contextlib.ExitStack() as stack:
        reward_pool = stack.enter_context(
            RewardPool(
                reward_function(config),
                num_workers=config.reward.num_workers,
                timeout_s=config.reward.timeout_s,
                on_error=config.reward.on_error,
                log_path=str(log_dir / "reward.log"),
            )
        )
        reward_pool.start()
        rewards = build_manager(
            config.reward, reward_pool, data.tokenizer, max_response_length=config.data.max_response_length
        )
        started = time.monotonic()
        logger.info("starting %s and the generation engine", count(config.num_slots, "training rank"))
        workers = start_workers(config, data, pool, log_dir)
        stack.callback(workers.close)
        roles = [name for name, group in vars(workers).items() if group is not None and name != "rollout"]
        logger.info(
            "ready after %.0f s: %s on %s, %s", time.monotonic() - started, ", ".join(roles),
            count(workers.actor.world_size, "rank"),
            count(workers.rollout.count, f"{config.actor_rollout_ref.rollout.name} engine"),
        )  # fmt: skip
        tracking = Tracking(
            trainer.logger,
            trainer.run_dir,
            trainer.project_name,
            trainer.experiment_name,
            redacted(config),
            total_steps=data.total_training_steps,
            updates_per_step=plan.actor.optimizer_steps,
            first_step=None if trainer.val_only else 0 if checkpoint is None else checkpoint.step + 1,
        )
        stack.callback(tracking.finish)
        ppo = PPOTrainer(config, plan, data, workers, rewards, tracking, stop)
        ppo.fit()
        tracking.finish()
        for line in ppo.summary():
            logger.info(line)


class PPOTrainer:
    """One run over worker groups that are up."""

    def __init__(
        self,
        config: Config,
        plan: BatchPlan,
        data: TrainingData,
        workers: Workers,
        rewards: RewardManager,
        tracking: Tracking,
        stop: StopRequest | None = None,
    ) -> None:
        self.config, self.plan, self.data = config, plan, data
        self.workers, self.rewards, self.tracking = workers, rewards, tracking
        self.stop = stop or StopRequest()
        self.sampler = None if data.train is None else make_sampler(config, data.train)
        self.estimator = resolve(config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS, key="algorithm.adv_estimator")
        self.needs_baseline = config.algorithm.adv_estimator in ESTIMATORS_WITH_GREEDY_BASELINE
        self.kl_controller = make_kl_controller(**vars(config.algorithm.kl_ctrl))
        self.checkpoints = Checkpoints(
            Path(config.trainer.default_local_dir),
            keep={"actor": config.trainer.max_actor_ckpt_to_keep, "critic": config.trainer.max_critic_ckpt_to_keep},
            run=uuid.uuid4().hex if data.checkpoint is None else data.checkpoint.state["run"],
        )
        self.global_step = 0  # the training step being made
        self.skipped_in_a_row = {"actor": 0, "critic": 0}
        self.first_skipped = ""  # what is known of the first update of the run that was skipped
        self.timing: dict[str, float] = {}
        self.rollouts: list[Sample] = []  # the step's responses, where they are written
        self.validations: dict[str, list[tuple[float, int]]] = {}  # per core metric: (value, step)

    def fit(self) -> None:
        """Train to the last step, from the checkpoint on if there is one; validate, save and log where it is due."""
        trainer, last_step = self.config.trainer, self.data.total_training_steps
        if self.data.checkpoint is not None:
            self.resume(self.data.checkpoint)
        if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
            self.log(self.validate())
            self.timing = {}
        while self.global_step < last_step:
            assert self.sampler is not None, "there are no steps without training data"
            self.stop.in_steps = True
            self.global_step += 1
            with self.timed("step"):
                batch, metrics = self.step(self.next_prompts())
            metrics |= {"training/global_step": self.global_step, "training/epoch": self.sampler.epoch}
            if is_due(trainer.test_freq, self.global_step, last_step):
                metrics |= self.validate()
            stopping = self.stop.is_set() and self.global_step < last_step
            written, saved = None, None
            if is_due(trainer.save_freq, self.global_step, self.global_step if stopping else last_step):
                with self.timed("save_checkpoint"), self.saving():
                    written = self.write_checkpoint()
            self.log(metrics | self.describe(batch))
            if written is not None:  # its name only now: a step that counts as saved is also logged
                with self.saving():
                    saved = self.checkpoints.commit(written)
            if stopping or (saved is not None and self.stop.is_set() and self.global_step < last_step):
                raise StoppedEarly(self.global_step, saved)

    def step(self, prompts: DataProto) -> tuple[DataProto, dict[str, float]]:
        """One training step: sample responses, score them, estimate advantages, update, hand the weights over."""
        workers, plan, seed = self.workers, self.plan, self.shuffle_seed()
        with self.timed("gen"):
            batch = self.generate(prompts)
        with self.timed("reward"):
            batch, metrics = self.score(batch)
        if self.config.algorithm.filter_groups.enable:
            batch, metrics = self.exchange_equal_groups(prompts, batch, metrics)
        self.write_rollouts()
        if self.needs_baseline:
            with self.timed("baseline"):
                batch = self.add_baseline(batch)
        workers.rollout.sleep()  # the GPU's memory is the training's now; the new weights wake it
        with self.timed("old_log_prob"):
            batch = forward(workers.actor, ActorWorker.compute_log_probs, batch, plan.forward_pass("old_log_probs"))
        if workers.ref is not None:
            with self.timed("ref"):
                batch = forward(workers.ref, RefWorker.compute_log_probs, batch, plan.forward_pass("ref_log_probs"))
        if workers.critic is not None:
            with self.timed("values"):
                batch = forward(workers.critic, CriticWorker.compute_values, batch, plan.forward_pass("values"))
        with self.timed("adv"):
            batch, more = self.compute_advantages(batch)
            metrics |= more
        if workers.critic is not None:
            assert plan.critic is not None, "a critic is planned where one exists"
            with self.timed("update_critic"):
                rate = self.learning_rate(self.config.critic.optim)
                results = update(workers.critic, CriticWorker.update, batch, plan.critic, lr=rate, seed=seed)
            self.look_at_skipped("critic", results, batch, plan.critic, seed)
            metrics |= self.account("critic", results, rate)
        if self.global_step > self.config.trainer.critic_warmup:
            with self.timed("update_actor"):
                rate = self.learning_rate(self.config.actor_rollout_ref.actor.optim)
                results = update(workers.actor, ActorWorker.update, batch, plan.actor, lr=rate, seed=seed)
            self.look_at_skipped("actor", results, batch, plan.actor, seed)
            metrics |= self.account("actor", results, rate)
            with self.timed("update_weights"):
                self.send_weights()
        else:
            workers.wake_engines()
            metrics |= {"training/optimizer_steps": 0, "training/held_back_steps": plan.actor.optimizer_steps}
        return batch, metrics

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over where the checkpoint stands, and hand its weights to the engines."""
        workers, state = self.workers, checkpoint.state
        workers.rollout.sleep()
        workers.actor.call(ActorWorker.load_checkpoint, str(checkpoint.folder / "actor"))
        if workers.critic is not None:
            workers.critic.call(CriticWorker.load_checkpoint, str(checkpoint.folder / "critic"))
        self.global_step = checkpoint.step
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.skipped_in_a_row = dict(state["skipped_in_a_row"])
        self.validations = {name: [(value, step) for value, step in found] for name, found in state["best"].items()}
        self.send_weights()
        if "extra" in self.config.actor_rollout_ref.actor.checkpoint.load_contents:
            workers.rollout.load_random_state(str(checkpoint.folder / "rollout"))
        steps = "" if self.sampler is None else f" of {self.data.total_training_steps}"
        loaded = ", ".join(self.config.actor_rollout_ref.actor.checkpoint.load_contents)
        logger.info("resumed from %s: step %d%s is done; read: %s", checkpoint.folder, checkpoint.step, steps, loaded)
        changes = [
            f"{plain(key)} {plain(show(old))} → {plain(show(new))}"
            for key, (old, new) in changed_keys(self.config, checkpoint).items()
            if workers.critic is not None or not key.startswith("critic.")
        ]
        if changes:
            logger.info("changed since: %s", ", ".join(changes))

    def write_checkpoint(self) -> Path:
        """Everything a run needs to go on after this step, in a folder without its final name."""
        workers = self.workers
        folder = self.checkpoints.begin(self.global_step)
        refused = workers.actor.call(ActorWorker.save_checkpoint, str(folder / "actor"))
        if workers.critic is not None:
            refused += workers.critic.call(CriticWorker.save_checkpoint, str(folder / "critic"))
        if "extra" in self.config.actor_rollout_ref.actor.checkpoint.save_contents:
            refused += workers.rollout.save_random_state(str(folder / "rollout"))
        if problems := [problem for problem in refused if problem]:
            raise OSError(problems[0])
        for role in ("actor", "critic") if workers.critic is not None else ("actor",):
            self.data.tokenizer.save_pretrained(folder / role / "huggingface")
        self.checkpoints.complete(folder, self.state_dict())
        return folder

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Errors of the disk inside say whose folder it is."""
        try:
            yield
        except OSError as error:
            self.checkpoints.discard()
            raise CheckpointError(
                f"step {self.global_step} could not be saved in trainer.default_local_dir="
                f"{self.checkpoints.directory}: {error}; the checkpoints before it are whole"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside what the workers write; plain JSON."""
        assert self.sampler is not None and self.data.train is not None, "there are no steps without training data"
        policy, critic = self.config.actor_rollout_ref, self.config.critic
        contents = {"actor": policy.actor.checkpoint.save_contents}
        shapes = {"actor": architecture(policy.model.path, policy.model.override_config)}
        if self.config.needs_critic:
            contents["critic"] = critic.checkpoint.save_contents
            shapes["critic"] = architecture(critic.model.path, critic.model.override_config)
        return {
            "step": self.global_step,
            "total_training_steps": self.data.total_training_steps,
            "ranks": self.config.num_slots,
            "contents": contents,
            "architecture": shapes,
            "sampler": self.sampler.state_dict(),
            "data": self.data.train.fingerprint(),
            "kl_controller": self.kl_controller.state_dict(),
            "skipped_in_a_row": self.skipped_in_a_row,
            "best": self.validations,
            "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
            "config": redacted(self.config),
        }

    def validate(self) -> dict[str, float]:
        """Answer every validation prompt with the current weights; `val-core/…` and `val-aux/…`."""
        val, data = self.data.val, self.config.data
        samples: list[Sample] = []
        if val is None:
            return {}
        with self.timed("testing"):
            for rows in validation_batches(
                len(val), data.val_batch_size, shuffle=data.validation_shuffle, seed=data.seed
            ):
                batch = self.generate(val.batch(rows, 0), "validate")
                samples += read_samples(batch, self.judge(batch), self.data.tokenizer)
        if self.config.trainer.validation_data_dir is not None:
            write_samples(samples, self.config.trainer.validation_data_dir, self.global_step)
        for sample in samples[: self.config.trainer.log_val_generations]:
            logger.info("  %s", sample.line())
        metrics = validation_metrics(samples)
        for name, value in metrics.items():
            # A reward function's own values may be NaN, which is no number in JSON.
            if name.startswith("val-core/") and "/mean@" in name and math.isfinite(value):
                self.validations.setdefault(name, []).append((value, self.global_step))
        return metrics

    def log(self, metrics: dict[str, float]) -> None:
        """Hand a step's metrics to the trackers."""
        if metrics:
            self.tracking.log(metrics, step=self.global_step)

    def summary(self) -> Iterator[str]:
        """What came of the run and where it can be looked at."""
        for name, values in self.validations.items():
            best = max(value for value, _ in values)
            shown = [values[0], *values[-1:][: len(values) - 1]]
            yield f"{name}: " + ", ".join(f"{value:.3f} at step {step}" for value, step in shown) + f", best {best:.3f}"
        folder, loggers = self.config.trainer.run_dir, self.config.trainer.logger
        yield f"run folder: {folder} (metrics.jsonl has one line per step, logs/ what every process printed)"
        if "tensorboard" in loggers:
            yield f"curves: tensorboard --logdir {shlex.quote(f'{folder}/tensorboard')}"

    def next_prompts(self) -> DataProto:
        """The next `train_batch_size` prompts in the sampler's order."""
        assert self.data.train is not None and self.sampler is not None, "there are no steps without training data"
        epoch, rows = self.sampler.next()
        return self.data.train.batch(rows, epoch)

    def generate(self, prompts: DataProto, purpose: Purpose = "train") -> DataProto:
        """Every prompt with its responses, prompt after prompt; the engines share the prompts."""
        parts = self.workers.rollout.generate(prompts, purpose=purpose, step=self.global_step)
        return join_batches(parts, pad_token_id=self.data.tokenizer.pad_token_id)

    def score(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Adds `token_level_scores` and what else the reward function returned."""
        rewards = self.judge(batch)
        if self.config.trainer.rollout_data_dir is not None:
            self.rollouts += read_samples(batch, rewards, self.data.tokenizer)
        returned = {f"{RETURNED}{name}": values for name, values in rewards.columns.items()}
        columns = DataProto.from_dict({"token_level_scores": rewards.token_level_scores}, returned)
        # A response without a score takes part in nothing: not in its group's mean, not in the loss.
        mask = batch.batch["response_mask"] * rewards.scored[:, None]
        return with_tensors(batch, response_mask=mask).union(columns), rewards.metrics

    def judge(self, batch: DataProto) -> Rewards:
        """The rewards of the batch's responses: by the reward model in rows of that style, else by the function."""
        group, transcriber = self.workers.reward_model, self.data.transcriber
        rows = [row for row, style in enumerate(batch.non_tensor_batch["reward_style"]) if style == "model"]
        if group is None or not rows:
            return self.rewards.score(batch)
        assert transcriber is not None, "loaded where there is a reward model"
        judged = transcriber.transcribe(batch[rows])
        judged = forward(group, RewardModelWorker.compute_scores, judged, self.plan.forward_pass("reward_model"))
        scores = judged.batch["scores"][:, 0]
        if not scores.isfinite().all():
            raise RuntimeError(
                f"the reward model {self.config.reward.reward_model.model.path} gave a score that is not finite; "
                "compute in a wider dtype (reward.reward_model.model.fsdp_config.dtype=float32)"
            )
        return self.rewards.score(batch, dict(zip(rows, scores.tolist(), strict=True)))

    def exchange_equal_groups(
        self, prompts: DataProto, batch: DataProto, metrics: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        """Dynamic sampling: prompts whose responses all score alike give way to others, until the batch is full."""
        assert self.sampler is not None, "there are no steps without training data"
        groups = GroupFilter(
            self.config.algorithm.filter_groups,
            num_prompts=len(prompts),
            rounds_per_epoch=self.sampler.steps_per_epoch,
            pad_token_id=self.data.tokenizer.pad_token_id,
        )
        groups.add(batch, metrics)
        while not groups.complete:
            with self.timed("gen"):
                batch = self.generate(self.next_prompts())
            with self.timed("reward"):
                groups.add(*self.score(batch))
        return groups.result()

    def write_rollouts(self) -> None:
        """`rollout_data_dir/{step}.jsonl`: every response of the step, those of filtered prompts too."""
        if self.config.trainer.rollout_data_dir is not None:
            write_samples(self.rollouts, self.config.trainer.rollout_data_dir, self.global_step)
        self.rollouts = []

    def add_baseline(self, batch: DataProto) -> DataProto:
        """Adds `baseline_scores` [B]: what one greedy response to the row's prompt scores."""
        groups = group_ids(batch.non_tensor_batch["uid"])
        first_rows = np.unique(groups, return_index=True)[1]
        prompts = batch.select([], PROMPT_COLUMNS)[first_rows]  # row i: the prompt of group i
        greedy = self.generate(prompts, "baseline")
        rewards = self.judge(greedy)
        # Rows that have nothing to be compared with take part in nothing, as rows without a score.
        mask = batch.batch["response_mask"] * rewards.scored[groups, None]
        scores = rewards.token_level_scores.sum(-1)[groups]
        return with_tensors(batch, baseline_scores=scores, response_mask=mask)

    def compute_advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Adds `token_level_rewards`, `advantages`, `returns` and, where the correction weighs, `rollout_weights`."""
        algorithm, columns = self.config.algorithm, batch.batch
        metrics: dict[str, float] = {}
        mask, rewards = columns["response_mask"], columns["token_level_scores"]
        if algorithm.use_kl_in_reward:
            coefficient = self.kl_controller.kl_coef
            rewards, kl = apply_kl_penalty(
                rewards, columns["old_log_probs"], columns["ref_log_probs"], mask,
                kl_coef=coefficient, name=algorithm.kl_penalty,
            )  # fmt: skip
            self.kl_controller.update(kl, len(batch))
            metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        inputs = AdvantageInputs(
            rewards,
            mask,
            group_ids(batch.non_tensor_batch["uid"]),
            columns.get("values"),
            columns.get("baseline_scores"),
        )
        estimated = self.estimator(inputs, **pick_options(self.estimator, vars(algorithm)))
        added = {"token_level_rewards": rewards, "advantages": estimated.advantages, "returns": estimated.returns}
        if "rollout_log_probs" in columns.keys():  # noqa: SIM118
            log_probs = columns["old_log_probs"], columns["rollout_log_probs"]
            correction = correct_rollout(*log_probs, mask, **vars(algorithm.rollout_correction))
            metrics |= correction.metrics | rollout_probs_diff(*log_probs, mask)
            added["response_mask"] = correction.response_mask
            if correction.weights is not None:
                added["rollout_weights"] = correction.weights
        return with_tensors(batch, **added), metrics

    def send_weights(self) -> None:
        """Wake the engines with the actor's weights."""
        self.workers.rollout.send_weights(self.global_step)

    def account(self, role: str, results: list[list[list[MiniBatchResult]]], rate: float) -> dict[str, float]:
        """The metrics of an update, after making sure that it made the steps the plan says."""
        plan = self.plan.actor if role == "actor" else self.plan.critic
        assert plan is not None, "planned where it exists"
        summary = summarise_updates(results)
        made = summary.done + len(summary.skipped) + summary.empty
        if made != plan.optimizer_steps:
            raise RuntimeError(
                f"step {self.global_step}: the {role} made {summary.done} optimizer steps, skipped "
                f"{len(summary.skipped)} and had {summary.empty} without a token, together {made}; the plan says "
                f"{plan.optimizer_steps}. This is a fault of verl_lite: please report it with the plan"
            )
        self._stop_if_skipping(role, summary, plan)
        metrics = {f"{role}/{name}": value for name, value in {**summary.metrics, "lr": rate}.items()}
        if role == "critic":
            return metrics | {"training/critic_optimizer_steps": summary.done}
        actor = self.config.actor_rollout_ref.actor
        if actor.has_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return metrics | {
            "actor/ppo_kl_first": summary.first.get("ppo_kl", 0.0),
            "training/optimizer_steps": summary.done,
            "training/skipped_steps": len(summary.skipped),
            "training/empty_steps": summary.empty,
        }

    def look_at_skipped(
        self, role: str, results: list[list[list[MiniBatchResult]]], batch: DataProto, plan: UpdatePlan, seed: int
    ) -> None:
        """Warn of the first update of the run that was skipped, and write its rows down."""
        outcomes = [mini.outcome for epoch in results for mini in epoch[0]]  # the same on every rank
        if self.first_skipped or "skipped" not in outcomes:
            return
        path = Path(self.config.trainer.run_dir) / "nonfinite" / f"step_{self.global_step}_{role}"
        schedules = plan.schedules(row_lengths(batch), seed)
        try:
            what = describe_first_skipped(results, schedules, batch, path, self.data.tokenizer)
        except OSError as error:  # a full disk: what is written helps, the run doesn't need it
            what = f"its rows cannot be written to {path}.jsonl: {error}"
        if what is not None:
            self.first_skipped = f"step {self.global_step}, {role}: {what}"
            logger.warning("an update was skipped: %s (of later ones only the number is kept)", self.first_skipped)

    def _stop_if_skipping(self, role: str, summary: UpdateSummary, plan: UpdatePlan) -> None:
        limit = self.config.trainer.max_skipped_steps
        for index in range(plan.optimizer_steps):
            self.skipped_in_a_row[role] = self.skipped_in_a_row[role] + 1 if index in summary.skipped else 0
            if self.skipped_in_a_row[role] > limit:
                actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
                rate, dtype = f"critic.optim.lr={critic.optim.lr:g}", f"critic.fsdp.dtype={critic.fsdp.dtype}"
                if role == "actor":
                    rate = f"actor_rollout_ref.actor.optim.lr={actor.optim.lr:g}"
                    dtype = f"actor_rollout_ref.actor.fsdp_config.dtype={actor.fsdp_config.dtype}"
                raise RuntimeError(
                    f"step {self.global_step}: more than trainer.max_skipped_steps={limit} {role} updates in a row had "
                    f"a loss or gradient that is not finite. The first: {self.first_skipped}. Look at the rewards and "
                    f"at {role}/grad_norm of the steps before; lower {rate}, or compute in a wider dtype than {dtype}"
                )

    def describe(self, batch: DataProto) -> dict[str, float]:
        """What the batch, the clock and the memory say of the step."""
        data, timing, lengths = self.config.data, self.timing, row_lengths(batch)
        self.timing = {}
        order = self.plan.forward_pass("old_log_probs").schedule(lengths)
        entropy = masked_mean(batch.batch["entropies"], batch.batch["response_mask"])
        limits = {"max_prompt_length": data.max_prompt_length, "max_response_length": data.max_response_length}
        return {
            "actor/entropy": float(entropy),
            **compute_data_metrics(batch, **limits),
            **compute_seqlen_metrics(lengths, [order.rank_rows(rank) for rank in range(self.plan.actor.dp_size)]),
            **compute_timing_metrics(timing, batch),
            **compute_throughput_metrics(batch, step_s=timing["step"], num_slots=self.config.num_slots),
            **compute_memory_metrics(),
            **self.own_memory(),
            "rollout/restarts": self.workers.rollout.restarts,
            **self.peak_memory(),
            **self.model_flops_utilisation(lengths, timing),
        }

    def model_flops_utilisation(self, lengths: list[int], timing: dict[str, float]) -> dict[str, float]:
        """perf/mfu/actor, on GPUs, of steps that update the actor."""
        policy = self.config.actor_rollout_ref
        model = Path(policy.model.path) / "config.json"
        if self.config.trainer.device != "cuda" or "update_actor" not in timing or not model.is_file():
            return {}
        return compute_mfu(
            json.loads(model.read_text()),
            lengths,
            passes=policy.actor.ppo_epochs,
            seconds=timing["update_actor"],
            num_gpus=self.config.num_slots,
            device_name=self.workers.actor.call(ActorWorker.device_name)[0],
        )

    def own_memory(self) -> dict[str, float]:
        """perf/{driver, worker, rollout}_memory_gb and perf/object_store_used_gb, as they are between two steps."""
        held = {
            "driver_memory": own_memory_bytes(children=False),  # the embedded Ray's processes are its children
            "worker_memory": max(self.workers.actor.call(ActorWorker.own_memory)),
            "rollout_memory": max(self.workers.rollout.own_memory()),
            "object_store_used": object_store_used_bytes(),
        }
        return {f"perf/{name}_gb": size / 2**30 for name, size in held.items()}

    def peak_memory(self) -> dict[str, float]:
        """perf/max_memory_allocated_gb (GPU) or perf/max_memory_rss_gb (CPU): of the fullest rank, by phase too."""
        workers, name = self.workers, "allocated" if self.config.trainer.device == "cuda" else "rss"
        ranks = workers.actor.call(ActorWorker.pop_peak_memory)
        ranks += workers.ref.call(RefWorker.pop_peak_memory) if workers.ref else []
        ranks += workers.critic.call(CriticWorker.pop_peak_memory) if workers.critic else []
        ranks += workers.reward_model.call(RewardModelWorker.pop_peak_memory) if workers.reward_model else []
        peaks: dict[str, float] = {}
        for rank in ranks:
            for phase_name, held in rank.items():
                key = f"perf/max_memory_{name}_gb/{phase_name}"
                peaks[key] = max(peaks.get(key, 0.0), held / 2**30)
        return {f"perf/max_memory_{name}_gb": max(peaks.values(), default=0.0), **peaks}

    def learning_rate(self, optim: OptimConfig) -> float:
        """Of this training step."""
        return learning_rate(
            self.global_step - 1,
            lr=optim.lr,
            total_steps=self.data.total_training_steps,
            schedule=optim.lr_scheduler_type,
            warmup_steps=optim.lr_warmup_steps,
            warmup_ratio=optim.lr_warmup_steps_ratio,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
        )

    def shuffle_seed(self) -> int:
        """Other orders of the rows at every training step."""
        return self.config.actor_rollout_ref.actor.data_loader_seed * 1_000_003 + self.global_step

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures a phase as `timing_s/{name}`; errors inside name it."""
        started = time.perf_counter()
        with phase(f"step {self.global_step}: {name}"):
            yield
        self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - started


def count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def is_due(frequency: int, step: int, last_step: int) -> bool:
    """Every `frequency` steps and at the last one; never when it is 0 or below."""
    return frequency > 0 and (step % frequency == 0 or step == last_step)


def with_tensors(batch: DataProto, **columns: Tensor) -> DataProto:
    """The batch with these tensor columns added or replaced."""
    return DataProto.from_dict({**dict(batch.batch.items()), **columns}, batch.non_tensor_batch, batch.meta_info)


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens of each row, prompt and response."""
    lengths: list[int] = batch.batch["attention_mask"].sum(-1).tolist()
    return lengths


def columns_read(batch: DataProto, names: Sequence[str]) -> DataProto:
    """What is sent to the training ranks: no column that they do not read, nor any of objects."""
    return batch.select([name for name in names if name in batch.batch.keys()], [])  # noqa: SIM118


def forward(group: WorkerGroup[Any], method: Callable[..., DataProto], batch: DataProto, plan: PassPlan) -> DataProto:
    """The batch with the columns `method` computes for every row."""
    schedule, rows = plan.schedule(row_lengths(batch)), columns_read(batch, MODEL_COLUMNS)
    ranks = range(group.dp_size)
    results = group.map(
        method, [rows[schedule.rank_rows(rank)] for rank in ranks], [schedule.rank_schedule(rank) for rank in ranks]
    )
    return batch.union(DataProto.concat(results)[schedule.inverse_order()])


def update(
    group: WorkerGroup[Any], method: Callable[..., Any], batch: DataProto, plan: UpdatePlan, *, lr: float, seed: int
) -> list[list[list[MiniBatchResult]]]:
    """Run every epoch's mini-batches on the ranks: per epoch, per rank, one result per mini-batch."""
    rows, mask = columns_read(batch, (*MODEL_COLUMNS, *LOSS_COLUMNS)), batch.batch["response_mask"]
    results, ranks = [], range(group.dp_size)
    for schedule in plan.schedules(row_lengths(batch), seed):
        totals = [MiniBatchTotals.count(mask[list(mini.rows)]) for mini in schedule.mini_batches]
        shards = [rows[schedule.rank_rows(rank)] for rank in ranks]
        orders = [schedule.rank_schedule(rank) for rank in ranks]
        results.append(group.map(method, shards, orders, totals=totals, lr=lr))
    return results
