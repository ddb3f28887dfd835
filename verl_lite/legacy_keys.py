"""Keys of verl that go by another name here, act always, or are not here: what `cli` says about each.

Keys are whole dotted names (an entry of RENAMED or ALIASES also covers everything below it), patterns are fnmatch's.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

_ACTOR, _ROLLOUT, _REF, _MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref", "model"))

RENAMED = {
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.model.fsdp_config": "critic.fsdp",
    f"{_REF}.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.use_remove_padding": f"{_MODEL}.use_remove_padding",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "actor_rollout_ref.nccl_timeout": "trainer.collective_timeout_s",
    "algorithm.rollout_is_level": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.num_workers": "reward.num_workers",
    "ray_init": "ray_kwargs.ray_init",
}
"""Mapped with a warning."""

ALIASES = {
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    "custom_reward_function": "reward.custom_reward_function",
    **{
        f"reward_model.{name}": f"reward.reward_model.{name}"
        for name in (
            "enable", "model", "micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu",
            "ulysses_sequence_parallel_size",
        )
    },
}  # fmt: skip
"""Second names that stay: mapped without a warning."""

GLOBAL_SIZES = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size": f"{_REF}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward.reward_model.micro_batch_size_per_gpu",
    "reward.reward_model.micro_batch_size": "reward.reward_model.micro_batch_size_per_gpu",
}
"""Sizes that count all ranks together: divided by the ranks."""

IGNORED = {
    "*.grad_offload": "gradients go with the weights",
    "data.return_*": "always on where it is needed",
    "data.dataloader_num_workers": "prompts are kept in memory",
    f"{_ROLLOUT}.mode": "the engine always runs asynchronously",
    f"{_ROLLOUT}.load_format": "the engine's weights always come from the actor",
    f"{_ROLLOUT}.layered_summon": "weights always travel in pieces",
    f"{_ROLLOUT}.*update_weights_bucket_megabytes": "weights always travel in pieces",
    f"{_ROLLOUT}.disable_log_stats": "the engine's log goes to the run folder",
    f"{_ROLLOUT}.skip_tokenizer_init": "the engine gets token ids",
    f"{_ROLLOUT}.agent.num_workers": "generation needs no further processes",
    "actor_rollout_ref.hybrid_engine": "actor and engine share slots unless rollout.nnodes is set",
    "*.use_fused_kernels": "log-probs are always computed in chunks",
    "*.fused_kernel_options*": "log-probs are always computed in chunks",
    "*.entropy_from_logits*": "entropy is always computed in chunks",
    "*.entropy_checkpointing": "entropy is always computed in chunks",
    f"{_ACTOR}.calculate_entropy": "the entropy is always measured",
    "*.use_torch_compile": "not used",
    "*.forward_prefetch": "FSDP2 prefetches by itself",
    "*.wrap_policy*": "every decoder layer is a unit",
    "*.use_orig_params": "always on with FSDP2",
    "*.strategy": "one training engine for all roles",
    "*.offload_policy": "use param_offload and optimizer_offload",
    "*.use_shm": "local files are read in place",
    "*.optim.total_training_steps": "trainer.total_training_steps decides",
    "*.checkpoint.async_save": "checkpoints are written before the next step",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu limits these passes too",
    "critic.data_loader_seed": f"as {_ACTOR}.data_loader_seed",
    "critic.loss_scale_factor": f"as {_ACTOR}.loss_scale_factor",
    "critic.rollout_n": f"as {_ROLLOUT}.n",
    f"{_ACTOR}.rollout_n": f"as {_ROLLOUT}.n",
    f"{_REF}.rollout_n": f"as {_ROLLOUT}.n",
    "critic.model.tokenizer_path": "the critic gets token ids",
    "reward_model.launch_reward_fn_async": "rewards always run in processes of their own",
    "reward_model.max_length": "data.max_prompt_length and data.max_response_length decide",
    "trainer.ray_wait_register_center_timeout": "trainer.start_timeout_s decides",
    "trainer.del_local_ckpt_after_load": "checkpoints stay where they are",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.use_v1": "there is one implementation",
    "ray_kwargs.timeline_json_file": "not written",
    "*_target_": "classes are fixed here",
}
"""Accepted with a warning that says why nothing happens."""

UNSUPPORTED = {
    "*megatron*": "Megatron",
    "*sglang*": "SGLang",
    "*trtllm*": "TensorRT-LLM",
    "*tensorrt*": "TensorRT-LLM",
    "*.npu*": "NPUs",
    "*_npu*": "NPUs",
    "*veomni*": "VeOmni",
    "*torchtitan*": "torchtitan",
    "*mindspeed*": "MindSpeed",
    "*automodel*": "AutoModel",
    "*profile*": "profilers",
    "*nsight*": "profilers",
    "data.image_*": "multi-modal data",
    "data.video_*": "multi-modal data",
    "data.audio_*": "multi-modal data",
    "data.mm_*": "multi-modal data",
    "*limit_images": "multi-modal data",
    "*freeze_vision*": "multi-modal models",
    "*.multi_turn*": "multi-turn rollouts and tools",
    "data.*tool*": "multi-turn rollouts and tools",
    f"{_ROLLOUT}.agent*": "agent loops",
    "data.datagen*": "data generated while training",
    "data.sampler*": "samplers of one's own",
    "data.gen_batch_size": "another batch size for generation",
    "*sandbox_fusion*": "the sandbox service",
    "*.mtp*": "multi-token prediction",
    "*.qat*": "quantisation-aware training",
    "*quantization*": "quantisation",
    "*.router_replay*": "router replay",
    "*routing_replay*": "router replay",
    "*.tiled_mlp*": "tiled MLPs",
    "*.use_liger": "Liger kernels",
    "*.external_lib": "external model libraries",
    "*.hf_config_path": "a config apart from the model folder",
    "*.enable_activation_offload": "activation offload",
    "*.exclude_modules": "excluded LoRA modules",
    "*.model.lora*": "this form of LoRA; use lora_rank, lora_alpha, target_modules",
    "*.optim.optimizer*": "optimizers other than AdamW",
    "*.optim.override_optimizer_config": "optimizers other than AdamW",
    "*.optim.zero_indexed_step": "another count of scheduler steps",
    "*.full_determinism": "full determinism",
    "*.pad_to_length*": "padding to fixed lengths",
    "*.use_prefix_grouper": "the prefix grouper",
    f"{_ROLLOUT}.pipeline_model_parallel_size": "pipeline parallelism",
    "*.data_parallel_size": "data parallelism inside an engine; use num_replicas",
    "*.expert_parallel_size": "expert parallelism",
    f"{_ROLLOUT}.trace*": "traces",
    f"{_ROLLOUT}.prometheus*": "Prometheus",
    f"{_ROLLOUT}.disaggregation*": "disaggregated prefill",
    f"{_ROLLOUT}.checkpoint_engine*": "checkpoint engines",
    f"{_ROLLOUT}.skip_*": "skipping the rollout",
    f"{_ROLLOUT}.over_sample_rate": "over-sampling",
    f"{_ROLLOUT}.multi_stage_wake_up": "this switch; weights wake before the cache anyway",
    f"{_ROLLOUT}.cudagraph_capture_sizes": "this engine option; use engine_kwargs.vllm",
    f"{_ROLLOUT}.scheduling_policy": "this engine option; use engine_kwargs.vllm",
    f"{_ROLLOUT}.logprobs_mode": "other log-probs than those of the sampled distribution",
    "reward*.rollout*": "a reward model served by an engine",
    "reward*.enable_resource_pool": "reward models on slots of their own",
    "reward*.nnodes": "reward models on slots of their own",
    "reward*.n_gpus_per_node": "reward models on slots of their own",
    "reward*.model_path": "a reward model served by an engine; use reward.reward_model.model.path",
    "reward*.reward_loop*": "reward loops",
    "reward.reward_manager.*": "this form; reward.reward_manager.name takes an import path",
    "algorithm.rollout_is_*": "this rollout correction",
    "algorithm.rollout_correction.*": "this rollout correction",
    "algorithm.filter_groups.*": "this filter option",
    "algorithm.use_pf_ppo": "PF-PPO",
    "algorithm.pf_ppo*": "PF-PPO",
    "algorithm.mopd*": "MOPD",
    "distillation*": "distillation",
    "transfer_queue*": "the transfer queue",
    "skip*": "skipping phases",
    "trainer.v1*": "other trainers",
    "trainer.default_hdfs_dir": "HDFS",
    "trainer.esi_redundant_time": "elastic instances",
}
"""Known in verl, not here: an error, unless the value switches the feature off."""

UNSUPPORTED_VALUES = ("megatron", "sglang", "trtllm", "tensorrt", "npu", "veomni", "torchtitan", "mindspeed")


def is_off(key: str, value: Any) -> bool:
    """Whether this value of an unsupported key asks for nothing."""
    if isinstance(value, dict):
        return not value or is_off(f"{key}.enable", value.get("enable", value.get("enabled")))
    if fnmatchcase(key, "*parallel_size"):
        return value in (None, 1)
    return value in (None, False, 0, "", [], "disable", "disabled", "AdamW", "processed_logprobs", "auto")
