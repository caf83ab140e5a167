"""Every operation beside PyTorch's own on the same input, both against fp64: in 16 bits the relative error
(Frobenius norm) is below 1e-2 and at most 1.5 times that of PyTorch.

On a GPU with ORLOP_TEST_DEVICE=cuda; PyTorch then runs there too.
"""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import orlop

torch = pytest.importorskip("torch")

DEVICE = os.environ.get("ORLOP_TEST_DEVICE", "cpu")
WORKER = Path(orlop.__file__).parents[2] / "tests/ops/ops_worker"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGE = DEVICE != "cpu"  # sums as long as those of a real model, where that takes no time

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(not WORKER.exists(), reason="an installed package comes without the tests' programs"),
]


class Case:
    """Inputs by name, what computes the results by name from them, and the dimensions for our side."""

    def __init__(self, operation, compute, inputs, indices=None, **dimensions):
        self.operation, self.compute, self.dimensions = operation, compute, dimensions
        self.inputs, self.indices = inputs, indices or {}


def normal(*shape, deviation=1.0):
    return deviation * torch.randn(*shape, dtype=torch.float64)


def gradients(result, wanted: dict, upstream):
    return dict(zip(wanted, torch.autograd.grad(result, list(wanted.values()), upstream), strict=True))


def linear():
    m, n, k = (2048, 3072, 8192) if LARGE else (192, 160, 320)

    def compute(x, weight, dy):
        y = torch.nn.functional.linear(x, weight)
        return {"y": y} | gradients(y, {"dx": x, "dweight": weight}, dy)

    inputs = {"x": normal(m, k), "weight": normal(n, k, deviation=k**-0.5), "dy": normal(m, n)}
    return Case("linear", compute, inputs, m=m, n=n, k=k)


def norm(center):
    rows, cols = (4096, 3072) if LARGE else (96, 576)
    functional = torch.nn.functional

    def compute(x, weight, dy, bias=None):
        wanted = {"dx": x, "dweight": weight}
        if center:
            y = functional.layer_norm(x, (cols,), weight, bias, eps=1e-5)
            wanted["dbias"] = bias
        else:
            y = functional.rms_norm(x, (cols,), weight, eps=1e-5)
        return {"y": y} | gradients(y, wanted, dy)

    inputs = {"x": normal(rows, cols), "weight": 1 + 0.1 * normal(cols), "dy": normal(rows, cols)}
    if center:
        inputs["bias"] = 0.1 * normal(cols)
    return Case("norm", compute, inputs, rows=rows, cols=cols, center=int(center))


def rope():
    """As transformers computes it, with cosines and sines of the activations' dtype."""
    rows, heads, head_dim = (2048, 24, 128) if LARGE else (160, 3, 64)
    half = head_dim // 2
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(rows, dtype=torch.float64), frequencies)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)

    def compute(x, cos_sin):
        cos, sin = (cos_sin[:, None, :, i].repeat(1, 1, 2) for i in (0, 1))
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return {"y": x * cos.to(x.dtype) + turned * sin.to(x.dtype)}

    inputs = {"x": normal(rows, heads, head_dim), "cos_sin": table}
    return Case("rope", compute, inputs, rows=rows, heads=heads, head_dim=head_dim)


