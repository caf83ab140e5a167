"""Door 2 on a CUDA device. Run: pytest -m gpu tests/python/test_wrap_gpu.py"""

from __future__ import annotations

import functools
import gc
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")

import test_placement  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


Model = functools.partial(test_placement.Model, dtype=torch.bfloat16, width=1024, blocks=6)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(model, optimizer, steps=10, first=0):
    losses = []
    for step in range(first, first + steps):
        x = (
            torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            .cuda()
            .to(model.inp.weight.dtype)
        )
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resident(dtype=torch.bfloat16):
    model = Model(dtype=dtype).cuda()
    return model, orlop.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("start", ["cpu", "cuda"])
@pytest.mark.parametrize("blocks_on_device", [0, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_for_every_budget(dtype, blocks_on_device, start):
    """Case N-19: 0, some and all blocks stay; the model begins on either device."""
    expected = train(*resident(dtype))
    block = (1024 * 1024 + 1024) * torch.empty((), dtype=dtype).element_size()
    limit = block * (6 if blocks_on_device == 6 else blocks_on_device + 2)
    model, optimizer = orlop.wrap(
        Model(dtype=dtype).to(start), {"lr": 1e-3}, {"limits": {"gpu": limit}}, device="cuda"
    )
    assert train(model, optimizer) == expected
    assert len(stream_of(model).resident_blocks()) == blocks_on_device
    assert stream_of(model).peak_blocks * block <= limit


def test_device_memory_is_that_of_two_blocks():
    """Weights of the blocks at rest: none; in a pass: two."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, optimizer = orlop.wrap(Model(blocks=16, width=2048), {"lr": 1e-3}, {"limits":
                                  {"gpu": 2 * 2 * (2048 * 2048 + 2048)}}, device="cuda")  # fmt: skip
    train(model, optimizer, 2)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    block = 2 * (2048 * 2048 + 2048)
    assert torch.cuda.memory_allocated() - before <= block
    with torch.no_grad():
        model(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16))
    # Two blocks, activations and workspaces.
    assert torch.cuda.max_memory_allocated() - before <= 3 * block + (64 << 20)
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, 2, first=2)
    assert stream_of(model).peak_blocks <= 2
    # The gradients of all sixteen may be on their way as well; with the weights of all it would be twice that.
    assert torch.cuda.max_memory_allocated() - before <= (3 + 16) * block + (64 << 20)


def test_a_model_built_in_host_memory_never_is_on_the_device_as_a_whole():
    """orlop.init under a default device; the wrap takes what lies outside of blocks there, and one weight's room."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"), orlop.init(dtype=torch.bfloat16):
        model = Model(blocks=16, width=2048)
        reference = Model(blocks=16, width=2048)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    block = 2 * (2048 * 2048 + 2048)
    model, optimizer = orlop.wrap(model, {"lr": 1e-3}, {"limits": {"gpu": 2 * block}}, device="cuda")
    assert torch.cuda.max_memory_allocated() - before <= 2 * block
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    reference.cuda()
    expected = train(reference, orlop.AdamW(reference.parameters(), lr=1e-3), 3)
    assert train(model, optimizer, 3) == expected


def test_prefetch_hits():
    """From the second step on the next block is on its way before it is needed."""
    block = 2 * (1024 * 1024 + 1024)
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-3}, {"limits": {"gpu": 2 * block}}, device="cuda")
    train(model, optimizer, 2)
    stream = stream_of(model)
    stream.prefetch_hits = 0
    train(model, optimizer, 5, first=2)
    assert stream.prefetch_hits >= 0.75 * 5 * 2 * 6


def test_evaluation_generation_and_exceptions():
    """Cases M-03, M-04 on the device."""
    expected = train(*resident())
    block = 2 * (1024 * 1024 + 1024)
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-3}, {"limits": {"gpu": 2 * block}}, device="cuda")
    losses = []
    for step in range(10):
        losses += train(model, optimizer, 1, first=step)
        with torch.no_grad():
            model(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16))
        handle = model.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16))
        handle.remove()
        assert stream_of(model).resident_blocks() == []
    assert losses == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_with_checkpointing(reentrant):
    """A small Llama: 50 losses within 1 % of plain PyTorch with fp32 masters."""
    transformers = pytest.importorskip("transformers")
    from test_adamw_models import MasterAdamW

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.use_deterministic_algorithms(False)

    def run(make):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model, optimizer = make(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = torch.randint(0, 64, (50, 2, 64), generator=torch.Generator().manual_seed(1)).cuda()
        losses = []
        for tokens in ids:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(lambda m: (m.cuda(), MasterAdamW(m, lr=1e-3)))
    got = run(lambda m: orlop.wrap(m, {"lr": 1e-3}, {"limits": {"gpu": "2MiB"}}, device="cuda"))
    assert max(abs(a - b) / b for a, b in zip(got, expected, strict=True)) <= 0.01
