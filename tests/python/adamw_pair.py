"""What tests of orlop.AdamW share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import orlop

GRADIENTS = pytest.mark.parametrize("gradients", ["stay", "leave"])


def pair(numel=6, dtype=torch.float32, **options):
    """The same parameter in two optimizers: ours and torch's."""
    torch.manual_seed(2)
    weights = torch.randn(numel).to(dtype)
    ours, theirs = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    common = {k: v for k, v in options.items() if k not in ("gradients", "nonfinite", "moments")}
    return (ours, orlop.AdamW([ours], **options)), (theirs, torch.optim.AdamW([theirs], **common))


def backward(p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum().backward()


def run_python(code, timeout=120, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
