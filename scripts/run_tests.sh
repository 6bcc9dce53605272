#!/usr/bin/env bash
# Run the tests that need no GPU; arguments are passed on to pytest (default: tests/cpu tests/dist).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
ensure_environment pytest pytest_timeout

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
paths=(tests/cpu tests/dist)
for argument in "$@"; do
    case $argument in tests/*) paths=() ;; esac
done
exec "$PYTHON" -m pytest -q "${paths[@]}" "$@"
