"""No key without effect: every key is taken to another value, and something that a user can observe must differ.

Each key stands once in EFFECTS, with the other value and the place where the difference must show. A key that nothing
reads has no such place. The places:

- RUN: a training step or a validation with the real trainer, workers, hf engine and reward pool, in this process:
  metrics (not timings, nor those that only repeat a key), files, printed lines, shapes and dtypes that enter the
  models' layers, what FSDP, the worker groups, the reward pool and the tokenizing are asked for;
- SCHEDULES: who runs which row, on several ranks;
- ENGINE: what vLLM is started with; RAY: what Ray and its placement groups are asked for;
- READ: a worker reads it, which is all that can be seen without a GPU;
- NOTE: the plan or a warning says that it has no effect, because what it belongs to is off;
- REFUSED: the value is refused, as every key of `config.PENDING` is;
- SAME: documented to have none.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import addition_rows, char_tokenizer, tiny_model, tiny_reward_model, write_jsonl
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import dynamic_module_utils

from verl_lite import cli, main_ppo
from verl_lite.cli import ConfigError
from verl_lite.config import PENDING, Config, leaf_keys
from verl_lite.data import dataset
from verl_lite.distributed import cluster, fsdp, placement, process_group
from verl_lite.distributed.deaths import ProcessDied
from verl_lite.distributed.process_group import RankContext
from verl_lite.distributed.worker_group import WorkerError
from verl_lite.plan import compose_plan
from verl_lite.rewards.pool import RewardPool
from verl_lite.rollout.vllm_engine import VllmEngine, _engine_options, _environment
from verl_lite.trainer import ppo, setup
from verl_lite.trainer.stopping import StopRequest
from verl_lite.workers.rollout import RolloutWorker

# --- the keys ---------------------------------------------------------------------------------------------------------

M, A, R, REF = (f"actor_rollout_ref.{section}." for section in ("model", "actor", "rollout", "ref"))
BASE = [
    "data.train_files=train.jsonl",
    "data.train_batch_size=4",
    "data.max_prompt_length=9",
    "data.max_response_length=4",
    M + "path=./model",
    A + "ppo_mini_batch_size=2",
    A + "ppo_micro_batch_size_per_gpu=2",
    A + "optim.lr=0.01",
    R + "name=hf",
    R + "n=2",
    R + "seed=0",
    "reward.custom_reward_function.path=reward.py",
    "algorithm.adv_estimator=grpo",
    "trainer.device=cpu",
    "trainer.total_training_steps=1",
    "trainer.logger=[]",
]
TWO_STEPS = ["trainer.total_training_steps=2"]
CUT = [*BASE, "data.max_prompt_length=7", "data.truncation=left"]
TEMPLATE = [*BASE, "data.max_prompt_length=20", M + "custom_chat_template=template.jinja"]
CLASS = [*BASE, "data.custom_cls.path=dataset.py", "data.custom_cls.name=Short"]
REMOTE = [*BASE, M + "path=./remote_model"]
DYNAMIC = [*BASE, A + "use_dynamic_bsz=True", R + "log_prob_use_dynamic_bsz=False"]
DYNAMIC_OLD = [*BASE, R + "log_prob_use_dynamic_bsz=True"]
SHUFFLED = [*BASE, A + "shuffle=True"]
STALE = [*BASE, A + "ppo_epochs=2", A + "clip_ratio=0.1"]
COV = [*STALE, A + "policy_loss.loss_mode=kl_cov", A + "policy_loss.kl_cov_ratio=0.5"]
ENTROPY = [*BASE, A + "entropy_coeff=0.1"]
NORM = [*BASE, A + "loss_agg_mode=seq-mean-token-sum-norm"]
COSINE = [*BASE, *TWO_STEPS, A + "optim.lr_scheduler_type=cosine"]
EXPLODING = [*BASE, A + "optim.lr=1e30", "trainer.max_skipped_steps=0"]
MORTAL = [*BASE, R + "name=engine.py:Mortal", "trainer.max_rollout_restarts=0"]
ENGINE_DTYPE = [*BASE, R + "dtype=bfloat16"]
WEIGHTED = [*ENGINE_DTYPE, "algorithm.rollout_correction.rollout_is=token"]
REJECTED = [*ENGINE_DTYPE, "algorithm.rollout_correction.rollout_rs_threshold=1.001"]
KL = [*BASE, A + "use_kl_loss=True", A + "kl_loss_coef=0.5"]
DYNAMIC_REF = [*KL, REF + "log_prob_use_dynamic_bsz=True"]
KL_IN_REWARD = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.5"]
PPO = [*BASE, *TWO_STEPS, *KL_IN_REWARD, "algorithm.adv_estimator=gae", "critic.optim.lr=0.01"]
DYNAMIC_CRITIC = [*PPO, "critic.use_dynamic_bsz=True"]
SAVED = [*PPO, "trainer.save_freq=1"]
RESUMED = [
    *PPO, "trainer.total_training_steps=3", "trainer.resume_mode=resume_path",
    "trainer.resume_from_path=kept/global_step_1",
]  # fmt: skip
REMOTE_CRITIC = [*PPO, "critic.model.path=./remote_model"]
COSINE_CRITIC = [*PPO, "critic.optim.lr_scheduler_type=cosine"]
ADAPTIVE = [*PPO, "trainer.total_training_steps=3", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_penalty=abs"]
FLAKY = [*BASE, "reward.custom_reward_function.name=flaky"]
DAPO = [*BASE, "reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg={enable:True,len:2}"]
COARSE = [*BASE, "reward.custom_reward_function.name=coarse"]
FILTERED = [*COARSE, "algorithm.filter_groups.enable=True"]
FILLED = [*FILTERED, "algorithm.filter_groups.on_limit=fill"]
LIMITED = [*FILTERED, "algorithm.filter_groups.max_num_gen_batches=1"]
EPOCHS = [*BASE, "trainer.total_training_steps=null", "trainer.total_epochs=1"]
CHECKED = [*BASE, "data.val_files=val.jsonl"]
VAL = [*CHECKED, "trainer.val_only=True", "trainer.validation_data_dir=samples"]
SAMPLED = [*VAL, R + "val_kwargs.do_sample=True", R + "val_kwargs.temperature=1.0"]
RM = "reward.reward_model."
UNJUDGED = [*BASE, "data.train_files=judged.jsonl", RM + "model.path=./reward_model", RM + "micro_batch_size_per_gpu=2"]
JUDGED = [*UNJUDGED, RM + "enable=True"]
DYNAMIC_JUDGE = [*JUDGED, RM + "use_dynamic_bsz=True"]
REMOTE_JUDGE = [*JUDGED, RM + "model.path=./remote_reward_model"]
VLLM = [*BASE, R + "name=vllm"]
GPU = [*VLLM, "trainer.device=cuda", "trainer.n_gpus_per_node=2"]
TWO_RANKS = [*BASE, "trainer.n_gpus_per_node=2", "trainer.balance_batch=False"]

# fmt: off
LETTERS = "[" + ",".join("abcdefghijklmnopqrstuvwxyz") + "]"
TRAINED = ["optim.lr=0.02", "optim.weight_decay=0.9", "optim.betas=[0.5,0.9]", "optim.lr_warmup_steps=2",
           "optim.lr_warmup_steps_ratio=1", "optim.lr_scheduler_type=linear", "grad_clip=1e-6"]
SHARDED = ["reshard_after_forward=False", "model_dtype=bfloat16", "dtype=bfloat16"]

# (where the difference shows, the command line, and on top of it, one at a time, the key's other value; what is written
# after the first word comes with it)
EFFECTS: list[tuple[str, list[str], list[str]]] = [
    ("RUN", BASE, [
        "data.train_files=other.jsonl", "data.prompt_key=question", "data.reward_fn_key=source",
        "data.max_response_length=3", "data.train_batch_size=2", "data.train_max_samples=4", "data.shuffle=False",
        "data.seed=2", "data.filter_overlong_prompts_workers=2", "data.tokenizer=./other_tokenizer",
        "data.custom_cls.path=dataset.py data.custom_cls.name=Short",
        M + "path=./other_model", M + "tokenizer_path=./other_tokenizer", M + "custom_chat_template=template.jinja",
        M + "override_config.rms_norm_eps=0.5", M + "enable_gradient_checkpointing=False",
        M + "use_remove_padding=False",
        A + "ppo_mini_batch_size=4", A + "ppo_mini_batch_unit=sequence", A + "ppo_micro_batch_size_per_gpu=4",
        A + "use_dynamic_bsz=True", A + "ppo_epochs=2", A + "shuffle=True", A + "loss_agg_mode=seq-mean-token-mean",
        A + "use_kl_loss=True",
        *(A + "fsdp_config." + key for key in SHARDED), A + "fsdp_config.use_no_sync_for_gradient_accumulation=True",
        R + "name=engine.py:OneToken", R + "n=4", R + "temperature=0.5", R + "top_p=0.5", R + "top_k=3", R + "seed=5",
        R + "dtype=bfloat16", R + "max_num_seqs=3", R + "ignore_eos=True", R + "log_prob_micro_batch_size_per_gpu=1",
        R + "log_prob_use_dynamic_bsz=True", R + "calculate_log_probs=False", R + "stop=" + LETTERS,
        R + "stop_token_ids=[20,21,22,23,24,25,26,27,28,29]", R + "verify_weights=True", R + "num_replicas=2",
        "critic.enable=True",
        "reward.num_workers=1", "reward.timeout_s=200", "reward.custom_reward_function.path=other_reward.py",
        "reward.custom_reward_function.name=other", "reward.custom_reward_function.reward_kwargs.factor=2",
        "reward.reward_manager.name=dapo reward.reward_kwargs.overlong_buffer_cfg={enable:True,len:2}",
        "algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=False", "algorithm.use_kl_in_reward=True",
        "trainer.total_training_steps=2", "trainer.project_name=other", "trainer.experiment_name=other",
        "trainer.logger=[console]", "trainer.run_dir=elsewhere", "trainer.rollout_data_dir=samples",
        "trainer.start_timeout_s=300", "trainer.step_timeout_s=300", "trainer.collective_timeout_s=300",
    ]),
    ("RUN", [*BASE, *TWO_STEPS], [A + key for key in TRAINED]),
    ("RUN", CUT, ["data.max_prompt_length=8", "data.filter_overlong_prompts=True", "data.truncation=right"]),
    ("RUN", TEMPLATE, ["data.apply_chat_template_kwargs.suffix=7"]),
    ("RUN", CLASS, ["data.custom_cls.name=Long"]),
    ("RUN", REMOTE, [M + "trust_remote_code=True"]),
    ("RUN", DYNAMIC, [A + "ppo_max_token_len_per_gpu=20"]),
    ("RUN", SHUFFLED, [A + "data_loader_seed=1"]),
    ("RUN", STALE, [
        A + "clip_ratio=0.5", A + "clip_ratio_low=0.5", A + "clip_ratio_high=0.5", A + "clip_ratio_c=1.01",
        A + "policy_loss.loss_mode=gspo",
    ]),
    ("RUN", COV, [A + "policy_loss.kl_cov_ratio=0.1"]),
    ("RUN", ENTROPY, [A + "entropy_coeff=0.5"]),
    ("RUN", NORM, [A + "loss_scale_factor=100"]),
    ("RUN", COSINE, [A + "optim.min_lr_ratio=0.9", A + "optim.num_cycles=0.25"]),
    ("RUN", DYNAMIC_OLD, [R + "log_prob_max_token_len_per_gpu=20"]),
    ("RUN", EXPLODING, ["trainer.max_skipped_steps=10"]),
    ("RUN", MORTAL, ["trainer.max_rollout_restarts=2"]),
    ("RUN", ENGINE_DTYPE, ["algorithm.rollout_correction.rollout_is=token"]),
    ("RUN", WEIGHTED, ["algorithm.rollout_correction.rollout_is_threshold=1.0001"]),
    ("RUN", REJECTED, ["algorithm.rollout_correction.rollout_rs=token"]),
    ("RUN", [*REJECTED, "algorithm.rollout_correction.rollout_rs=token"],
     ["algorithm.rollout_correction.rollout_rs_threshold=1.1"]),
    ("RUN", KL, [
        A + "kl_loss_coef=0.1", A + "kl_loss_type=abs", REF + "log_prob_micro_batch_size_per_gpu=1",
        REF + "log_prob_use_dynamic_bsz=True", *(REF + "fsdp_config." + key for key in SHARDED),
    ]),
    ("RUN", DYNAMIC_REF, [REF + "log_prob_max_token_len_per_gpu=20"]),
    ("RUN", PPO, [
        "critic.model.path=./other_model", "critic.model.override_config.rms_norm_eps=0.5",
        "critic.model.enable_gradient_checkpointing=False", "critic.model.use_remove_padding=False",
        "critic.ppo_mini_batch_size=4", "critic.ppo_micro_batch_size_per_gpu=4", "critic.use_dynamic_bsz=True",
        "critic.forward_micro_batch_size_per_gpu=1", "critic.ppo_epochs=2", "critic.shuffle=True",
        "critic.loss_agg_mode=seq-mean-token-sum", "critic.cliprange_value=0.001",
        *("critic." + key for key in TRAINED), *("critic.fsdp." + key for key in SHARDED),
        "critic.fsdp.use_no_sync_for_gradient_accumulation=True",
        "algorithm.gamma=0.5", "algorithm.lam=0.5", "algorithm.kl_penalty=abs", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1", "trainer.critic_warmup=1",
    ]),
    ("RUN", DYNAMIC_CRITIC, ["critic.ppo_max_token_len_per_gpu=20"]),
    ("RUN", REMOTE_CRITIC, ["critic.model.trust_remote_code=True"]),
    ("RUN", COSINE_CRITIC, ["critic.optim.min_lr_ratio=0.9", "critic.optim.num_cycles=0.25"]),
    ("RUN", ADAPTIVE, ["algorithm.kl_ctrl.horizon=20", "algorithm.kl_ctrl.target_kl=5"]),
    ("RUN", FLAKY, ["reward.on_error=zero"]),
    ("RUN", DAPO, ["reward.reward_kwargs.overlong_buffer_cfg={enable:True,len:3}"]),
    ("RUN", COARSE, ["algorithm.filter_groups.enable=True"]),
    ("RUN", FILTERED, ["algorithm.filter_groups.metric=acc"]),
    ("RUN", FILLED, ["algorithm.filter_groups.max_num_gen_batches=1"]),
    ("RUN", LIMITED, ["algorithm.filter_groups.on_limit=fill"]),
    ("RUN", UNJUDGED, [RM + "enable=True"]),
    ("RUN", JUDGED, [
        RM + "model.path=./other_reward_model", RM + "model.input_tokenizer=./model",
        RM + "model.override_config.rms_norm_eps=0.5", RM + "model.use_remove_padding=False",
        RM + "micro_batch_size_per_gpu=1", RM + "use_dynamic_bsz=True",
        *(RM + "model.fsdp_config." + key for key in SHARDED),
    ]),
    ("RUN", DYNAMIC_JUDGE, [RM + "forward_max_token_len_per_gpu=20"]),
    ("RUN", REMOTE_JUDGE, [RM + "model.trust_remote_code=True"]),
    ("RUN", EPOCHS, ["trainer.total_epochs=2"]),
    ("RUN", CHECKED, ["data.val_files=other.jsonl", "trainer.test_freq=1", "trainer.val_before_train=False",
                      "trainer.val_only=True"]),
    ("RUN", VAL, ["data.val_batch_size=3", "data.val_max_samples=3", "data.validation_shuffle=True",
                  "trainer.validation_data_dir=elsewhere", "trainer.log_val_generations=1"]),
    ("RUN", SAMPLED, [R + "val_kwargs." + key
                      for key in ("temperature=0.5", "top_p=0.5", "top_k=3", "n=2", "do_sample=False")]),
    ("RUN", SAVED, [
        "trainer.save_freq=2", A + "checkpoint.save_contents=[model]", "critic.checkpoint.save_contents=[model]",
        "trainer.default_local_dir=elsewhere", "trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1",
    ]),
    ("RUN", RESUMED, [
        "trainer.resume_mode=disable", "trainer.resume_from_path=kept/global_step_2",
        A + "checkpoint.load_contents=[model]", "critic.checkpoint.load_contents=[model]",
    ]),
    ("SCHEDULES", TWO_RANKS, ["trainer.balance_batch=True"]),
    ("ENGINE", VLLM, [
        R + "tensor_model_parallel_size=2 trainer.n_gpus_per_node=2", R + "enforce_eager=False",
        R + "max_model_len=20", R + "max_num_batched_tokens=300", R + "enable_prefix_caching=False",
        R + "enable_chunked_prefill=False", R + "engine_kwargs.vllm.seed=3",
    ]),
    ("ENGINE", GPU, [R + "gpu_memory_utilization=0.3", R + "free_cache_engine=False"]),
    ("RAY", BASE, [
        "trainer.nnodes=2 ray_kwargs.ray_init.address=10.0.0.1:6379", "trainer.n_gpus_per_node=2",
        "trainer.device=cuda trainer.n_gpus_per_node=1", "trainer.preempt_grace_s=30",
        "ray_kwargs.ray_init.address=10.0.0.1:6379", "ray_kwargs.ray_init.num_cpus=3",
        "ray_kwargs.ray_init.runtime_env.working_dir=.",
    ]),
    # Of use on a GPU only: the workers read them, and on a CPU the plan says so.
    ("READ", BASE, [A + "fsdp_config.param_offload=True", A + "fsdp_config.optimizer_offload=True"]),
    ("READ", KL, [REF + "fsdp_config.param_offload=True"]),
    ("READ", JUDGED, [RM + "model.fsdp_config.param_offload=True"]),
    ("READ", PPO, ["critic.fsdp.param_offload=True", "critic.fsdp.optimizer_offload=True"]),
    # Parts of something that is off.
    ("NOTE", PPO, [
        R + "n_gpus_per_node=2", M + "lora_alpha=8", M + "target_modules=[q_proj]", "critic.model.lora_alpha=8",
        "critic.model.target_modules=[q_proj]",
    ]),
    ("REFUSED", PPO, [
        R + "do_sample=False",
        M + "lora_rank=8", M + "lora_adapter_path=./model", "critic.model.lora_rank=8",
        "critic.model.lora_adapter_path=./model", A + "ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2", A + "fsdp_config.fsdp_size=2", "critic.fsdp.fsdp_size=2",
        R + "nnodes=1", RM + "ulysses_sequence_parallel_size=2",
    ]),
    ("SAME", BASE, [A + "strategy=fsdp"]),  # two names of one engine
]
# fmt: on

# --- where a difference may show --------------------------------------------------------------------------------------

Observation = dict[str, Any]
TIMES = re.compile(r"\d+(\.\d+)? s\b|eta [\d:]+")
UNSEEN = re.compile(r"^(timing.*|perf/.*|.*/lr|actor/reward_kl_penalty_coeff|reward/p99_s|time)$")


class Stop(Exception):
    """Enough was seen."""


class InProcess:
    """A worker group in this process; notes what every worker is asked to do."""

    def __init__(self, role: str, workers: list[Any], events: list[str]) -> None:
        self.role, self.workers, self.events = role, workers, events
        self.dp_size = self.world_size = len(workers)

    def wait_ready(self) -> None: ...

    def close(self, method: Any = None) -> None: ...

    def call(self, method: Callable[..., Any], *args: Any, **same: Any) -> list[Any]:
        return self.map(method, *([arg] * self.world_size for arg in args), **same)

    def map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> list[Any]:
        results = []
        for rank, worker in enumerate(self.workers):
            self.events.append(f"{self.role} {rank} {method.__name__}")
            results.append(method(worker, *(shard[rank] for shard in shards), **same))
        return results

    def start_call(self, method: Callable[..., Any], *args: Any, **same: Any) -> Any:
        if method is RolloutWorker.update_weights:
            self.events.append(str({name: value is not None for name, value in args[0].payload.items()}))
        return self.start_map(method, *([arg] * self.world_size for arg in args), **same)

    def start_map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> Any:
        results: list[Any] = []
        try:
            results = self.map(method, *shards, **same)
        except ProcessDied:  # of a group of one
            results = [WorkerError("died", role=self.role, rank=0, node="", pid=0, phase="", details="", died=True)]

        def outcomes(spared: int = 0) -> list[Any]:
            if not spared and isinstance(results[0], WorkerError):
                raise results[0]
            return results

        return types.SimpleNamespace(result=outcomes, outcomes=outcomes)

    def only(self, ranks: Sequence[int]) -> InProcess:
        return InProcess(self.role, [self.workers[rank] for rank in ranks], self.events)

    def respawn(self) -> None:
        self.events.append(f"{self.role} respawn")


class Workshop:
    """A folder with models, data and functions; what a run would start outside this process is replaced or noted."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.events: list[str] = []
        self.pools: dict[str, RewardPool] = {}
        transformers.logging.disable_progress_bar()
        make_folder(folder)
        self.kept = set(folder.rglob("*"))
        self.observe = functools.cache(self._observe)
        patch.chdir(folder)
        recipe = cli._load_recipe("ppo_trainer", [], [])
        patch.setattr(cli, "_load_recipe", lambda *args: recipe)  # takes a third of a run
        patch.setattr(setup, "spawn", self.spawn)
        patch.setattr(setup, "spawn_rollout", self.spawn_rollout)
        patch.setattr(setup, "check_reward_function", lambda function, **_: function.load())
        patch.setattr(ppo, "RewardPool", self.reward_pool)
        patch.setattr(dataset, "encode_prompts", self.spy(dataset.encode_prompts))
        patch.setattr(fsdp, "fully_shard", self.spy(fsdp.fully_shard))
        patch.setattr(FSDPModule, "set_requires_gradient_sync", self.spy(FSDPModule.set_requires_gradient_sync))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
        config_module: Any = types.ModuleType("vllm.config.weight_transfer")  # the real one takes 16 s to import
        config_module.WeightTransferConfig = dict
        patch.setitem(sys.modules, config_module.__name__, config_module)
        patch.setattr(VllmEngine, "__init__", lambda engine, settings: setattr(engine, "settings", settings))
        self.run([*SAVED, "trainer.default_local_dir=kept"], keep=True)  # what others resume from
        self.kept |= set((folder / "kept").rglob("*")) | {folder / "kept"}
        self.take_files()

    def spy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(first: Any, *args: Any, **options: Any) -> Any:
            shown = {name: str(value) for name, value in options.items() if name != "mesh"}
            self.events.append(f"{function.__name__} {[arg for arg in args if isinstance(arg, bool)]} {shown}")
            return function(first, *args, **options)

        return noted

    def spawn(self, pool: Any, roles: Any, *, limits: Any, log_dir: Any) -> dict[str, Any]:
        self.events.append(f"train {limits}")
        context = RankContext(0, 1)
        return {role: InProcess(role, [spec.cls(context, **spec.kwargs)], self.events) for role, spec in roles.items()}

    def spawn_rollout(
        self, pool: Any, spec: Any, *, limits: Any, tensor_parallel_size: int, num_replicas: int, log_dir: Any
    ) -> InProcess:
        self.events.append(f"rollout {limits}")
        contexts = [RankContext(rank, num_replicas, device=pool.device) for rank in range(num_replicas)]
        return InProcess("rollout", [spec.cls(context, **spec.kwargs) for context in contexts], self.events)

    def reward_pool(self, function: Any, *, log_path: str, **options: Any) -> Any:
        self.events.append(f"rewards {options}")
        key = repr((function, options))
        if key not in self.pools:
            self.pools[key] = RewardPool(function, **options)
        return contextlib.nullcontext(self.pools[key])

    def _observe(self, place: str, *overrides: str) -> Any:
        """JSON of what shows at this place."""
        self.events.clear()
        return json.dumps(PLACES[place](self, overrides), default=str)

    def run(
        self, overrides: Sequence[str], spoil: Callable[[Config], None] = lambda config: None, *, keep: bool = False
    ) -> Observation:
        """Training or a validation: all of it that does not depend on the clock."""
        torch.manual_seed(0)
        lines: list[str] = []
        printed: Any = types.SimpleNamespace(write=lines.append, flush=lambda: None, isatty=lambda: False)
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("verl_lite")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        error = ""
        try:
            composed, plan = compose_plan(overrides)
            spoil(composed.config)
            hook = register_module_forward_pre_hook(self.note_layer)
            with contextlib.redirect_stdout(printed), contextlib.closing(types.SimpleNamespace(close=hook.remove)):
                data = setup.load_data(composed.config)
                ppo.run(composed.config, plan, data, POOL, self.folder, StopRequest())
        except (ValueError, RuntimeError, OSError) as problem:
            error = f"{type(problem).__name__} {problem}"
        finally:
            logger.removeHandler(handler)
        shown = [TIMES.sub("", line) for line in lines]
        return {"error": error, "events": self.events, "lines": shown, "files": {} if keep else self.take_files()}

    def note_layer(self, module: Any, args: Any) -> None:
        if type(module).__name__.endswith("DecoderLayer"):
            self.events.append(f"layer {tuple(args[0].shape)} {args[0].dtype}")

    def take_files(self) -> Observation:
        """The files the run has written, and remove them: of .jsonl the content, without times."""
        found: Observation = {}
        for path in sorted(set(self.folder.rglob("*")) - self.kept, reverse=True):
            if path.is_dir():
                path.rmdir()
                continue
            rows = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
            found[str(path.relative_to(self.folder))] = [
                {key: value for key, value in row.items() if not UNSEEN.match(key)} for row in rows
            ]
            path.unlink()
        return found

    def reads(self, overrides: Sequence[str]) -> Observation:
        """Whether the workers read a key of the FSDP settings and find it true."""
        found: list[str] = []

        class Noted:
            def __init__(self, name: str) -> None:
                self.name = name

            def __bool__(self) -> bool:
                found.append(self.name)
                return False

        names = [override.split("=")[0] for override in overrides if override.endswith("_offload=True")]

        def spoil(config: Config) -> None:
            for name in names:
                section, _, field = name.rpartition(".")
                object.__setattr__(attrgetter(section)(config), field, Noted(name))

        error = self.run(overrides, spoil)["error"]
        return {"error": error, "read": sorted(set(found))}

    def engine(self, overrides: Sequence[str]) -> Observation:
        """What vLLM is started with."""
        composed, _ = compose_plan(overrides)
        config = composed.config
        rollout: list[InProcess] = []

        def spawn_rollout(*args: Any, **kwargs: Any) -> InProcess:
            rollout.append(self.spawn_rollout(*args, **kwargs))
            raise Stop

        pool: Any = types.SimpleNamespace(device=config.trainer.device)
        with self.patch.context() as patch, contextlib.suppress(Stop):
            patch.setattr(setup, "spawn_rollout", spawn_rollout)
            setup.start_workers(config, setup.load_data(config), pool, self.folder)
        settings = rollout[0].workers[0]._engine.settings
        environment = {name: value for name, value in _environment(settings).items() if not name.endswith("_PID")}
        return {"options": _engine_options(settings), "environment": environment}

    def ray(self, overrides: Sequence[str]) -> Observation:
        """What Ray and its placement groups are asked for."""
        asked: Observation = {}

        def note(what: str, **options: Any) -> Any:
            asked[what] = options
            if what == "pool":
                raise ValueError("seen")
            return types.SimpleNamespace(wait=lambda: None, close=lambda: None)

        silent = types.SimpleNamespace(ray_dir="", finish=lambda: None)

        def signals(*args: Any, **options: Any) -> Any:
            asked["signals"] = [*args, options]
            return original(*args, **options)

        original = main_ppo._Signals
        with self.patch.context() as patch, contextlib.redirect_stdout(None):
            patch.setattr(main_ppo, "_Signals", signals)
            patch.setattr(cluster, "check_machine", lambda *args: ([], []))
            patch.setattr(cluster, "RayCluster", functools.partial(note, "ray"))
            patch.setattr(placement, "ResourcePool", functools.partial(note, "pool"))
            patch.setattr(cluster, "Watchdog", lambda log_dir: silent)
            patch.setattr(main_ppo, "_log_to", lambda *args: io.StringIO())
            main_ppo.main(overrides)
        self.take_files()
        return asked


