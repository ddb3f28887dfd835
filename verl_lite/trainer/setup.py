"""What a run stands on: the data, read before anything heavy starts, and the worker groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from verl_lite.algorithms.policy_losses import selector
from verl_lite.config import Config, ModelConfig, RewardModelConfig
from verl_lite.data.dataset import PromptDataset, build_dataset
from verl_lite.data.prompts import load_tokenizer
from verl_lite.data.sampler import Sampler
from verl_lite.distributed.placement import ResourcePool
from verl_lite.distributed.worker_group import Limits, RoleSpec, WorkerGroup, spawn, spawn_rollout
from verl_lite.models.loading import check_weights, load_causal_lm, load_value_model
from verl_lite.plugins import check_options, pick_options, resolve
from verl_lite.rewards import check_data_sources
from verl_lite.rewards.managers import build_manager
from verl_lite.rewards.pool import RewardPool, check_reward_function
from verl_lite.rewards.worker import RewardFunction
from verl_lite.rollout.engine import model_problems
from verl_lite.rollout.weight_transfer import PART_BYTES, roomy_place, transfer_backend
from verl_lite.trainer.checkpoints import Checkpoint, find_checkpoint
from verl_lite.trainer.engines import Engines
from verl_lite.workers.actor import ActorWorker
from verl_lite.workers.critic import CriticWorker
from verl_lite.workers.ref import RefWorker
from verl_lite.workers.reward_model import RewardModelWorker, Transcriber
from verl_lite.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset | None  # None: validation only
    val: PromptDataset | None
    total_training_steps: int
    transcriber: Transcriber | None = None  # for the reward model, where there is one
    checkpoint: Checkpoint | None = None  # to go on from


@dataclass(frozen=True)
class Workers:
    """The worker groups of a run; `ref`, `critic` and `reward_model` exist where the config needs them."""

    rollout: Engines
    actor: WorkerGroup[ActorWorker]
    ref: WorkerGroup[RefWorker] | None
    critic: WorkerGroup[CriticWorker] | None
    reward_model: WorkerGroup[RewardModelWorker] | None

    def wake_engines(self) -> None:
        """Make the engines ready to generate with the weights they have."""
        self.rollout.wake("weights")
        self.rollout.wake("kv_cache")

    def close(self) -> None:
        """End the engines and the training processes."""
        self.rollout.close()
        self.actor.close(ActorWorker.close_transfer)  # the other roles live in the same processes


def load_data(config: Config) -> TrainingData:
    """Read tokenizer and data sets, and load the user's functions. ValueError for whatever the user must mend."""
    model, data, trainer = config.actor_rollout_ref.model, config.data, config.trainer
    check_functions(config)
    vocab_size = check_model(config)
    tokenizer = load_tokenizer(
        data.tokenizer, trust_remote_code=model.trust_remote_code, custom_chat_template=model.custom_chat_template
    )
    # Built once without starting its processes: wrong reward_kwargs show here.
    unstarted = RewardPool(reward_function(config), num_workers=1, timeout_s=1, on_error="raise")
    build_manager(config.reward, unstarted, tokenizer, max_response_length=data.max_response_length)
    end_token_ids(model.path, tokenizer)
    train = val = None
    if not trainer.val_only:
        train = build_dataset(data, data.train_files, tokenizer, max_samples=data.train_max_samples)
    if data.val_files:
        val = build_dataset(data, data.val_files, tokenizer, max_samples=data.val_max_samples)
    datasets = [rows for rows in (train, val) if rows]
    check_rewards(config, datasets)
    largest = {"the prompts' largest": max((rows.largest_token_id for rows in datasets), default=0)}
    largest["its end token"] = tokenizer.eos_token_id or 0
    if unknown := {what: token_id for what, token_id in largest.items() if token_id >= vocab_size}:
        raise ValueError(
            f"actor_rollout_ref.model.path={model.path} has vocab_size={vocab_size}; the tokenizer ({data.tokenizer}) "
            f"is not this model's: token ids {', '.join(f'{token_id} ({what})' for what, token_id in unknown.items())}"
        )
    transcriber = load_transcriber(config.reward.reward_model, tokenizer)
    checkpoint = find_checkpoint(config)
    if checkpoint is not None and checkpoint.warning:
        logger.warning(checkpoint.warning)
    if train is None:
        return TrainingData(tokenizer, None, val, 0, transcriber, checkpoint)
    sampler = make_sampler(config, train)
    if dropped := len(train) % data.train_batch_size:
        logger.info(
            "the last %d of %d prompts of every epoch do not fill a batch of %d and are left out",
            dropped, len(train), data.train_batch_size,
        )  # fmt: skip
    if checkpoint is not None:
        check_place(config, sampler, train, checkpoint)
    total_steps = trainer.total_training_steps or sampler.steps_per_epoch * trainer.total_epochs
    return TrainingData(tokenizer, train, val, total_steps, transcriber, checkpoint)


