#!/usr/bin/env bash
# Builds and runs the tests: `test.sh all|asan|tsan`. Goes on after a failed stage and ends with counts.
# Environment: JOBS, LAUNCHER (further CMake arguments).
set -euo pipefail
cd "$(dirname "$0")/.."

# Objects of one build tree serve the others.
export CCACHE_NOHASHDIR=1
python=.venv/bin/python
results=build/test-results
jobs=${JOBS:-$(nproc)}
read -ra launcher <<< "${LAUNCHER:-}"
failed=()
mkdir -p "$results"
rm -f "$results"/*.xml

stage() {  # NAME COMMAND...: runs it, notes its time and whether it failed
  local name=$1 start=$SECONDS
  shift
  echo "=== $name"
  "$@" || failed+=("$name")
  echo "=== $name: $((SECONDS - start)) s"
}

build() {  # PRESET BUILD_DIR
  cmake --preset "$1" "${launcher[@]}" -DPython_EXECUTABLE="$PWD/$python" > "$results/configure-$1.log" ||
    { cat "$results/configure-$1.log"; return 1; }
  ninja -C "$2" -j "$jobs" --quiet
}

# Without address randomization where the kernel allows that: ThreadSanitizer's shadow needs fixed ranges.
plain_addresses() {
  if setarch -R true 2>/dev/null; then setarch -R "$@"; else "$@"; fi
}

run_ctest() {  # PRESET [ctest argument ...]
  plain_addresses ctest --preset "$1" "${@:2}" --output-junit "$PWD/$results/ctest-$1.xml"
}

# PRESET [ctest argument ...]: tests side by side, since most of them run one thread at a time.
sanitized() {
  local preset=$1
  shift
  build "$preset" "build-$preset" && run_ctest "$preset" -j "$jobs" "$@"
}

# What of `test.sh tsan`, which runs everything, has few threads or runs long for what it adds: arithmetic that other
# programs have too, placements by the hundred, ranks whose threads communicator_test and
# socket_communicator_test have.
readonly without_threads='^(host_ops_test_.*|block_parity_test|block_golden|formats_test|offload_equals_resident_test'\
'|ranks_equal_single_test|ranks_resume_test|rank_processes_test|two_hosts_test|bad_input_test)$'

run_pytest() {
  PYTHONPATH=$PWD/build/python $python -m pytest -q --junitxml="$results/pytest.xml" </dev/null
}

case "${1:-all}" in
  all)
    stage "build" build dev build
    stage "ctest" run_ctest dev
    stage "python" run_pytest
    stage "tsan" sanitized tsan -E "$without_threads"
    stage "asan" sanitized asan -L '^unit$'
    ;;
  asan | tsan)
    stage "$1" sanitized "$1"
    ;;
  *)
    echo "usage: test.sh all|asan|tsan" >&2
    exit 2
    ;;
esac

$python .ci/summary.py "$results" "${failed[@]}"
