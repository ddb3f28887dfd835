#!/usr/bin/env bash
# A run as a job of a running Ray cluster, through its job server:
#   SERVER=http://head:8265 bash examples/ray_job_submit.sh key=value …
# This checkout goes with it as the working folder. Paths of data, models and of what the run leaves (trainer.run_dir,
# trainer.default_local_dir) must be absolute and on storage that the nodes share; see docs/clusters.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# `ray job stop` gives a job three seconds by default; a step and its checkpoint take longer.
environment='{"excludes": [".venv", ".git", "outputs", "checkpoints"], "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}'
exec "${PYTHON:-$root/.venv/bin/python}" -m ray.scripts.scripts job submit --address "${SERVER:-http://127.0.0.1:8265}" --working-dir "$root" \
  --runtime-env-json "$environment" -- "${REMOTE_PYTHON:-python}" -m verl_lite.main_ppo "$@"