def make_sampler(config: Config, train: PromptDataset) -> Sampler:
    return Sampler(len(train), config.data.train_batch_size, config.data.shuffle, config.data.seed)


def check_place(config: Config, sampler: Sampler, train: PromptDataset, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose place in the data is not a place in this run's data."""
    sampler.load_state_dict(checkpoint.state["sampler"])
    if checkpoint.state["data"] != train.fingerprint():
        raise ValueError(
            f"data.train_files={config.data.train_files}: other prompts, or other tokens of them, than in the run that "
            f"saved {checkpoint.folder}; go on with the same data and tokenizer, or trainer.resume_mode=disable"
        )


def check_functions(config: Config) -> None:
    """Load the chosen estimator and loss and refuse options they lack, or need and did not get."""
    policy_loss, algorithm = config.actor_rollout_ref.actor.policy_loss, config.algorithm
    loss = resolve(policy_loss.loss_mode, POLICY_LOSSES, key="actor_rollout_ref.actor.policy_loss.loss_mode")
    select = selector(loss)
    check_options(
        loss,
        policy_loss.options,
        key="actor_rollout_ref.actor.policy_loss",
        reserved=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "row_keys"),
        companions=[] if select is None else [select],
    )
    estimator = resolve(algorithm.adv_estimator, ADVANTAGE_ESTIMATORS, key="algorithm.adv_estimator")
    check_options(
        estimator,
        pick_options(estimator, vars(algorithm)),
        key="algorithm",
        way_out=", and there is no such key: give it a default, or name a function that calls yours with a value",
    )


