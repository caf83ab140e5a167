"""Host time of door 1 with weights on a CUDA device. Run: pytest -m gpu tests/python/test_adamw_time_gpu.py"""

from __future__ import annotations

import copy
import os
import time

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")

from hook_clock import HookClock  # noqa: E402

import orlop  # noqa: E402
from orlop import device_link, gradient_batch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_backward_does_not_wait_for_gradients_on_their_way(monkeypatch):
    """The host issues all of it while the device is at its first blocks, and yet the gradients of few are in memory at a
    time: what the device does next waits for those before, and their memory is used again."""
    blocks, width, block_bytes = 12, 1024, 4 << 20
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", 1)
    monkeypatch.setattr(device_link, "_MOST_LEAVING", 2 * block_bytes)
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(blocks))
    model.cuda()
    plain = copy.deepcopy(model)
    optimizer = orlop.AdamW(model.parameters(), lr=0.0, module=model, states="host")

    def backward(m, x, cycles):
        for layer in m.layers:
            x = torch.tanh(layer(x))
            x.register_hook(lambda _: torch.cuda._sleep(cycles))
        loss = x.square().sum()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        loss.backward()
        issued = time.perf_counter() - begin
        torch.cuda.synchronize()
        return issued, time.perf_counter() - begin, torch.cuda.max_memory_allocated() - before

    for step in range(3):
        x = torch.full((4, width), 0.1 * (step + 1), device="cuda")
        backward(plain, x, 0)
        issued, whole, grown = backward(model, x, 20_000_000)
        for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad.clone(), expected.grad)
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert issued < 0.3 * whole, (issued, whole)
    assert grown < 6 * block_bytes, grown
    optimizer.close()


class Layer(torch.nn.Module):
    """The parameters of a Llama layer: seven matrices and two norms."""

    def __init__(self, width):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(7))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, bias=False) for _ in range(2))

    def forward(self, x):
        x = self.norms[0](x)
        for part in self.parts:
            x = part(x)
        return self.norms[1](x)


@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("states", ["host", "auto"])
def test_python_time_per_block(states, width, monkeypatch):
    """Python adds at most 100 us per block and pass, of which each begins with the device idle: what the hooks take, calls
    of the driver and waits included, and what torch takes to call as many that do nothing. Of the first the lowest of many
    rounds, since what else runs on the machine only adds; of the second the median over rounds in which two models take
    turns. The gradients of small blocks leave together, those of large ones (28 MiB) by threes."""
    blocks, rounds = 28, 60
    model = torch.nn.Sequential()
    model.layers = torch.nn.ModuleList(Layer(width) for _ in range(blocks))
    model.cuda()
    plain, hooked = copy.deepcopy(model), copy.deepcopy(model)
    for layer in hooked.layers:
        layer.register_forward_pre_hook(lambda *_: None)
    for p in hooked.parameters():
        p.register_post_accumulate_grad_hook(lambda _: None)
    clock = HookClock(monkeypatch.setattr)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-5, module=model, states=states)

    def in_hooks():
        """What is called inside of others counts with them."""
        return sum(s for (_, name), s in clock.take().items() if name != "synchronize")

    def seconds(m):
        """Wall and hooks of forward, wall and hooks of backward."""
        torch.cuda.synchronize()
        clock.take()
        begin = time.perf_counter()
        x = torch.linspace(-1, 1, width, device="cuda").unsqueeze(0)
        for layer in m.layers:
            x = layer(x)
        loss = x.square().sum()
        times = [time.perf_counter() - begin, in_hooks()]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss.backward()
        times += [time.perf_counter() - begin, in_hooks()]
        if m is model:
            optimizer.step()
        m.zero_grad()
        return times

    times = [[seconds(m) for m in (model, plain, hooked)] for _ in range(rounds)]
    # (rounds, models, times) in us per block
    times = torch.tensor(times, dtype=torch.float64)[5:] * 1e6 / blocks
    lowest, median = times.amin(0), times.median(0).values
    assert (optimizer.steps, optimizer.skipped_steps) == (rounds, 0)
    optimizer.close()
    added = []
    for name, wall in (("forward", 0), ("backward", 2)):
        calls = max(0.0, float((times[:, 2, wall] - times[:, 1, wall]).median()))
        added.append(float(lowest[0, wall + 1]) + calls)
        print(f"{states}, {width}, {name}: {added[-1]:.1f} us per block, of which calls of hooks {calls:.1f}; hooks at the "
              f"median {median[0, wall + 1]:.1f}; {lowest[0, wall]:.0f} in all beside {lowest[1, wall]:.0f}")  # fmt: skip
    assert min(added) > 0
    assert max(added) <= 100
