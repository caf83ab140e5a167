"""Writes to weights of a wrapped model that torch's version counters do not see: by way of `data`, by assigning.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model, batch, train, weights  # noqa: E402

import orlop  # noqa: E402
from adam_reference import rounded  # noqa: E402

pytestmark = pytest.mark.any_device


def scale_in_place(p):
    p.data.mul_(0.5)


def scale_a_row(p):
    assert p.data.device == p.device
    p.data[1].mul_(0.5)


def add_in_place(p):
    p.data += torch.full(p.shape, 0.125, dtype=p.dtype, device=DEVICE)


def copy_in_place(p):
    p.data.copy_(torch.full_like(p.data, 0.125))


def assign(p):
    p.data = torch.full(p.shape, 0.25, dtype=p.dtype, device=DEVICE)


def assign_from_the_host(p):
    p.data = torch.full(p.shape, 0.25, dtype=p.dtype)


WRITES = pytest.mark.parametrize(
    "write", [scale_in_place, scale_a_row, add_in_place, copy_in_place, assign, assign_from_the_host]
)
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
        assert torch.equal(rounded(master, dtype), after)
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
    assert losses == wanted_losses
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


# --- memory of their own, and sums that have a gradient -----------------------------------------


class Symmetric(torch.nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T

    def right_inverse(self, weight):
        return weight.triu()


def made_orthogonal(block):
    torch.manual_seed(1)
    torch.nn.utils.parametrizations.orthogonal(block)


def made_symmetric(block):
    torch.nn.utils.parametrize.register_parametrization(block, "weight", Symmetric())


def made_symmetric_for_good(block):
    made_symmetric(block)
    torch.nn.utils.parametrize.remove_parametrizations(block, "weight")


def set_to_others(block):
    with torch.no_grad():
        block.weight.set_(torch.eye(24, device=DEVICE))


@pytest.mark.parametrize("limit", [4800, 1 << 30], ids=["streamed", "resident"])
@pytest.mark.parametrize("change", [made_orthogonal, made_symmetric, made_symmetric_for_good, set_to_others])
def test_weights_that_were_pointed_elsewhere_train_on(change, limit):
    """Case M-14: what torch's parametrizations do with set_() is a write as any other."""

    def run(model, optimizer):
        train(model, optimizer, 2)
        optimizer.synchronize()
        with orlop.gathered(model.blocks[2], write=True):
            change(model.blocks[2])
        return train(model, optimizer, 3, first=2), weights(model)

    model = Model()
    expected = run(model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave"))
    losses, got = run(*orlop.wrap(Model(), {"lr": 1e-2}, {"limits": {"gpu": limit}}))
    assert losses == expected[0]
    assert all(torch.equal(got[name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("limit", [4800, 1 << 30], ids=["streamed", "resident"])
def test_weights_of_another_shape_are_refused_by_name(limit):
    model, _ = orlop.wrap(Model(), {"lr": 1e-2}, {"limits": {"gpu": limit}})
    refused = pytest.raises(orlop.UsageError, match=r"blocks\.2\.weight: .*\(12, 24\).*\(24, 24\).*unwrap")
    with refused, orlop.gathered(model.blocks[2], write=True), torch.no_grad():
        model.blocks[2].weight.set_(torch.ones(12, 24, device=DEVICE))


@pytest.mark.parametrize("where", ["away", "drives", "gathered"])
def test_data_plus_what_has_a_gradient(where, tmp_path):
    """What adapters do to be merged: the sum is written once, and no graph knows of it."""
    config = {"limits": {"gpu": 4800}}
    if where == "drives":
        config["nvme"] = {"paths": [str(tmp_path)], "param_share": 1}
    model, _ = orlop.wrap(Model(), None, config)
    weight, before = model.blocks[2].weight, weights(model)["blocks.2.weight"]
    change = torch.ones(24, 24, device=DEVICE, requires_grad=True)
    for times in (1, 2):
        with orlop.gathered([weight] if where == "gathered" else [], write=True):
            weight.data += change * 1
        after = weight.detach().cpu()
        assert torch.equal(after, before + 1 if times == 1 else before + 1 + 1) and not after.requires_grad
    weight.data = change.cpu() * 2
    assert torch.equal(weight.detach(), torch.full((24, 24), 2.0))
    model(batch(0)).sum().backward()
    assert change.grad is None
