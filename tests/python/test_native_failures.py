"""What fails in the native part is an exception of the program that uses it, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

WORKER_THREAD = """
import glob, os, sys, torch, orlop
model = torch.nn.Linear(300, 300)
optimizer = orlop.AdamW(model.parameters(), module=model, nvme=sys.argv[1])
for step in range(3):
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    for path in glob.glob(sys.argv[1] + "/*.swap"):
        os.truncate(path, 8192)
"""

OUT_OF_MEMORY = """
import resource, torch, orlop
model = torch.nn.Linear(12000, 12000, bias=False)
orlop.AdamW([torch.nn.Parameter(torch.ones(1))])  # loads what Python needs for it
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), now + (512 << 20)))
orlop.AdamW(model.parameters())
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            WORKER_THREAD,
            ["Traceback", "orlop.errors.IoError", "swap_in of", "'weight'", ".swap has 8192 bytes"],
        ),
        (OUT_OF_MEMORY, ["Traceback", "orlop.errors.OutOfMemoryError", "refused to map", "bytes"]),
    ],
    ids=["in a worker thread", "out of memory"],
)
def test_it_ends_with_an_exception_that_tells(tmp_path, program, words):
    """Case U-01, but for a log of crashes, which is not kept: what was done and to what. Nobody catches it here, so
    the process ends with code 1."""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)
