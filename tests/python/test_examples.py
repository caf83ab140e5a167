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


def changed_lines(name):
    """Lines of the changed form that the plain loop does not have."""
    diff = difflib.unified_diff(code_lines("plain_loop.py"), code_lines(name), lineterm="", n=0)
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


@pytest.mark.parametrize(("name", "limit"), [("optimizer_door.py", 2)])
def test_example(name, limit, plain):
    assert len(changed_lines(name)) <= limit, changed_lines(name)
    got = losses(name)
    assert len(got) == len(plain) == 30
    assert plain[-1] < 0.7 * plain[0]
    assert all(abs(a - b) <= 0.01 * b for a, b in zip(got, plain, strict=True)), (got, plain)
