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

run_ctest() {  # PRESET
  plain_addresses ctest --preset "$1" --output-junit "$PWD/$results/ctest-$1.xml"
}

sanitized() {  # PRESET
  build "$1" "build-$1" && run_ctest "$1"
}

# The threads themselves: queues, events, gates, slots, collectives. `test.sh tsan` runs every test.
threads_under_tsan() {
  cmake --preset tsan "${launcher[@]}" -DPython_EXECUTABLE="$PWD/$python" > "$results/configure-tsan.log" ||
    { cat "$results/configure-tsan.log"; return 1; }
  ninja -C build-tsan -j "$jobs" --quiet base_test memory_test host_queue_test communicator_test optimizer_queue_test
  plain_addresses ctest --preset tsan -R '^(base|memory|host_queue|communicator|optimizer_queue)_test$' \
    --output-junit "$PWD/$results/ctest-tsan.xml"
}

run_pytest() {
  PYTHONPATH=$PWD/build/python $python -m pytest -q --junitxml="$results/pytest.xml" </dev/null
}

case "${1:-all}" in
  all)
    stage "build" build dev build
    stage "ctest" run_ctest dev
    stage "python" run_pytest
    stage "tsan" threads_under_tsan
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
