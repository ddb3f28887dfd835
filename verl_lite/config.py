"""Every key of the configuration, once: its name, type, default, meaning and limits.

The dataclasses nest exactly like the dotted keys a user types: `actor_rollout_ref.actor.optim.lr` on the command line
is `config.actor_rollout_ref.actor.optim.lr` in code. `cli.compose` builds the tree; `resolve` then fills the keys that
follow another one or the machine, and `validate` checks the values. After that nobody changes it.

A key declared with `filled=True` may be null in a recipe or on the command line; `resolve` replaces the null, so its
annotation is the type that readers of the finished config see.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import glob
import math
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def key(
    default: Any,
    doc: str,
    *,
    choices: Sequence[Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    filled: bool = False,
    path: bool = False,
) -> Any:
    """Declares one key. `filled`: null until `resolve`; `path`: a file or folder, made absolute by the command line."""
    metadata = dict(doc=doc, choices=choices, ge=ge, gt=gt, le=le, filled=filled, path=path)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: Any) -> Any:
    return field(default_factory=cls)


LOGGERS = ("console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
LONGEST_S = 1e6  # eleven days; the system's own calls take milliseconds in 32 bits, and fail above 25 days
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = key(None, "Python file with the class (or package.module)", path=True)
    name: str | None = key(None, "name of the class in it")


@dataclass(frozen=True)
class DataConfig:
    train_files: list[str] = key([], "training data: one file or a list; parquet, json or jsonl", path=True)
    val_files: list[str] = key([], "validation data, likewise; empty: no validation", path=True)
    prompt_key: str = key("prompt", "column with the chat messages")
    reward_fn_key: str = key("data_source", "column that tells the reward function where a row comes from")
    max_prompt_length: int = key(512, "tokens; longer prompts are filtered or treated as `truncation` says", ge=1)
    max_response_length: int = key(512, "tokens a response may have", ge=1)
    train_batch_size: int = key(1024, "prompts per training step", ge=1)
    val_batch_size: int | None = key(None, "prompts per validation batch, null: all (memory, not results)", ge=1)
    train_max_samples: int = key(-1, "use only this many training rows, -1: all", ge=-1)
    val_max_samples: int = key(-1, "use only this many validation rows, -1: all", ge=-1)
    shuffle: bool = key(True, "draw the training prompts in a random order, a new one each epoch")
    seed: int = key(None, "seed of that order, null: 1", ge=0, le=2**63 - 1, filled=True)
    validation_shuffle: bool = key(False, "shuffle the validation rows")
    filter_overlong_prompts: bool = key(False, "drop prompts longer than max_prompt_length")
    filter_overlong_prompts_workers: int = key(1, "processes that measure the prompts", ge=1)
    truncation: str = key("error", "a prompt that is too long", choices=("error", "left", "right", "middle"))
    apply_chat_template_kwargs: dict[str, Any] = key({}, "passed to the tokenizer's apply_chat_template")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    tokenizer: str = key(None, "folder or hub id, null: actor_rollout_ref.model.tokenizer_path", filled=True, path=True)


@dataclass(frozen=True)
class ModelConfig:
    path: str = key(None, "model folder (HF layout) or hub id", filled=True, path=True)
    trust_remote_code: bool = key(False, "let code that comes with the model run")
    override_config: dict[str, Any] = key({}, "HF config fields to replace, attn_implementation too")
    enable_gradient_checkpointing: bool = key(True, "recompute activations in the backward pass: less memory, slower")
    use_remove_padding: bool = key(True, "run the rows of a micro-batch without padding between them")
    lora_rank: int = key(0, "rank of the LoRA adapters, 0: train all weights", ge=0)
    lora_alpha: float = key(16, "LoRA scale", gt=0)
    target_modules: list[str] = key(["all-linear"], "modules that get a LoRA adapter")
    lora_adapter_path: str | None = key(None, "folder of a LoRA adapter to start from", path=True)


@dataclass(frozen=True)
class PolicyModelConfig(ModelConfig):
    tokenizer_path: str = key(None, "folder or hub id of the tokenizer, null: path", filled=True, path=True)
    custom_chat_template: str | None = key(None, "Jinja chat template in place of the tokenizer's")


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(1e-6, "peak learning rate of AdamW", ge=0)
    weight_decay: float = key(0.01, "AdamW's weight decay", ge=0)
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates", ge=0, le=1)
    lr_warmup_steps: int = key(-1, "training steps of linear warm-up, -1: lr_warmup_steps_ratio decides", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all training steps", ge=0, le=1)
    lr_scheduler_type: str = key("constant", "course after warm-up", choices=("constant", "cosine", "linear"))
    min_lr_ratio: float = key(0.0, "lowest rate of the decay, as a share of lr", ge=0, le=1)
    num_cycles: float = key(0.5, "cosine periods over the run", gt=0)


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    lr: float = key(1e-5, "peak learning rate of AdamW", ge=0)


@dataclass(frozen=True)
class FSDPConfig:
    """A sharded model that only runs forward; `TrainFSDPConfig` is one that is also trained."""

    param_offload: bool = key(False, "keep the weights in host memory between phases (GPU)")
    reshard_after_forward: bool = key(True, "free the gathered weights between forward and backward")
    model_dtype: str = key("float32", "dtype of the stored weights", choices=DTYPES, filled=True)
    dtype: str = key(None, "dtype of computation, null: bfloat16 on GPU, float32 on CPU", choices=DTYPES, filled=True)


@dataclass(frozen=True)
class RefFSDPConfig(FSDPConfig):
    # As the actor's, or two equal models would have a KL between them.
    model_dtype: str = key(None, "dtype of the stored weights, null: as the actor", choices=DTYPES, filled=True)
    dtype: str = key(None, "dtype of computation, null: as the actor", choices=DTYPES, filled=True)


@dataclass(frozen=True)
class TrainFSDPConfig(FSDPConfig):
    optimizer_offload: bool = key(False, "keep the optimizer's state in host memory between updates (GPU)")
    fsdp_size: int = key(-1, "ranks that share one copy of the weights, -1: all", ge=-1)
    use_no_sync_for_gradient_accumulation: bool = key(False, "reduce gradients once per mini-batch: more memory")


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"], "what a checkpoint holds", choices=CHECKPOINT_CONTENTS
    )
    load_contents: list[str] = key(
        None, "what is read on resume, null: save_contents", choices=CHECKPOINT_CONTENTS, filled=True
    )


@dataclass(frozen=True)
class CriticCheckpointConfig(CheckpointConfig):
    save_contents: list[str] = key(None, "null: as the actor", choices=CHECKPOINT_CONTENTS, filled=True)


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "name of the policy loss, or package.module:function, or file.py:function")
    options: dict[str, Any] = key({}, "options of that loss; typed as policy_loss.<option>=value")


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = key("fsdp2", "training engine; both names mean FSDP2", choices=("fsdp2", "fsdp"))
    ppo_mini_batch_size: int = key(256, "rows of one optimizer step, counted in ppo_mini_batch_unit", ge=1)
    ppo_mini_batch_unit: str = key("prompt", "what a mini-batch counts", choices=("prompt", "sequence"))
    ppo_micro_batch_size_per_gpu: int | None = key(None, "sequences one rank holds in one forward-backward", ge=1)
    use_dynamic_bsz: bool = key(False, "limit micro-batches by tokens instead of sequences")
    ppo_max_token_len_per_gpu: int = key(16384, "that limit: tokens per micro-batch and rank", ge=1)
    ppo_epochs: int = key(1, "passes over the train batch", ge=1)
    shuffle: bool = key(False, "a new order of the rows for each pass")
    data_loader_seed: int = key(42, "seed of that order", ge=0)
    clip_ratio: float = key(0.2, "half-width of the clipping interval of the probability ratio", ge=0)
    clip_ratio_low: float = key(None, "lower half-width, null: clip_ratio", ge=0, filled=True)
    clip_ratio_high: float = key(None, "upper half-width, null: clip_ratio", ge=0, filled=True)
    clip_ratio_c: float = key(3.0, "bound of the dual clip for negative advantages", gt=1)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    loss_agg_mode: str = key("token-mean", "how per-token losses become one number")
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm, null: data.max_response_length", gt=0
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = key(0.001, "weight of that term", ge=0)
    kl_loss_type: str = key("low_var_kl", "its estimator")
    ulysses_sequence_parallel_size: int = key(1, "ranks that share each sequence (the reference model's too)", ge=1)
    grad_clip: float = key(1.0, "largest global gradient norm (also: optim.clip_grad)", gt=0)
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: TrainFSDPConfig = section(TrainFSDPConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

    @property
    def has_kl_loss(self) -> bool:
        """A term of weight 0 is left out, and with it the reference model's pass."""
        return self.use_kl_loss and self.kl_loss_coef > 0