def check_model(config: Config) -> int:
    """Refuse a model that does not load, or that the engine cannot serve; returns the size of its vocabulary."""
    policy = config.actor_rollout_ref
    empty = check_loading("actor_rollout_ref.model", policy.model, load_causal_lm)
    if config.needs_critic and config.critic.model.path != policy.model.path:
        check_loading("critic.model", config.critic.model, load_value_model)
    if (Path(policy.model.path) / "config.json").is_file():
        problems = model_problems(
            policy.model.path,
            engine=policy.rollout.name,
            device=config.trainer.device,
            max_model_len=policy.rollout.max_model_len,
            override_config=policy.model.override_config,
        )
        if problems:
            raise ValueError("; ".join(problems))
    if config.trainer.device == "cpu" and not (config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")):
        nbytes = (
            sum(parameter.numel() for parameter in empty.parameters()) * getattr(torch, policy.rollout.dtype).itemsize
        )
        roomy_place(min(nbytes, 2 * PART_BYTES))  # of this machine, which all ranks will be on
    return int(empty.config.get_text_config().vocab_size)


def check_loading(key: str, model: ModelConfig, load: Callable[..., Any]) -> Any:
    """The model without its weights, compared with those in the folder; `key` is named in errors."""
    try:
        empty = load(model, torch.float32, on_meta=True)
        if Path(model.path).is_dir() and isinstance(empty, PreTrainedModel):
            check_weights(empty, model.path)
        return empty
    except Exception as error:  # what transformers raises for a strange config.json has no common base
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if "trust_remote_code" in reason:
            reason = f"the model brings code of its own; it is run only with {key}.trust_remote_code=True"
        raise ValueError(f"{key}.path={model.path} cannot be loaded: {reason[:400]}") from error


def check_rewards(config: Config, datasets: Sequence[PromptDataset]) -> None:
    """Make sure that every row has who judges it, and that nobody waits for rows in vain."""
    by_model = ["model"] if config.reward.reward_model.enable else []
    pairs = [
        (style, source) for rows in datasets for style, sources in rows.sources_by_style.items() for source in sources
    ]
    if by_model and not any(style in by_model for style, _ in pairs):
        raise ValueError(
            'reward.reward_model.enable=True: no row of the data has reward_model.style "model" (found: '
            f"{', '.join(dict.fromkeys(style for style, _ in pairs))}), so there is nothing for it to judge; set that "
            "style in the rows it should score, or leave it off"
        )
    if config.reward.custom_reward_function.path is not None:
        check_reward_function(reward_function(config), start_timeout_s=config.trainer.start_timeout_s)
    else:
        check_data_sources(dict.fromkeys(source for style, source in pairs if style not in by_model))


def load_transcriber(reward_model: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> Transcriber | None:
    """How the policy's rows become the reward model's; ValueError where the two could not understand each other."""
    model = reward_model.model
    if not reward_model.enable:
        return None
    assert model.path is not None, "check_files asks for it"
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if config.num_labels != 1:
        raise ValueError(
            f"reward.reward_model.model.path={model.path}: a {', '.join(config.architectures or ['model'])} of "
            f"{config.num_labels} labels; a reward model is a sequence classifier with num_labels=1"
        )
    own = load_tokenizer(
        model.path,
        trust_remote_code=model.trust_remote_code,
        # Read only where the text is written anew; else it need not have one.
        custom_chat_template=tokenizer.chat_template if model.input_tokenizer is None else None,
        key="reward.reward_model.model.path",
    )
    if model.input_tokenizer is None:
        if not same_tokens(tokenizer, own):
            raise ValueError(
                f"reward.reward_model.model.path={model.path} has another tokenizer than the policy; set "
                "reward.reward_model.model.input_tokenizer to the policy's, and its text is put into the reward "
                "model's own chat template and tokens"
            )
        return Transcriber(tokenizer, None)
    policy = load_tokenizer(model.input_tokenizer, key="reward.reward_model.model.input_tokenizer")
    if not same_tokens(tokenizer, policy):
        raise ValueError(
            f"reward.reward_model.model.input_tokenizer={model.input_tokenizer} decodes what the policy wrote, and has "
            "another vocabulary than data.tokenizer"
        )
    return Transcriber(policy, own)


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether what one writes the other can read: tokens added later, for padding and the like, may be missing."""
    ids, added = other.get_vocab(), one.get_added_vocab()
    return all(ids.get(token) == i for token, i in one.get_vocab().items() if token not in added)


def reward_function(config: Config) -> RewardFunction:
    custom = config.reward.custom_reward_function
    return RewardFunction(custom.path, custom.name, custom.reward_kwargs)


def end_token_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end token and those of the model's generation config, which may be a number or a list."""
    ids, file = [tokenizer.eos_token_id], Path(model_path) / "generation_config.json"
    try:
        more = GenerationConfig.from_pretrained(model_path).eos_token_id
        ids += more if isinstance(more, list) else [more]
        ids = [i for i in dict.fromkeys(ids) if i is not None]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(f"eos_token_id={more}")
    except Exception as error:  # a model need not have one; what a strange one raises has no common base
        if file.is_file() or not isinstance(error, OSError):
            raise ValueError(f"{file} cannot be used: {error}") from error
    return ids


def start_workers(config: Config, data: TrainingData, pool: ResourcePool, log_dir: Path) -> Workers:
    """Start all worker groups and wait until they are ready."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    limits = Limits(trainer.start_timeout_s, trainer.step_timeout_s, trainer.collective_timeout_s)
    vocab_size = len(data.tokenizer)
    rollout = spawn_rollout(
        pool,
        RoleSpec(
            RolloutWorker,
            {
                "rollout": policy.rollout,
                "model": policy.model,
                "max_response_length": config.data.max_response_length,
                "vocab_size": vocab_size,
                "eos_token_ids": end_token_ids(policy.model.path, data.tokenizer),
                "pad_token_id": data.tokenizer.pad_token_id,
                "start_timeout_s": trainer.start_timeout_s,
                "step_timeout_s": trainer.step_timeout_s,
            },
        ),
        limits=limits,
        tensor_parallel_size=policy.rollout.tensor_model_parallel_size,
        num_replicas=policy.rollout.num_replicas,
        log_dir=log_dir,
    )
    if trainer.device == "cuda":
        # The engine measures the memory it finds free: it must be up, and asleep, before the trainer's weights come.
        rollout.wait_ready()
        rollout.call(RolloutWorker.sleep)
    groups = spawn(pool, training_roles(config, vocab_size), limits=limits, log_dir=log_dir)
    groups["actor"].wait_ready()
    rollout.wait_ready()
    engines = Engines(rollout, groups["actor"], max_restarts=max_restarts(config))
    workers = Workers(engines, groups["actor"], groups.get("ref"), groups.get("critic"), groups.get("reward_model"))
    open_transfer(config, workers, master_address=pool.slots[0].node_address)
    workers.wake_engines()
    return workers


def training_roles(config: Config, vocab_size: int) -> dict[str, RoleSpec[Any]]:
    """The workers of every training host; `vocab_size` is the tokenizer's."""
    policy = config.actor_rollout_ref
    shared = {"temperature": policy.rollout.temperature, "vocab_size": vocab_size}
    roles: dict[str, RoleSpec[Any]] = {
        "actor": RoleSpec(ActorWorker, {"model": policy.model, "actor": policy.actor, **shared})
    }
    if config.needs_ref:
        roles["ref"] = RoleSpec(RefWorker, {"model": policy.model, "fsdp": policy.ref.fsdp_config, **shared})
    if config.needs_critic:
        critic = {"critic": config.critic, "loss_scale_factor": policy.actor.loss_scale_factor}
        roles["critic"] = RoleSpec(CriticWorker, critic)
    if config.reward.reward_model.enable:
        roles["reward_model"] = RoleSpec(RewardModelWorker, {"model": config.reward.reward_model.model})
    return roles


def backend_of_transfer(config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    return transfer_backend(rollout.name, config.trainer.device, colocated=rollout.nnodes == 0)


def max_restarts(config: Config) -> int:
    """How many dead engines may be replaced."""
    # The group that nccl sends through would have to be left and made anew by the engines that live, in mid-update.
    return 0 if backend_of_transfer(config) == "nccl" else config.trainer.max_rollout_restarts


def open_transfer(config: Config, workers: Workers, *, master_address: str) -> None:
    """Set up the way of the weights from the actor to the engines."""
    settings, actor, rollout = config.actor_rollout_ref.rollout, workers.actor, workers.rollout.group
    connection = actor.call(
        ActorWorker.open_transfer,
        backend_of_transfer(config),
        settings.dtype,
        checksums=settings.verify_weights,
        num_receivers=rollout.world_size * settings.tensor_model_parallel_size,
        master_address=master_address,
    )[0]
    if connection is not None:
        meeting = rollout.start_call(RolloutWorker.connect, connection)
        actor.call(ActorWorker.connect_transfer)
        meeting.result()
