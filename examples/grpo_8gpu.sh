#!/usr/bin/env bash
# GRPO on one node with 8 GPUs.
#
#   bash examples/grpo_8gpu.sh [key=value ...]      what you add overrides what stands below
#   VERL_LITE_ENTRY=verl_lite.plan bash examples/grpo_8gpu.sh    only explain the sizes
#
# 1,024 prompts with 5 responses each are 5,120 sequences a step. A mini-batch is 256 prompts, 1,280 sequences: 4
# optimizer steps. A GPU has 160 of these and runs them 80 at a time. See docs/batch-sizes.md.
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}            # train.parquet and test.parquet, from scripts/data/gsm8k.py
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}          # a folder or a hub id
PROJECT=${PROJECT:-grpo_gsm8k}
EXPERIMENT=${EXPERIMENT:-grpo_8gpu}

args=(
    algorithm.adv_estimator=grpo
    algorithm.kl_ctrl.kl_coef=0.001               # of a KL in the reward: has no effect here, the KL is in the loss

    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=1024                    # prompts
    data.max_prompt_length=512                    # tokens
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation=error

    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True

    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256            # prompts per optimizer step
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80    # sequences on a GPU at once; out of memory: halve it
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False

    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5                              # responses per prompt
    actor_rollout_ref.rollout.tensor_model_parallel_size=2     # 4 engines of 2 GPUs
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160

    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160
    actor_rollout_ref.ref.fsdp_config.param_offload=True

    trainer.project_name="$PROJECT"
    trainer.experiment_name="$EXPERIMENT"
    trainer.logger="['console']"
    trainer.nnodes=1
    trainer.n_gpus_per_node=8
    trainer.total_epochs=15
    trainer.test_freq=5                           # steps between validations
    trainer.save_freq=-1
    trainer.critic_warmup=0
)

"${PYTHON:-python}" -m "${VERL_LITE_ENTRY:-verl_lite.main_ppo}" "${args[@]}" "$@"