@dataclass(frozen=True)
class ValKwargs:
    temperature: float = key(0.0, "sampling temperature of validation", ge=0)
    top_p: float = key(1.0, "nucleus", gt=0, le=1)
    top_k: int = key(-1, "keep the k likeliest tokens, -1: all", ge=-1)
    n: int = key(1, "responses per validation prompt", ge=1)
    do_sample: bool = key(False, "False: greedy whatever the temperature")


@dataclass(frozen=True)
class EngineKwargs:
    vllm: dict[str, Any] = key({}, "passed to vLLM's engine arguments")


@dataclass(frozen=True)
class RolloutConfig:
    name: str = key("vllm", "generation engine: vllm, hf, or package.module:Class")
    n: int = key(1, "responses per prompt", ge=1)
    temperature: float = key(1.0, "sampling temperature; log-probs are those of the tempered distribution", ge=0)
    top_p: float = key(1.0, "nucleus", gt=0, le=1)
    top_k: int = key(-1, "keep the k likeliest tokens, -1: all", ge=-1)
    do_sample: bool = key(True, "False (greedy) is refused for training")
    seed: int | None = key(None, "set: responses are a function of (seed, step, prompt)", ge=0)
    tensor_model_parallel_size: int = key(1, "slots one engine spans", ge=1)
    gpu_memory_utilization: float = key(0.5, "share of GPU memory the engine may take (GPU)", gt=0, le=1)
    dtype: str = key(None, "engine dtype, null: bfloat16 on GPU, float32 on CPU", choices=DTYPES, filled=True)
    enforce_eager: bool = key(None, "no compiled graphs, null: False on GPU, True on CPU", filled=True)
    max_model_len: int = key(None, "longest sequence, null: prompt + response length", ge=1, filled=True)
    max_num_batched_tokens: int = key(8192, "tokens the engine runs at once", ge=1)
    max_num_seqs: int = key(256, "sequences the engine runs at once", ge=1)
    enable_prefix_caching: bool = key(True, "reuse the cache of equal prompts")
    enable_chunked_prefill: bool = key(True, "mix prompt chunks with decoding")
    free_cache_engine: bool = key(True, "engine gives its GPU memory back while training runs (GPU)")
    ignore_eos: bool = key(False, "generate to the full length")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per forward of the old log-probs, null: actor.ppo_micro_batch_size_per_gpu", ge=1
    )
    log_prob_use_dynamic_bsz: bool = key(None, "limit by tokens instead, null: as the actor", filled=True)
    log_prob_max_token_len_per_gpu: int = key(None, "that limit, null: as the actor", ge=1, filled=True)
    calculate_log_probs: bool = key(True, "the engine returns log-probs; they are compared with the actor's")
    stop: list[str] | None = key(None, "strings that end a response")
    stop_token_ids: list[int] | None = key(None, "token ids that end a response", ge=0)
    verify_weights: bool = key(False, "compare checksums of actor and engine after each weight update")
    num_replicas: int = key(None, "engines, null: slots / tensor parallel size on GPU, 1 on CPU", ge=1, filled=True)
    nnodes: int = key(0, "nodes of its own for generation, 0: on the actor's slots", ge=0)
    n_gpus_per_node: int = key(None, "slots per such node, null: as the trainer", ge=1, filled=True)
    engine_kwargs: EngineKwargs = section(EngineKwargs)
    val_kwargs: ValKwargs = section(ValKwargs)


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per forward of the reference log-probs, null: actor.ppo_micro_batch_size_per_gpu", ge=1
    )
    log_prob_use_dynamic_bsz: bool = key(None, "limit by tokens instead, null: as the actor", filled=True)
    log_prob_max_token_len_per_gpu: int = key(None, "that limit, null: as the actor", ge=1, filled=True)
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: PolicyModelConfig = section(PolicyModelConfig)
    actor: ActorConfig = section(ActorConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    ref: RefConfig = section(RefConfig)


@dataclass(frozen=True)
class CriticConfig:
    enable: bool = key(None, "train a critic, null: exactly when algorithm.adv_estimator needs values", filled=True)
    model: ModelConfig = section(ModelConfig)
    ppo_mini_batch_size: int = key(None, "null: as the actor; counted in the actor's unit", ge=1, filled=True)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "null: as the actor", ge=1)
    use_dynamic_bsz: bool = key(None, "null: as the actor", filled=True)
    ppo_max_token_len_per_gpu: int = key(32768, "tokens per micro-batch and rank with use_dynamic_bsz", ge=1)
    forward_micro_batch_size_per_gpu: int | None = key(None, "null: ppo_micro_batch_size_per_gpu", ge=1)
    ppo_epochs: int = key(None, "null: as the actor", ge=1, filled=True)
    shuffle: bool = key(None, "null: as the actor", filled=True)
    loss_agg_mode: str = key(None, "null: as the actor", filled=True)
    cliprange_value: float = key(0.5, "how far a value may move from its old one", gt=0)
    ulysses_sequence_parallel_size: int = key(1, "ranks that share each sequence", ge=1)
    grad_clip: float = key(1.0, "largest global gradient norm (also: optim.clip_grad)", gt=0)
    optim: CriticOptimConfig = section(CriticOptimConfig)
    fsdp: TrainFSDPConfig = section(TrainFSDPConfig)
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig)


