#!/usr/bin/env bash
# PPO with a critic on one node with 8 GPUs, micro-batches limited by tokens.
#
#   bash examples/ppo_8gpu.sh [key=value ...]       what you add overrides what stands below
#   VERL_LITE_ENTRY=verl_lite.plan bash examples/ppo_8gpu.sh     only explain the sizes
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}            # train.parquet and test.parquet, from scripts/data/gsm8k.py
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}          # a folder or a hub id; the critic starts from it too
PROJECT=${PROJECT:-ppo_gsm8k}
EXPERIMENT=${EXPERIMENT:-ppo_8gpu}

args=(
    algorithm.adv_estimator=gae                   # reads values, so there is a critic
    algorithm.gamma=1.0
    algorithm.lam=0.95
    algorithm.use_kl_in_reward=True               # a KL penalty against the starting model, in the reward
    algorithm.kl_ctrl.kl_coef=0.001

    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=1024                    # prompts, one response each
    data.max_prompt_length=512                    # tokens
    data.max_response_length=1024
    data.filter_overlong_prompts=True

    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256            # 4 optimizer steps; the critic's mini-batches follow
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576    # tokens on a GPU at once; at least one longest row

    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5

    critic.optim.lr=1e-5
    critic.ppo_max_token_len_per_gpu=32768

    trainer.project_name="$PROJECT"
    trainer.experiment_name="$EXPERIMENT"
    trainer.n_gpus_per_node=8
    trainer.total_epochs=15
    trainer.test_freq=5                           # steps between validations
    trainer.critic_warmup=5                       # steps in which only the critic learns
)

"${PYTHON:-python}" -m "${VERL_LITE_ENTRY:-verl_lite.main_ppo}" "${args[@]}" "$@"
