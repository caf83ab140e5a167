"""What tests of the DeepSpeed door share: a small model and its loop, beside plain PyTorch."""

from __future__ import annotations

import logging

import pytest
import torch

from orlop import deepspeed_compat as deepspeed

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(6, 20)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(2))
        self.out = torch.nn.Linear(20, 3)
        self.register_buffer("offset", torch.ones(20))

    def forward(self, x):
        x = self.inp(x) + self.offset.to(x.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


@pytest.fixture(autouse=True)
def usual_log_level():
    yield
    logging.getLogger("orlop").setLevel(logging.NOTSET)


def make(model=None, client=None, **config):
    values = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.0, **config}
    if client is not None:
        values.pop("optimizer")
    engine, *_ = deepspeed.initialize(model=model or Net(), optimizer=client, config=values)
    return engine


def data(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator).to(dtype), torch.randn(4, 3, generator=generator)


def train(engine, steps, first=0, factor=1.0):
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, first + steps):
        x, y = data(step, dtype)
        loss = factor * ((engine(x).float() - y) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.optimizer.synchronize()
    return losses


def weights(engine):
    engine.optimizer.synchronize()
    return [p.detach().clone() for p in engine.module.parameters()]


def plain(steps, accumulation=1, clip=0.0, optimizer_class=torch.optim.AdamW):
    model = Net()
    optimizer = optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        x, y = data(step)
        (((model(x) - y) ** 2).mean() / accumulation).backward()
        if (step + 1) % accumulation == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