def attention():
    sequences, length, heads, kv_heads, head_dim = (2, 2048, 24, 8, 128) if LARGE else (2, 96, 6, 2, 64)
    rows = sequences * length

    def compute(q, k, v, dout):
        def split(tensor, count):
            return tensor.view(sequences, length, count, head_dim).transpose(1, 2)

        out = torch.nn.functional.scaled_dot_product_attention(
            split(q, heads), split(k, kv_heads), split(v, kv_heads), is_causal=True, enable_gqa=True
        )
        out = out.transpose(1, 2).reshape(rows, heads, head_dim)
        return {"out": out} | gradients(out, {"dq": q, "dk": k, "dv": v}, dout)

    of = {"q": heads, "k": kv_heads, "v": kv_heads, "dout": heads}
    inputs = {name: normal(rows, count, head_dim) for name, count in of.items()}
    return Case(
        "attention", compute, inputs,
        sequences=sequences, length=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip


def activation(kind):
    rows, width = (2048, 8192) if LARGE else (128, 320)
    functional = torch.nn.functional

    def compute(dout, **inputs):
        values = inputs["in"]
        if kind == 0:
            out = functional.silu(values[:, :width]) * values[:, width:]
        else:
            out = functional.gelu(values, approximate="tanh" if kind == 1 else "none")
        return {"out": out} | gradients(out, {"din": values}, dout)

    inputs = {"in": 2 * normal(rows, width * (2 if kind == 0 else 1)), "dout": normal(rows, width)}
    return Case("activation", compute, inputs, kind=kind, rows=rows, width=width)


def embedding():
    rows, cols, vocab = (8192, 3072, 2000) if LARGE else (400, 96, 50)
    tokens = torch.randint(0, vocab, (rows,))

    def compute(dy):
        table = torch.zeros(vocab, cols, dtype=dy.dtype, device=dy.device, requires_grad=True)
        out = torch.nn.functional.embedding(tokens.to(dy.device), table)
        return gradients(out, {"dtable": table}, dy)

    inputs = {"dy": normal(rows, cols)}
    return Case("embedding", compute, inputs, {"tokens": tokens}, rows=rows, cols=cols, vocab=vocab)


def cross_entropy():
    rows, vocab = (2048, 32000) if LARGE else (64, 3000)
    labels = torch.randint(0, vocab, (rows,))

    def compute(logits):
        loss = torch.nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="none")
        return {"loss": loss} | gradients(loss.mean(), {"dlogits": logits}, None)

    inputs = {"logits": 3 * normal(rows, vocab)}
    return Case("cross_entropy", compute, inputs, {"labels": labels}, rows=rows, vocab=vocab)


CASES = {
    "linear": linear,
    "rms_norm": lambda: norm(center=False),
    "layer_norm": lambda: norm(center=True),
    "rope": rope,
    "attention": attention,
    "swiglu": lambda: activation(0),
    "gelu_tanh": lambda: activation(1),
    "gelu": lambda: activation(2),
    "embedding": embedding,
    "cross_entropy": cross_entropy,
}


def in_dtype(case: Case, dtype):
    """The inputs as both sides get them; tables of angles stay in fp32."""
    return {name: values.to(kept_dtype(name, dtype)) for name, values in case.inputs.items()}


def kept_dtype(name: str, dtype):
    return torch.float32 if name == "cos_sin" and dtype != torch.float64 else dtype


def torch_results(case: Case, inputs, dtype):
    placed = {
        name: values.detach().clone().to(DEVICE, kept_dtype(name, dtype)) for name, values in inputs.items()
    }
    for name, values in placed.items():
        values.requires_grad_(name not in ("dy", "dout", "cos_sin"))
    return {name: result.detach().double().cpu() for name, result in case.compute(**placed).items()}


def our_results(case: Case, inputs, precision: str, shapes, folder: Path):
    for name, values in inputs.items():
        values.float().numpy().tofile(folder / f"{name}.f32")
    for name, values in case.indices.items():
        values.to(torch.int32).numpy().tofile(folder / f"{name}.i32")
    dimensions = [f"{name}={value}" for name, value in case.dimensions.items()]
    device = "host" if DEVICE == "cpu" else DEVICE
    command = [WORKER, device, precision, case.operation, folder, *dimensions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {
        name: torch.from_numpy(np.fromfile(folder / f"{name}.f32", dtype=np.float32)).double().view(shape)
        for name, shape in shapes.items()
    }


def relative_error(actual, expected) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_is_no_larger_than_that_of_torch(name, precision, tmp_path):
    torch.manual_seed(1)
    case, dtype = CASES[name](), DTYPES[precision]
    inputs = in_dtype(case, dtype)
    expected = torch_results(case, inputs, torch.float64)
    peers = torch_results(case, inputs, dtype)
    shapes = {key: value.shape for key, value in expected.items()}
    ours = our_results(case, inputs, precision, shapes, tmp_path)
    for key, truth in expected.items():
        error, peer = relative_error(ours[key], truth), relative_error(peers[key], truth)
        print(f"{name} {precision} {key}: {error:.2e}, torch {peer:.2e}, ratio {error / peer:.2f}")
        assert math.isfinite(error) and error < 1e-2, key
        assert error <= 1.5 * peer, key