def make_folder(folder: Path) -> None:
    tiny_model(folder / "model", layers=1)
    tiny_model(folder / "other_model", layers=1, seed=1)
    char_tokenizer(folder / "other_tokenizer", chat_template="{{ messages[0]['content'] }}=")
    tiny_reward_model(folder / "reward_model", layers=1)
    tiny_reward_model(folder / "other_reward_model", layers=1, seed=2)
    char_tokenizer(folder / "reward_model", chat_template="{{ messages[0]['content'] }}#{{ messages[1]['content'] }}")
    for name in ("model", "reward_model"):
        shutil.copytree(folder / name, folder / f"remote_{name}")
        config = folder / f"remote_{name}" / "config.json"
        auto_map = {
            "AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine", "AutoModelForCausalLM": "mine.MineForCausalLM",
            "AutoModelForSequenceClassification": "mine.MineForSequenceClassification",
        }  # fmt: skip
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mine", "auto_map": auto_map}))
        (folder / f"remote_{name}" / "mine.py").write_text(REMOTE_CODE)
    # About a fourth of the tokens end a response, so that lengths differ.
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(30, 50))}))
    rows = addition_rows(10)
    for i, row in enumerate(rows):
        row |= {"question": f"{i}?", "source": "other"}
        if i % 2:
            row["prompt"] = [{"role": "user", "content": f"{i}+{i}+{i}+{i}="}]  # 8 tokens, the others have 6
    write_jsonl(rows[:8], folder / "train.jsonl")
    write_jsonl(rows[2:], folder / "other.jsonl")
    write_jsonl(rows[1:9], folder / "val.jsonl")
    write_jsonl([{**row, "reward_model": {"style": "model"}} for row in rows[:8]], folder / "judged.jsonl")
    for name, text in FILES.items():
        (folder / name).write_text(text)


