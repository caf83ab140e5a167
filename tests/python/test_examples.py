"""The examples run, give the losses of the plain loop, and change as few lines as they say."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "bindings" / "examples"


def code_lines(name):
    """Lines of the program without its docstring and blank lines."""
    body = (EXAMPLES / name).read_text().split('"""', 2)[2]
    return [line for line in body.splitlines() if line.strip()]


def changed_lines(before, after):
    """Lines of the changed form that the first form does not have."""
    diff = difflib.unified_diff(code_lines(before), code_lines(after), lineterm="", n=0)
    return [line for line in diff if line.startswith("+") and not line.startswith("+++")]


def losses(name):
    result = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return [float(line) for line in result.stdout.split()]


@pytest.fixture(scope="module")
def plain():
    return losses("plain_loop.py")


@pytest.mark.parametrize(
    ("before", "name", "limit"),
    [
        ("plain_loop.py", "optimizer_door.py", 2),
        ("plain_loop.py", "streamed_door.py", 5),
        ("deepspeed_loop.py", "deepspeed_door.py", 1),
    ],
)
def test_example(before, name, limit, plain):
    """Case U-10, of the examples."""
    assert len(changed_lines(before, name)) <= limit, changed_lines(before, name)
    got = losses(name)
    assert len(got) == len(plain) == 30
    assert plain[-1] < 0.7 * plain[0]
    assert all(abs(a - b) <= 0.01 * b for a, b in zip(got, plain, strict=True)), (got, plain)
