"""Writes to weights of a wrapped model that torch's version counters do not see: by way of `data`, by assigning.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model, batch, train, weights  # noqa: E402

import orlop  # noqa: E402

pytestmark = pytest.mark.any_device


def scale_in_place(p):
    p.data.mul_(0.5)


def copy_in_place(p):
    p.data.copy_(torch.full_like(p.data, 0.125))


def assign(p):
    p.data = torch.full(p.shape, 0.25, dtype=p.dtype, device=DEVICE)


def assign_from_the_host(p):
    p.data = torch.full(p.shape, 0.25, dtype=p.dtype)


WRITES = pytest.mark.parametrize("write", [scale_in_place, copy_in_place, assign, assign_from_the_host])
WHERE = pytest.mark.parametrize("where", ["away", "gathered", "forward", "resident"])


@WRITES
@WHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_to_data_count(write, where, dtype):
    """Case B-09: wherever the weights are, what is written there is where the next step starts."""

    def run(make, write=write):
        model, optimizer = make(Model(dtype=dtype))
        p = model.blocks[2].weight
        train(model, optimizer, 3)
        optimizer.synchronize()
        if where == "forward":
            handle = model.blocks[2].register_forward_pre_hook(lambda *_: write(p))
            with torch.no_grad():
                model(batch(3, dtype))
            handle.remove()
        elif where == "gathered" and make is not plainly:
            with orlop.gathered([p]):
                write(p)
        else:
            write(p)
        after = weights(model)["blocks.2.weight"]
        master = optimizer.master(p).cpu()
        assert torch.equal(master.to(dtype), after)
        return after, train(model, optimizer, 3, first=3), weights(model)

    def plainly(model):
        return model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave")

    def wrapped(model):
        limit = 1 << 30 if where == "resident" else 2 * 600 * dtype.itemsize
        return orlop.wrap(model, {"lr": 1e-2, "states": "host"}, {"limits": {"gpu": limit}})

    after, losses, end = run(wrapped)
    # A plain parameter on a device would leave it.
    expected, wanted_losses, wanted_end = run(plainly, assign if write is assign_from_the_host else write)
    assert torch.equal(after, expected)
    # The rest of a bf16 master stays below weights that were written in place in host memory.
    tolerance = {"atol": 0, "rtol": 0 if dtype == torch.float32 else 0.02}
    torch.testing.assert_close(losses, wanted_losses, **tolerance)
    if dtype == torch.float32:
        assert all(torch.equal(end[name], value) for name, value in wanted_end.items())


@pytest.mark.parametrize("where", ["away", "resident"])
@pytest.mark.parametrize(
    "value", [torch.ones(24, 12), torch.ones(24, 24, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_other_data_is_refused(where, value):
    limit = {"limits": {"gpu": 1 << 30 if where == "resident" else 4800}}
    model, _ = orlop.wrap(Model(), {"lr": 1e-2}, limit)
    model(batch(0))
    before = weights(model)
    with pytest.raises(orlop.UsageError, match=r"blocks\.2\.weight: `data`.*unwrap"):
        model.blocks[2].weight.data = value
    assert all(torch.equal(v, before[name]) for name, v in weights(model).items())


def test_moves_of_a_resident_block_change_nothing():
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2}, {"limits": {"gpu": 1 << 30}})
    train(model, optimizer, 2)
    before = weights(model)
    model.blocks.half()
    model.blocks.cpu()
    assert all(torch.equal(v, before[name]) for name, v in weights(model).items())
    assert {type(p) for p in copy.deepcopy(model.blocks).parameters()} == {torch.nn.Parameter}
    train(model, optimizer, 2, first=2)


def test_assigned_state_dicts_are_refused_where_weights_are_managed():
    """Case M-15: the rest of the model, and what is not wrapped, may be assigned."""
    model, _ = orlop.wrap(Model(), {"lr": 1e-2}, {"limits": {"gpu": 4800}})
    before, state = weights(model), {name: torch.ones_like(value) for name, value in weights(model).items()}
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\.weight: load_state_dict\(assign=True\)"):
        model.load_state_dict({n: v for n, v in state.items() if "blocks" in n}, strict=False, assign=True)
    assert all(torch.equal(v, before[name]) for name, v in weights(model).items())
    model.load_state_dict({"out.bias": torch.ones(4, device=DEVICE)}, strict=False, assign=True)
    model.load_state_dict(state)
    assert all((value == 1).all() for value in weights(model).values())
    Model().load_state_dict(state, assign=True)
