"""Mixture-of-experts models through the PyTorch doors (case M-08): routed blocks in any order, experts without a
token left as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from host_link import HostLink, all_away  # noqa: E402
from orlop import wrapping  # noqa: E402

STEPS = 50
EXPERTS = 8


class Expert(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class Layer(torch.nn.Module):
    """Top 2 of `EXPERTS`, called in the order of the tokens that they got: another one with every batch."""

    def __init__(self, width):
        super().__init__()
        self.router = torch.nn.Linear(width, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert(width) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = x
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        for index in counts.argsort(descending=True).tolist():
            tokens, place = (chosen == index).nonzero(as_tuple=True)
            if len(tokens):
                update = self.experts[index](x[tokens]) * weights[tokens, place, None]
                out = out.index_add(0, tokens, update)
        return out


class Model(torch.nn.Module):
    def __init__(self, width=24, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(40, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 40, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x[:-1]), ids[1:])

    def experts(self):
        return [expert for layer in self.layers for expert in layer.experts]


def train(model, optimizer, watch=None, steps=STEPS):
    """Few tokens a step, so that many experts get none."""
    losses = []
    for step in range(steps):
        start = torch.randint(0, 40, (1,), generator=torch.Generator().manual_seed(step))
        loss = model((start + torch.arange(5)) % 40)
        loss.backward()
        before = watch(optimizer) if watch else None
        optimizer.clip_grad_norm_(1.0) if hasattr(optimizer, "clip_grad_norm_") else (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        )
        optimizer.step()
        if watch:
            check_idle(model, optimizer, before)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def watch_states(optimizer):
    optimizer.synchronize()
    return {
        p: [optimizer.master(p), *(plane.clone() for plane in slot.planes.values())]
        for p, slot in optimizer._slots.items()
        if p.grad is None
    }


def check_idle(model, optimizer, before):
    """What had no gradient has the states that it had."""
    watched.append(len(before))
    optimizer.synchronize()
    for p, states in before.items():
        after = [optimizer.master(p), *optimizer._slots[p].planes.values()]
        assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


watched: list[int] = []


@pytest.mark.parametrize(
    ("blocks", "room"),
    [("layers", None), ("layers", 40_000), ("experts", None), ("experts", 1 << 20)],
    ids=["layers-cpu", "layers-mixed", "experts-cpu", "experts-device"],
)
def test_experts_are_reached_in_any_order(monkeypatch, blocks, room):
    """Blocks are layers, or single experts that come and go; experts without a token do not change."""
    reference = Model()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=3e-3))
    if room is not None:
        link = HostLink(torch.device("cpu"), room)
        monkeypatch.setattr(wrapping, "_device_link", lambda device, limit: link)
    model = Model()
    limit = 2 * sum(p.nbytes for p in model.layers[0].parameters())
    parts = model.experts() if blocks == "experts" else None
    model, optimizer = orlop.wrap(model, {"lr": 3e-3}, {"limits": {"gpu": limit}}, blocks=parts)
    watched.clear()
    losses = train(model, optimizer, watch_states)
    assert max(watched) > 2 * EXPERTS  # parameters of many experts had no token at once
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) <= 0.01
    assert losses[-1] < 0.8 * losses[0]
    for name, value in model.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], atol=1e-3, rtol=1e-2), name
    steps = [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in optimizer._slots]
    assert min(steps) < STEPS == max(steps)
    optimizer.close()
    orlop.unwrap(model)


@pytest.mark.parametrize("door", ["door1", "door2"])
def test_mixtral(monkeypatch, door):
    """A small one of transformers, whose experts are one tensor: 50 losses within 1 % of plain PyTorch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip

    def run(make):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        model, optimizer = make(model)
        ids = torch.randint(0, 32, (STEPS, 2, 12), generator=torch.Generator().manual_seed(5))
        losses = []
        for tokens in ids:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(lambda m: (m, torch.optim.AdamW(m.parameters(), lr=2e-3)))
    if door == "door2":
        got = run(lambda m: orlop.wrap(m, {"lr": 2e-3}, {"limits": {"gpu": "320KiB"}}))
    else:
        with all_away(monkeypatch, 1 << 30):
            got = run(lambda m: (m, orlop.AdamW(m.parameters(), lr=2e-3, module=m)))
    assert max(abs(a - b) / b for a, b in zip(got, expected, strict=True)) <= 0.01
    assert got[-1] < 0.9 * got[0]