@dataclass(frozen=True)
class CustomFunctionConfig:
    path: str | None = key(None, "Python file with the reward function", path=True)
    name: str = key("compute_score", "its name in that file")
    reward_kwargs: dict[str, Any] = key({}, "extra keyword arguments it gets")


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = key("naive", "how scores become rewards: naive, dapo, or an import path")


@dataclass(frozen=True)
class RewardModelBackboneConfig:
    path: str | None = key(None, "reward model folder or hub id", path=True)
    input_tokenizer: str | None = key(
        None,
        "the policy's tokenizer, if the model has its own tokens or template; null: it reads the policy's",
        path=True,
    )
    trust_remote_code: bool = key(False, "let code that comes with the model run")
    override_config: dict[str, Any] = key({}, "HF config fields to replace")
    use_remove_padding: bool = key(True, "run rows without padding between them")
    fsdp_config: FSDPConfig = section(FSDPConfig)


@dataclass(frozen=True)
class RewardModelConfig:
    enable: bool = key(False, 'score the rows of reward_model.style "model" with it, the others with the function')
    model: RewardModelBackboneConfig = section(RewardModelBackboneConfig)
    micro_batch_size_per_gpu: int | None = key(None, "sequences per forward", ge=1)
    use_dynamic_bsz: bool = key(None, "limit by tokens instead, null: as the actor", filled=True)
    forward_max_token_len_per_gpu: int = key(None, "that limit, null: as the critic", ge=1, filled=True)
    ulysses_sequence_parallel_size: int = key(1, "ranks that share each sequence", ge=1)


