#!/usr/bin/env bash
# Install what is missing, then run every check: ruff, mypy, all tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
export PATH="$PWD/.venv/bin:$PATH"
echo "test: ruff"
ruff check .
ruff format --check .
echo "test: mypy"
mypy
echo "test: pytest"
python -m pytest "$@"
