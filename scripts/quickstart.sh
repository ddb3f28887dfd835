#!/usr/bin/env bash
# From a fresh clone to a model that learns: install into .venv, make the model and the data, train 40 GRPO steps.
# Extra arguments are passed on to the training run, e.g. trainer.total_training_steps=10.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
python="$root/.venv/bin/python"
"$python" "$root/scripts/prepare_quickstart.py"
engine=()
"$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)" || engine=(actor_rollout_ref.rollout.name=hf)
exec "$python" -m verl_lite.main_ppo --config-name quickstart ${engine[@]+"${engine[@]}"} "$@"
