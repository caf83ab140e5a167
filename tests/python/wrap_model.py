"""What tests of orlop.wrap share: a small model, its loop, and the same one unwrapped.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import os

import torch

import orlop
from orlop.wrapping import stream_of

STEPS = 8
DEVICE = os.environ.get("ORLOP_TEST_DEVICE", "cpu")


class Model(torch.nn.Module):
    def __init__(self, blocks=5, width=24, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 4)
        self.to(DEVICE, dtype)

    def forward(self, x, order=None):
        x = self.inp(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = torch.tanh(self.blocks[index](x)) + x
        return self.out(x)


def batch(step, dtype=torch.float32):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)


def plain(model):
    return model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave")


def streamed(model):
    """With room for two blocks, which is all that "auto" takes of a host."""
    block = max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)
    config = "auto" if DEVICE == "cpu" else {"limits": {"gpu": 2 * block}}
    return orlop.wrap(model, {"lr": 1e-2}, config=config)


def train(model, optimizer, steps=STEPS, forward=None, between=None, first=0):
    losses = []
    for step in range(first, first + steps):
        x = batch(step, model.inp.weight.dtype)
        loss = (forward(model, x, step) if forward else model(x)).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if between:
            between(model, step)
    return losses


def weights(model):
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same(forward=None, between=None, make=Model):
    """The wrapped run has the bits of the plain one; returns the wrapped model and its optimizer."""
    reference, optimizer = plain(make())
    expected = train(reference, optimizer, forward=forward)
    model, optimizer = streamed(make())
    assert train(model, optimizer, forward=forward, between=between) == expected
    got, wanted = weights(model), weights(reference)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert stream_of(model).resident_blocks() == []
    return model, optimizer
