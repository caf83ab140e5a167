"""Transformers models of random weights through door 1: 50 losses within 1 % of plain PyTorch."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import orlop  # noqa: E402

STEPS = 50


class MasterAdamW:
    """Plain PyTorch with fp32 masters of low-precision weights: the yardstick of bf16 training."""

    def __init__(self, model, **options):
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, **options)

    def step(self):
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


def train(folder, dtype, make, checkpointing=False):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make(model)
    ids = torch.randint(0, 64, (STEPS, 2, 24), generator=torch.Generator().manual_seed(11))
    losses = []
    for batch in ids:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def plain_losses(model_dir):
    """plain_losses(kind, dtype): those of PyTorch alone, each computed once."""

    @functools.cache
    def get(kind, dtype):
        def make(model):
            if dtype == torch.float32:
                return torch.optim.AdamW(model.parameters(), lr=1e-3)
            return MasterAdamW(model, lr=1e-3)

        return train(model_dir(kind, True), dtype, make)

    return get


@pytest.mark.parity
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_losses_within_one_percent(model_dir, plain_losses, kind, dtype, hidden):
    expected = plain_losses(kind, dtype)
    options = (lambda m: {"module": m}) if hidden else (lambda m: {})
    got = train(
        model_dir(kind, True),
        dtype,
        lambda m: orlop.AdamW(m.parameters(), lr=1e-3, **options(m)),
        checkpointing=hidden,
    )
    worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
    assert got[-1] < 0.8 * got[0]
    assert worst <= 0.01, worst