FILES = {
    "template.jinja": "{% for message in messages %}{{ message['content'] }}:{{ suffix }}{% endfor %}",
    "dataset.py": """
from verl_lite.data.dataset import PromptDataset

class Short(PromptDataset):
    def read_rows(self, path):
        return super().read_rows(path)[:4]

class Long(PromptDataset):
    def read_rows(self, path):
        return super().read_rows(path)[4:]
""",
    "engine.py": """
from dataclasses import replace
from verl_lite.distributed.deaths import ProcessDied
from verl_lite.rollout.hf_engine import HfEngine

class Mortal(HfEngine):
    died = False

    def generate(self, *args, **options):
        if not self.died:
            self.died = True
            raise ProcessDied("killed")
        return super().generate(*args, **options)

class OneToken(HfEngine):
    def generate(self, requests, sampling, *, timeout_s):
        return super().generate(requests, replace(sampling, max_tokens=1), timeout_s=timeout_s)
""",
    "reward.py": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    return factor * (len(data_source) + sum(map(ord, solution_str))) % 11 / 11

def other(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))

def coarse(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) > 2), "acc": ord(solution_str[0]) % 2} if solution_str else 0.0

def flaky(data_source, solution_str, ground_truth, extra_info=None):
    if ord(solution_str[0]) % 3 == 0:
        raise RuntimeError("flaky")
    return 1.0
