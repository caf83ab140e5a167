"""Optimizers that are not here: refused by name at every door, before anything changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from orlop import deepspeed_compat  # noqa: E402


class MatrixOptimizer(torch.optim.Optimizer):
    """Needs the shape of a weight, as Muon does: flat pieces of one would train something else."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.sub_(group["lr"] * (u @ v))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def through_adamw(model, optimizer):
    orlop.AdamW.from_torch(optimizer)


def through_wrap(model, optimizer):
    orlop.wrap(model, optimizer)


def through_deepspeed(model, optimizer):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    deepspeed_compat.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.parametrize("door", [through_adamw, through_wrap, through_deepspeed])
def test_one_that_needs_matrices_is_refused_by_name(door):
    """Case N-18: at set-up, naming the class and what is accepted; the model goes on with its own optimizer."""
    model = Model()
    optimizer = MatrixOptimizer(model.parameters())
    with pytest.raises(orlop.UsageError, match=r"MatrixOptimizer.*AdamW"):
        door(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    assert all(
        p.shape == (6, 6) and not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )


def test_muon_in_a_deepspeed_configuration_is_refused_by_name():
    """Case N-18: the same where the name comes from a file."""
    with pytest.raises(orlop.UsageError, match=r"'Muon'.*AdamW"):
        deepspeed_compat.initialize(
            model=Model(), config={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
        )