@dataclass(frozen=True)
class RewardConfig:
    num_workers: int = key(8, "processes that run the reward function, at most one per core", ge=1)
    timeout_s: float = key(300.0, "seconds one sample may take", gt=0, le=LONGEST_S)
    on_error: str = key("raise", "what a failed or late sample means", choices=("raise", "zero", "mask"))
    custom_reward_function: CustomFunctionConfig = section(CustomFunctionConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_kwargs: dict[str, Any] = key({}, "options of the reward manager")
    reward_model: RewardModelConfig = section(RewardModelConfig)


@dataclass(frozen=True)
class KLCtrlConfig:
    type: str = key("fixed", "how the coefficient moves", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL penalty in the reward (first value if adaptive)", ge=0)
    horizon: int = key(10000, "adaptive: sequences over which it moves", ge=1)
    target_kl: float = key(0.1, "adaptive: KL it steers to", gt=0)


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = key(False, "drop prompts whose responses all score the same, generate more")
    metric: str = key("reward", "number that must differ within a group: reward, or a name the reward returns")
    max_num_gen_batches: int = key(
        0, "generation rounds before giving up, 0: as many as it takes, unless an epoch gives not one prompt", ge=0
    )
    on_limit: str = key(
        "raise", "giving up is an error, or fills the batch with prompts that were dropped", choices=("raise", "fill")
    )


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    rollout_is: str | None = key(None, "importance weights actor/engine", choices=("token", "sequence"))
    rollout_is_threshold: float = key(2.0, "largest weight", ge=1)
    rollout_rs: str | None = key(
        None, "rejection of tokens or sequences far off", choices=("token", "sequence", "geometric")
    )
    rollout_rs_threshold: float | None = key(None, "ratio beyond which they go, null: rollout_is_threshold", ge=1)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = key("gae", "name of the advantage estimator, or an import path")
    gamma: float = key(1.0, "discount", ge=0, le=1)
    lam: float = key(1.0, "lambda of GAE", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide group-centred rewards by the group's standard deviation")
    use_kl_in_reward: bool = key(False, "subtract a KL penalty from the reward")
    kl_penalty: str = key("kl", "its estimator")
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = key(30, "passes over the training data", ge=1, le=10**9)
    total_training_steps: int | None = key(None, "stop after so many steps, null: total_epochs decides", ge=1, le=10**9)
    project_name: str = key("verl_lite", "first part of output paths and of the trackers' names")
    experiment_name: str = key("default", "second part")
    logger: list[str] = key(["console"], "where metrics go (metrics.jsonl is always written)", choices=LOGGERS)
    nnodes: int = key(1, "nodes that train", ge=1)
    n_gpus_per_node: int = key(None, "slots per node, null: the GPUs found, 1 on CPU", ge=1, filled=True)
    device: str = key("auto", "auto: cuda where there are GPUs", choices=("auto", "cuda", "cpu"))
    save_freq: int = key(-1, "steps between checkpoints (and one at the end), -1: none", ge=-1)
    test_freq: int = key(-1, "steps between validations (and one at the end), -1: none", ge=-1)
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate and stop")
    critic_warmup: int = key(0, "first steps in which only the critic learns", ge=0)
    balance_batch: bool = key(True, "give every rank about the same number of tokens")
    resume_mode: str = key("auto", "auto: from the newest checkpoint", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = key(None, "where resume_path goes on from, and auto at first", path=True)
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "folder of checkpoints", path=True
    )
    run_dir: str = key(
        "outputs/${trainer.project_name}/${trainer.experiment_name}", "folder of metrics, logs, config", path=True
    )
    max_skipped_steps: int = key(10, "steps skipped in a row (non-finite gradient) before the run stops", ge=0)
    max_rollout_restarts: int = key(1, "times in a run that a dead engine is started again", ge=0)
    start_timeout_s: float = key(600.0, "seconds the workers may take to start", gt=0, le=LONGEST_S)
    step_timeout_s: float = key(3600.0, "seconds one phase of a step may take", gt=0, le=LONGEST_S)
    collective_timeout_s: float = key(1800.0, "seconds a rank waits for its peers", gt=0, le=LONGEST_S)
    preempt_grace_s: float = key(
        600.0, "seconds to finish and save the step after SIGTERM or SIGUSR1", gt=0, le=LONGEST_S
    )
    max_actor_ckpt_to_keep: int | None = key(None, "checkpoints kept, null: all", ge=1)
    max_critic_ckpt_to_keep: int | None = key(None, "critic checkpoints kept, null: all", ge=1)
    rollout_data_dir: str | None = key(None, "write each step's samples here", path=True)
    validation_data_dir: str | None = key(None, "write each validation's samples here", path=True)
    log_val_generations: int = key(0, "validation samples shown by the trackers", ge=0)

    @property
    def saves(self) -> bool:
        return self.save_freq > 0 and not self.val_only


@dataclass(frozen=True)
class RayInitConfig:
    address: str | None = key(None, "running cluster, null: RAY_ADDRESS, else a Ray of our own on this machine")
    num_cpus: int | None = key(None, "logical CPUs of that Ray, null: enough", ge=1)
    runtime_env: dict[str, Any] = key({}, "Ray's runtime_env, e.g. env_vars, working_dir")


@dataclass(frozen=True)
class RayKwargsConfig:
    ray_init: RayInitConfig = section(RayInitConfig)


@dataclass(frozen=True)
class Config:
    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)

    @property
    def num_slots(self) -> int:
        """Training ranks: one per GPU, or per CPU process."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes

    @property
    def needs_ref(self) -> bool:
        return self.actor_rollout_ref.actor.has_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        return self.critic.enable


# --- the tree as a flat table -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One key as declared: `types` are the plain types a value may have, `item` the type of a list's entries."""

    name: str
    types: tuple[type, ...]
    item: type | None = None
    default: Any = None
    doc: str = ""
    choices: tuple[Any, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    filled: bool = False
    path: bool = False

    @property
    def nullable(self) -> bool:
        """Null may be given (and, unless `filled`, may remain)."""
        return self.filled or type(None) in self.types

    def wanted(self) -> str:
        """What a value should be, in words."""
        names = ["null" if t is type(None) else t.__name__ for t in self.types]
        if self.item is not None:
            names = [f"list of {self.item.__name__}" if n == "list" else n for n in names]
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le))
        limits = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
        text = "one of " + ", ".join(map(str, self.choices)) if self.choices else " or ".join(names)
        return f"{text} {' and '.join(limits)}".strip() + (" or null" if self.filled else "")

    def in_range(self, value: Any) -> bool:
        """Whether a value of the right type keeps the limits and choices; a list does when all its entries do."""
        if value is None:
            return self.nullable
        for entry in value if isinstance(value, list) else [value]:
            if self.choices is not None and entry not in self.choices:
                return False
            if isinstance(entry, int | float) and not (
                math.isfinite(entry)
                and (self.ge is None or entry >= self.ge)
                and (self.gt is None or entry > self.gt)
                and (self.le is None or entry <= self.le)
            ):
                return False
        return True


def _walk(cls: type, prefix: str, instance: Any) -> Iterator[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """(dotted key, field, resolved annotation, value in `instance`) of every leaf below `cls`."""
    hints = _hints(cls)
    for entry in dataclasses.fields(cls):
        name, hint, value = f"{prefix}{entry.name}", hints[entry.name], getattr(instance, entry.name)
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{name}.", value)
        else:
            yield name, entry, hint, value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def leaf_keys() -> Mapping[str, Leaf]:
    """Every dotted key, in the order of declaration."""
    leaves = {}
    for name, entry, hint, default in _walk(Config, "", Config()):
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = tuple(typing.get_origin(option) or option for option in options)
        item = next((typing.get_args(option)[0] for option in options if typing.get_origin(option) is list), None)
        leaves[name] = Leaf(name=name, types=plain, item=item, default=default, **entry.metadata)
    return types.MappingProxyType(leaves)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for every key."""
    return {name: value for name, _, _, value in _walk(Config, "", config)}


def unflatten(flat: Mapping[str, Any]) -> Config:
    """The config with these values and defaults elsewhere; values are taken as they are."""
    unknown = sorted(set(flat) - set(leaf_keys()))
    if unknown:
        raise ValueError(f"no such keys: {', '.join(unknown)}")

    def build(cls: type, prefix: str, default: Any) -> Any:
        values = {}
        for entry in dataclasses.fields(cls):
            name, below, hint = f"{prefix}{entry.name}", getattr(default, entry.name), _hints(cls)[entry.name]
            if dataclasses.is_dataclass(hint):
                values[entry.name] = build(typing.cast(type, hint), f"{name}.", below)
            else:
                values[entry.name] = flat.get(name, below)
        return cls(**values)

    return typing.cast(Config, build(Config, "", Config()))


SECRET_NAME = re.compile(r"(^|[_.-])(key|apikey|token)s?$|secret|passw(or)?d|credential", re.IGNORECASE)
NOT_SECRET = ("prompt_key", "reward_fn_key")
COUNTED = re.compile(r"tokens?$", re.IGNORECASE)  # max_tokens=512 is a number and no secret
SECRET_IN_URL = re.compile(r"(?<=://)([^\s/:@]*:)[^\s/]+(?=@)")  # user:password@host
SHORTEST_SECRET = 6  # a shorter one is hidden where its name stands, but not looked for in texts


def redacted(config: Config) -> dict[str, Any]:
    """For printing and saving: without Ray's environment variables, passwords in URLs, texts named secret."""
    return typing.cast(dict[str, Any], _hide(dataclasses.asdict(config), "", []))


def secrets_of(config: Config) -> list[str]:
    """The values that `redacted` hides and those of environment variables named like secrets, the longest first."""
    found = [value for name, value in os.environ.items() if SECRET_NAME.search(name)]
    _hide(dataclasses.asdict(config), "", found)
    return sorted({value for value in found if len(value) >= SHORTEST_SECRET}, key=len, reverse=True)


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return SECRET_IN_URL.sub(r"\1***", text)


def _hide(value: Any, name: str, hidden: list[str]) -> Any:
    """The value without its secrets, which are added to `hidden`; `name` is the last part of its key."""
    secret = name == "env_vars" or (SECRET_NAME.search(name) is not None and name not in NOT_SECRET)
    if isinstance(value, dict):
        return {k: _hide(v, "secret" if secret else str(k), hidden) for k, v in value.items()}
    if isinstance(value, list):
        return [_hide(entry, name, hidden) for entry in value]
    if secret and (isinstance(value, str) or (type(value) in (int, float) and not COUNTED.search(name))):
        hidden.append(str(value))
        return "***"
    return SECRET_IN_URL.sub(r"\1***", value) if isinstance(value, str) else value


# --- null -> value ----------------------------------------------------------------------------------------------------

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{role}." for role in ("actor", "rollout", "ref"))
FOLLOWS = {
    _ACTOR + "clip_ratio_low": _ACTOR + "clip_ratio",
    _ACTOR + "clip_ratio_high": _ACTOR + "clip_ratio",
    _ACTOR + "checkpoint.load_contents": _ACTOR + "checkpoint.save_contents",
    "critic.checkpoint.save_contents": _ACTOR + "checkpoint.save_contents",
    "critic.checkpoint.load_contents": "critic.checkpoint.save_contents",
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": _ACTOR + "ppo_micro_batch_size_per_gpu",
    _ROLLOUT + "log_prob_use_dynamic_bsz": _ACTOR + "use_dynamic_bsz",
    _ROLLOUT + "log_prob_max_token_len_per_gpu": _ACTOR + "ppo_max_token_len_per_gpu",
    _ROLLOUT + "n_gpus_per_node": "trainer.n_gpus_per_node",
    _REF + "log_prob_micro_batch_size_per_gpu": _ACTOR + "ppo_micro_batch_size_per_gpu",
    _REF + "log_prob_use_dynamic_bsz": _ACTOR + "use_dynamic_bsz",
    _REF + "log_prob_max_token_len_per_gpu": _ACTOR + "ppo_max_token_len_per_gpu",
    _REF + "fsdp_config.model_dtype": _ACTOR + "fsdp_config.model_dtype",
    _REF + "fsdp_config.dtype": _ACTOR + "fsdp_config.dtype",
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.ppo_mini_batch_size": _ACTOR + "ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu": _ACTOR + "ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "critic.use_dynamic_bsz": _ACTOR + "use_dynamic_bsz",
    "critic.ppo_epochs": _ACTOR + "ppo_epochs",
    "critic.shuffle": _ACTOR + "shuffle",
    "critic.loss_agg_mode": _ACTOR + "loss_agg_mode",
    "reward.reward_model.use_dynamic_bsz": "critic.use_dynamic_bsz",
    "reward.reward_model.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
}
"""Keys whose null means "as that other key", in an order in which each source is filled before it is read."""


def follows(flat: Mapping[str, Any], name: str) -> bool:
    """Whether a key has the value of the key it follows: then a problem with it is told once, there."""
    return name in FOLLOWS and flat[name] == flat[FOLLOWS[name]]


def num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpus_here() -> int:
    """GPUs this process may use, found without importing torch."""
    devices = len(glob.glob("/dev/nvidia[0-9]*")) or int(os.path.exists("/dev/dxg"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not devices:
        return devices
    ids = [entry.strip() for entry in visible.split(",")]
    return next((i for i, entry in enumerate(ids) if entry in ("", "-1")), len(ids))


def resolve(config: Config, *, needs_values: bool) -> Config:
    """The config with every null of a `filled` key replaced. `needs_values`: the advantage estimator needs a critic."""
    flat = flatten(config)

    def fill(name: str, value: Any) -> None:
        if flat[name] is None:
            flat[name] = value

    if flat["trainer.device"] == "auto":
        flat["trainer.device"] = "cuda" if gpus_here() else "cpu"
    on_gpu = flat["trainer.device"] == "cuda"
    fill("trainer.n_gpus_per_node", gpus_here() if on_gpu else 1)
    fill("data.seed", 1)
    fill("critic.enable", needs_values)

    tokenizer = flat["data.tokenizer"] or flat["actor_rollout_ref.model.tokenizer_path"]
    fill("data.tokenizer", tokenizer or flat["actor_rollout_ref.model.path"])
    fill("actor_rollout_ref.model.tokenizer_path", flat["data.tokenizer"])
    if flat["critic.model.path"] is None:  # the policy's folder has to load the policy's way
        flat["critic.model.trust_remote_code"] |= flat["actor_rollout_ref.model.trust_remote_code"]
        flat["critic.model.override_config"] = {
            **flat["actor_rollout_ref.model.override_config"],
            **flat["critic.model.override_config"],
        }

    for name, leaf in leaf_keys().items():
        if leaf.choices == DTYPES:
            if not name.startswith(_REF):
                fill(name, "bfloat16" if on_gpu else "float32")
            flat[name] = DTYPE_NAMES.get(flat[name], flat[name])
    for name, source in FOLLOWS.items():
        fill(name, flat[source])

    if flat[_ACTOR + "loss_agg_mode"] == "seq-mean-token-sum-norm":
        fill(_ACTOR + "loss_scale_factor", float(flat["data.max_response_length"]))
    fill(_ROLLOUT + "max_model_len", flat["data.max_prompt_length"] + flat["data.max_response_length"])
    fill(_ROLLOUT + "enforce_eager", not on_gpu)
    place = _ROLLOUT if flat[_ROLLOUT + "nnodes"] else "trainer."
    slots = flat[place + "nnodes"] * flat[place + "n_gpus_per_node"]
    replicas = slots // max(1, flat[_ROLLOUT + "tensor_model_parallel_size"]) if on_gpu else 1
    fill(_ROLLOUT + "num_replicas", max(1, replicas))
    return unflatten(flat)


HUB_KEYS = (
    "data.tokenizer",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "critic.model.path",
    "critic.model.lora_adapter_path",
    "reward.reward_model.model.path",
    "reward.reward_model.model.input_tokenizer",
)
"""Keys that take a folder or a hub id such as owner/model."""

PLUGIN_KEYS = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.name",
    "reward.reward_manager.name",
)
"""Keys that take a built-in name, or the user's own as package.module:attribute or path/file.py:attribute."""


# --- checks -----------------------------------------------------------------------------------------------------------

VLLM_TEMPERATURES = (0.01, 2.0)
PENDING = {
    "actor_rollout_ref.model.lora_rank": "LoRA is not built yet",
    "actor_rollout_ref.model.lora_adapter_path": "LoRA is not built yet",
    "critic.model.lora_rank": "LoRA is not built yet",
    "critic.model.lora_adapter_path": "LoRA is not built yet",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "sequence parallelism is not built yet",
    "critic.ulysses_sequence_parallel_size": "sequence parallelism is not built yet",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "sharding over part of the ranks is not built yet",
    "critic.fsdp.fsdp_size": "sharding over part of the ranks is not built yet",
    "actor_rollout_ref.rollout.nnodes": "generation on nodes of its own is not built yet",
    "reward.reward_model.ulysses_sequence_parallel_size": "sequence parallelism is not built yet",
}
"""Known keys nothing reads yet: any other value than the default is refused. Remove a line to switch one on."""


def near_names(name: str, candidates: Sequence[str], count: int = 3) -> list[str]:
    """The candidates that look most like `name`, best first."""
    matches = difflib.get_close_matches(name.lower(), [entry.lower() for entry in candidates], count, 0.5)
    return [entry for match in matches for entry in candidates if entry.lower() == match][:count]


def range_problem(name: str, value: Any) -> str | None:
    """The message for a value outside the key's limits or choices, None if it is fine."""
    leaf = leaf_keys()[name]
    if leaf.path and "" in (value if isinstance(value, list) else [value]):
        return f"{name} is empty, perhaps from a variable that is not set: name a path, or leave the key out"
    if leaf.in_range(value):
        return None
    near = near_names(str(value), [str(choice) for choice in leaf.choices or ()], 1)
    return f"{name}={show(value)}: must be {leaf.wanted()}" + (f"; did you mean {near[0]}?" if near else "")


def show(value: Any) -> str:
    """A value as one types it."""
    return "null" if value is None else str(value)


def validate(config: Config) -> list[str]:
    """Every problem of a resolved config that shows without opening a file. Batch arithmetic is `BatchPlan`'s."""
    flat = flatten(config)
    problems = [
        problem for name, value in flat.items() if not follows(flat, name) and (problem := range_problem(name, value))
    ]
    for name, why in PENDING.items():
        if flat[name] != leaf_keys()[name].default:
            problems.append(f"{name}={show(flat[name])}: {why}")

    def refuse(wrong: bool, message: str) -> None:
        if wrong:
            problems.append(message)

    data, trainer, algorithm, critic = config.data, config.trainer, config.algorithm, config.critic
    model, actor, rollout = (getattr(config.actor_rollout_ref, name) for name in ("model", "actor", "rollout"))
    refuse(not data.val_files and trainer.val_only, "trainer.val_only=True needs data.val_files")
    for name in ("train_max_samples", "val_max_samples"):
        refuse(getattr(data, name) == 0, f"data.{name}=0: must be -1 (all rows) or at least 1")
    refuse(
        (data.custom_cls.path is None) != (data.custom_cls.name is None),
        "data.custom_cls.path and data.custom_cls.name: set both, or neither",
    )
    refuse(
        data.tokenizer != model.tokenizer_path,
        f"data.tokenizer={data.tokenizer} and actor_rollout_ref.model.tokenizer_path={model.tokenizer_path}: "
        "two names for one tokenizer; set one of them",
    )
    for name, optim in (("actor_rollout_ref.actor.optim", actor.optim), ("critic.optim", critic.optim)):
        refuse(len(optim.betas) != 2, f"{name}.betas={optim.betas}: must be two numbers")
        refuse(1.0 in optim.betas, f"{name}.betas={optim.betas}: each must be < 1")
    refuse(
        rollout.temperature == 0,
        "actor_rollout_ref.rollout.temperature=0: training needs samples that differ; use a value > 0 "
        "(greedy validation: val_kwargs.do_sample=False)",
    )
    refuse(
        not rollout.do_sample,
        "actor_rollout_ref.rollout.do_sample=False: training needs samples that differ "
        "(greedy validation: val_kwargs.do_sample=False)",
    )
    refuse(
        algorithm.filter_groups.enable and rollout.n < 2,
        f"algorithm.filter_groups.enable=True: actor_rollout_ref.rollout.n={rollout.n} gives groups of one response, "
        "which differ from nothing; use n >= 2",
    )
    if rollout.name == "vllm":
        sampled = {"temperature": rollout.temperature, "val_kwargs.temperature": rollout.val_kwargs.temperature}
        for name, value in sampled.items():
            low, high = VLLM_TEMPERATURES  # below, it takes the lowest instead and says nothing
            refuse(
                0 < value < low or value > high,
                f"actor_rollout_ref.rollout.{name}={value:g}: vLLM samples at {low:g} to {high:g}; keep to that, or "
                "set actor_rollout_ref.rollout.name=hf",
            )
        refuse(
            rollout.max_num_batched_tokens < rollout.max_num_seqs,
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: must be >= "
            f"max_num_seqs={rollout.max_num_seqs}, since each sequence takes a token of every batch; raise it or lower "
            "max_num_seqs",
        )
    longest = data.max_prompt_length + data.max_response_length
    refuse(
        rollout.max_model_len < longest,
        f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}: must be >= data.max_prompt_length + "
        f"data.max_response_length = {data.max_prompt_length} + {data.max_response_length} = {longest}",
    )
    refuse(
        not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.max_model_len,
        f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: without "
        f"enable_chunked_prefill it must be >= max_model_len={rollout.max_model_len}",
    )
    refuse(
        trainer.resume_mode == "resume_path" and trainer.resume_from_path is None,
        "trainer.resume_mode=resume_path needs trainer.resume_from_path",
    )
    refuse(
        trainer.critic_warmup > 0 and not config.needs_critic,
        f"trainer.critic_warmup={trainer.critic_warmup}: there is no critic to warm up "
        f"(algorithm.adv_estimator={algorithm.adv_estimator}, critic.enable={critic.enable}); set 0",
    )
    control, rows = algorithm.kl_ctrl, data.train_batch_size * rollout.n
    adaptive = algorithm.use_kl_in_reward and control.type == "adaptive"
    refuse(
        adaptive and rows >= 5 * control.horizon,
        f"algorithm.kl_ctrl.horizon={control.horizon}: a step may multiply kl_coef by 1 - 0.2 · rows / horizon, "
        f"which is not above 0 with data.train_batch_size · rollout.n = {rows} rows; use a horizon >= {rows // 5 + 1}",
    )
    refuse(
        adaptive and control.kl_coef == 0,
        "algorithm.kl_ctrl.kl_coef=0: an adaptive coefficient is multiplied, so that it stays 0; use a value > 0",
    )
    refuse(
        rollout.name == "hf" and rollout.tensor_model_parallel_size != 1,
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the hf engine "
        "runs on one slot; use 1 or actor_rollout_ref.rollout.name=vllm",
    )
    correction = algorithm.rollout_correction
    refuse(
        (correction.rollout_is or correction.rollout_rs) is not None and not rollout.calculate_log_probs,
        "algorithm.rollout_correction compares with the engine's log-probs: set "
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    )
    return problems


def notices(config: Config) -> list[str]:
    """What is allowed but probably not meant."""
    data, trainer, rollout = config.data, config.trainer, config.actor_rollout_ref.rollout
    actor, val, address = config.actor_rollout_ref.actor, rollout.val_kwargs, config.ray_kwargs.ray_init.address
    checkpoints = {"actor_rollout_ref.actor": actor.checkpoint}
    if config.needs_critic:
        checkpoints["critic"] = config.critic.checkpoint
    found = [
        (
            not data.val_files and (trainer.test_freq > 0),
            f"trainer.test_freq={trainer.test_freq} has no effect: data.val_files is not set, so validation is off",
        ),
        (
            val.n > 1 and (not val.do_sample or val.temperature == 0),
            f"actor_rollout_ref.rollout.val_kwargs.n={val.n} with greedy decoding gives {val.n} equal responses per "
            "prompt; set val_kwargs.do_sample=True and a temperature",
        ),
        (
            not val.do_sample and val.temperature > 0,
            f"actor_rollout_ref.rollout.val_kwargs.temperature={val.temperature} has no effect: val_kwargs.do_sample="
            "False is greedy",
        ),
        (
            rollout.top_p < 1 or rollout.top_k > 0,
            f"actor_rollout_ref.rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: the engine draws from a cut "
            "distribution, the actor's log-probs are of the whole one; training/rollout_probs_diff_* and "
            "rollout_corr/* show the difference",
        ),
        (
            trainer.resume_from_path is not None and trainer.resume_mode == "disable",
            f"trainer.resume_from_path has no effect with trainer.resume_mode={trainer.resume_mode}",
        ),
        *(
            (
                trainer.save_freq > 0 and "model" not in checkpoint.save_contents,
                f"{name}.checkpoint.save_contents={checkpoint.save_contents} has no model: nothing can go on from what "
                "is saved",
            )
            for name, checkpoint in checkpoints.items()
        ),
        (
            actor.has_kl_loss and config.algorithm.use_kl_in_reward,
            "KL is in the loss (actor.use_kl_loss=True) and in the reward (algorithm.use_kl_in_reward=True)",
        ),
        (
            config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0,
            "algorithm.kl_ctrl.kl_coef=0: the KL is measured (actor/reward_kl_penalty) and changes no reward; "
            "algorithm.use_kl_in_reward=False saves its pass",
        ),
        (
            actor.has_kl_loss and actor.kl_loss_type in ("kl", "k1"),
            f"actor_rollout_ref.actor.kl_loss_type={actor.kl_loss_type}: its gradient is 0 on average: it holds "
            "nothing back; as a loss use low_var_kl or mse",
        ),
        (
            actor.entropy_coeff < 0,
            f"actor_rollout_ref.actor.entropy_coeff={actor.entropy_coeff}: below 0 it lowers the entropy",
        ),
        (
            address is not None and trainer.device == "cpu" and not gpus_here(),
            "no GPU on this machine, so trainer.device is cpu; if the cluster has GPUs: trainer.device=cuda and "
            "trainer.n_gpus_per_node=…",
        ),
    ]
    warmup, total = trainer.critic_warmup, trainer.total_training_steps
    for name, optim in (("actor_rollout_ref.actor", actor.optim), ("critic", config.critic.optim)):
        steps, ratio = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio
        found += [
            (steps > 0 and ratio > 0, f"{name}.optim.lr_warmup_steps_ratio has no effect: lr_warmup_steps is set"),
            (
                total is not None and steps >= total,
                f"{name}.optim.lr_warmup_steps={steps}: the run ends in its warm-up "
                f"(trainer.total_training_steps={total})",
            ),
            (
                warmup > 0 and optim is actor.optim and (steps > 0 or (steps < 0 and ratio > 0)),
                f"trainer.critic_warmup={warmup}: the learning rate's warm-up counts from the run's first step: "
                f"the actor starts at step {warmup + 1} of it; prolong {name}.optim.lr_warmup_steps to keep it",
            ),
        ]
    return [message for applies, message in found if applies]


def looks_like_path(name: str) -> bool:
    """Whether a model or tokenizer name is a folder rather than a hub id such as `owner/model`."""
    return bool(re.match(r"[/~.]", name)) or name.count("/") > 1 or Path(name.split("/")[0]).is_dir()