""",
    "other_reward.py": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
""",
}

REMOTE_CODE = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model, Qwen2PreTrainedModel

class MineConfig(Qwen2Config):
    model_type = "mine"

class Mine(Qwen2Model):
    config_class = MineConfig

class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig

class MineForSequenceClassification(Qwen2PreTrainedModel):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = Mine(config), torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()
"""

POOL: Any = types.SimpleNamespace(slots=[types.SimpleNamespace(node_address="127.0.0.1")], device="cpu")


def schedules(workshop: Workshop, overrides: Sequence[str]) -> Observation:
    """Who runs which of 8 rows of these lengths."""
    _, plan = compose_plan(overrides)
    return {"schedules": plan.actor.schedules([9, 8, 3, 2, 7, 6, 5, 4], seed=0)}


def notes(workshop: Workshop, overrides: Sequence[str]) -> list[str]:
    """What the plan and the warnings say to have no effect."""
    composed, plan = compose_plan(overrides)
    return [note for note in [*composed.warnings, *plan.notes] if "no effect" in note.lower()]


def refusals(workshop: Workshop, overrides: Sequence[str]) -> list[str]:
    try:
        compose_plan(overrides)
    except ConfigError as error:
        return error.problems
    return []


PLACES: dict[str, Callable[[Workshop, Sequence[str]], Any]] = {
    "RUN": Workshop.run, "SAME": Workshop.run, "READ": Workshop.reads, "ENGINE": Workshop.engine, "RAY": Workshop.ray,
    "SCHEDULES": schedules, "NOTE": notes, "REFUSED": refusals,
}  # fmt: skip


@contextlib.contextmanager
def open_workshop(folder: Path) -> Iterator[Workshop]:
    """A workshop in a process group of one, for a module's tests."""
    process_group.init_process_group(RankContext(0, 1), "127.0.0.1", process_group.free_port(), 60)
    with pytest.MonkeyPatch.context() as patch:
        workshop = Workshop(folder, patch)
        yield workshop
        for pool in workshop.pools.values():
            pool.close()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("workshop")) as workshop:
        yield workshop


