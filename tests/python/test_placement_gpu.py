"""States in host memory and on a CUDA device: the same bits. Run: pytest -m gpu tests/python/test_placement_gpu.py"""

from __future__ import annotations

import copy
import functools
import gc
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")

import test_placement  # noqa: E402
from test_placement import assert_equal, bits, on_device  # noqa: E402

import orlop  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
WIDTH, BLOCKS = 512, 6
STEPS = 20


Model = functools.partial(test_placement.Model, width=WIDTH, blocks=BLOCKS)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(model, optimizer, steps=STEPS, first=0, counts=(1,)):
    losses = []
    for step in range(first, first + steps):
        for part in range(counts[step % len(counts)]):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + part)).cuda()
            loss = model(x.to(model.inp.weight.dtype)).float().square().mean()
            loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def some_bytes(model):
    """Room for states of a part of the parameters, whatever their dtype."""
    return 6 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("counts", [(1,), (3, 3, 2, 5, 1)], ids=["single", "accumulated"])
@pytest.mark.parametrize("door", ["door1", "module", "door2"])
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")],
)
def test_same_bits_for_every_placement(dtype, moments, door, counts):
    """20 losses, weights, states and masters: all in host memory, some, and all on the device."""

    def run(states):
        model = Model(dtype)
        options = {"lr": 1e-2, "moments": moments, "states": states}
        if door == "door2":
            model, optimizer = orlop.wrap(model, options, device="cuda")
        else:
            model = model.cuda()
            optimizer = orlop.AdamW(model.parameters(), module=model if door == "module" else None, **options)
        losses = train(model, optimizer, counts=counts)
        placed = len(on_device(optimizer))
        result = copy.deepcopy(bits(optimizer))
        weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        result = ([{k: v.cpu() for k, v in state.items()} for state in result[0].values()], result[1])
        optimizer.close()
        return losses, result, weights, placed

    count = len(list(Model(dtype).parameters()))
    losses, (states, masters), weights, placed = run("host")
    assert placed == 0
    for limit in (some_bytes(Model(dtype)), "auto"):
        got, (got_states, got_masters), got_weights, placed = run(limit)
        assert placed == count if limit == "auto" else 0 < placed < count
        assert got == losses
        assert_equal((dict(enumerate(got_states)), got_masters), (dict(enumerate(states)), masters))
        assert all(torch.equal(got_weights[name], value) for name, value in weights.items())


@DTYPES
def test_resume_across_placements(dtype, tmp_path):
    """From a file that holds tensors of both tiers, into both."""
    model = Model(dtype).cuda()
    optimizer = orlop.AdamW(model.parameters(), lr=1e-3, states=some_bytes(model))
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    expected = train(model, optimizer, 5, first=5)
    for states in ("host", "auto"):
        for where in ("cpu", "cuda"):
            saved = torch.load(tmp_path / "state.pt", map_location=where, weights_only=True)
            fresh = Model(dtype).cuda()
            fresh.load_state_dict(saved["model"])
            resumed = orlop.AdamW(fresh.parameters(), lr=1e-3, states=states)
            resumed.load_state_dict(saved["optimizer"])
            assert train(fresh, resumed, 5, first=5) == expected
            assert bool(on_device(resumed)) == (states == "auto")


def test_a_limit_is_kept():
    """`device_limit` counts all of torch's tensors: states fill what is left of it, and no step exceeds it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = Model(
        torch.bfloat16, width=4096, blocks=8
    ).cuda()  # 134 M elements: 1.6 GB of states and gradients
    limit = torch.cuda.memory_allocated() + (2 << 30)
    optimizer = orlop.AdamW(model.parameters(), module=model, device_limit=limit)
    train(model, optimizer, 6)
    placed = on_device(optimizer)
    assert 0 < len(placed) < len(optimizer._slots)
    assert torch.cuda.max_memory_allocated() <= limit
    host = optimizer.memory_report()
    assert 0 < host["moments"] < 8 * sum(p.numel() for p in model.parameters())
    optimizer.close()


def test_states_leave_when_a_later_step_needs_their_memory():
    """Activations that grow after the move: the reserve is taken back within 16 steps, and the bits go on."""

    def run(states, limit=None):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = Model(torch.bfloat16, width=2048, blocks=8).cuda()
        if limit is not None:
            limit += torch.cuda.memory_allocated()
        optimizer = orlop.AdamW(model.parameters(), states=states, device_limit=limit)
        losses = train(model, optimizer, 3)
        seen = [len(on_device(optimizer))]
        keep = torch.empty(420 << 20, dtype=torch.uint8, device="cuda")
        losses += train(model, optimizer, 17, first=3)
        seen.append(len(on_device(optimizer)))
        del keep
        optimizer.close()
        return losses, seen

    expected, seen = run("host")
    assert seen == [0, 0]
    got, seen = run("auto", (1 << 30) + (700 << 20))
    assert got == expected
    assert seen[0] > seen[1] > 0


def test_memory_comes_back_with_the_optimizer():
    """Case R-10: twenty optimizers whose states live on the device."""
    model = Model(torch.bfloat16, width=1024).cuda()
    after = []
    for _ in range(20):
        optimizer = orlop.AdamW(model.parameters(), module=model)
        train(model, optimizer, 3)
        assert on_device(optimizer)
        del optimizer
        for p in model.parameters():
            p.grad = None
        gc.collect()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    assert after[-1] == after[2], after


def test_updates_hide_under_the_next_forward():
    """A forward does not wait for the blocks behind it: its first kernels are issued, and run, before the last
    update has."""
    model = Model(torch.bfloat16, width=4096, blocks=8).cuda()
    optimizer = orlop.AdamW(model.parameters(), module=model)
    train(model, optimizer, 3)
    x = torch.randn(16, 8, device="cuda").bfloat16()
    model(x).float().square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    last = optimizer._slots[model.blocks[7].weight].home.left_last
    first = optimizer._slots[model.blocks[0].weight].home.left_last
    assert first is not last
    states = optimizer._links[x.device].states
    waited = []
    wait = states.wait
    states.wait = lambda updated: (waited.append(updated), wait(updated))
    model.inp(x)
    assert last not in waited
    model(x)
    assert waited[-1] is last
    optimizer.close()
