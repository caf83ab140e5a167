#!/usr/bin/env bash
# Builds and runs the tests: `test.sh all|asan|tsan|gpu`. Goes on after a failed stage and ends with counts.
# Environment: JOBS, LAUNCHER (further CMake arguments).
set -euo pipefail
cd "$(dirname "$0")/.."

# Objects of one build tree serve the others, also where a header is precompiled.
export CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
python=.venv/bin/python
results=build/test-results
jobs=${JOBS:-$(nproc)}
read -ra launcher <<< "${LAUNCHER:-}"
failed=()
trap 'trap - TERM; kill 0' INT TERM  # also what runs in the background
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

# PRESET: every program of units and integration. Without CUDA and MPI, whose libraries are not instrumented, so that
# their synchronisation would not be seen: ranks are threads, or processes that sockets join.
sanitized() {
  build "$1" "build-$1" && run_ctest "$1" -j "$jobs"
}

run_pytest() {  # [pytest argument ...]
  PYTHONPATH=$PWD/build/python $python -m pytest -q --junitxml="$results/pytest.xml" "$@" </dev/null
}

case "${1:-all}" in
  all)
    stage "build" build dev build
    stage "ctest" run_ctest dev -j "$jobs"
    # Pytest runs one test at a time, and many of them wait for processes: beside the sanitizers.
    (failed=(); stage "python" run_pytest; [[ ${#failed[@]} -eq 0 ]]) > "$results/python.log" 2>&1 &
    python_stage=$!
    stage "tsan" sanitized tsan
    stage "asan" sanitized asan
    wait "$python_stage" || failed+=("python")
    cat "$results/python.log"
    ;;
  asan | tsan)
    stage "$1" sanitized "$1"
    ;;
  gpu)
    stage "build" build dev build
    stage "ctest" run_ctest gpu
    # Those that need a GPU, and those of the host that run on one as well.
    export ORLOP_TEST_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8
    stage "python" run_pytest -m "gpu or any_device"
    ;;
  *)
    echo "usage: test.sh all|asan|tsan|gpu" >&2
    exit 2
    ;;
esac

$python .ci/summary.py "$results" "${failed[@]}"