# --- the tests --------------------------------------------------------------------------------------------------------


def leaf_of(change: str) -> str:
    """The key that an override sets: a dict's entry belongs to the dict, a loss's option to `options`."""
    typed = change.split("=")[0]
    found = [key for key in leaf_keys() if typed == key or typed.startswith(f"{key}.")]
    return found[0] if found else f"{typed.rpartition('.')[0]}.options"


CASES = [(place, base, change) for place, base, changes in EFFECTS for change in changes]


def test_every_key_stands_here_once() -> None:
    keys = [leaf_of(change) for _, _, change in CASES]
    assert sorted(keys) == sorted(set(keys))
    assert [key for key in leaf_keys() if key not in keys] == [], "keys whose effect nobody shows"
    assert [key for key in keys if key not in leaf_keys()] == []


def test_every_pending_key_is_refused_here() -> None:
    assert set(PENDING) <= {leaf_of(change) for place, _, change in CASES if place == "REFUSED"}


def test_two_runs_of_the_same_command_show_the_same(workshop: Workshop) -> None:
    for base in (BASE, PPO, SAMPLED):
        assert workshop.observe("RUN", *base) == workshop.observe("SAME", *base)


@pytest.mark.parametrize(("place", "base", "change"), CASES, ids=[leaf_of(change) for _, _, change in CASES])
def test_the_key_has_an_effect(place: str, base: list[str], change: str, workshop: Workshop) -> None:
    before, after = workshop.observe(place, *base), workshop.observe(place, *base, *change.split(" "))
    if (before == after) != (place == "SAME"):
        pytest.fail(f"{change}: {'a' if place == 'SAME' else 'no'} difference in {place}")
    if place in ("RUN", "READ"):
        assert json.loads(after)["error"] == ""
    if place in ("READ", "NOTE", "REFUSED"):
        assert leaf_of(change) in after
    if place == "READ":
        assert change in workshop.observe("NOTE", *base, change)
