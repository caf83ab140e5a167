"""Parameters that change their device, dtype, shape or memory after orlop.AdamW has made room for their states."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS  # noqa: E402

import orlop  # noqa: E402

WAYS = pytest.mark.parametrize("way", ["stay", "leave", "link", "module"])


def open_by(way, params, **options):
    if way == "module":
        return orlop.AdamW(params, module=torch.nn.ParameterList(params), **options)
    return orlop.AdamW(params, gradients="auto" if way == "link" else way, **options)


def step(optimizer):
    optimizer.step()
    if isinstance(optimizer, orlop.AdamW):
        optimizer.synchronize()  # no forward of a module waits for the weights
    optimizer.zero_grad()


@pytest.fixture
def by_link(way, request):
    if way == "link":
        request.getfixturevalue("away")


@WAYS
@pytest.mark.parametrize("size", [3, 70])
def test_another_shape_before_the_first_step(way, by_link, size):
    """Case M-07: as resize_token_embeddings() of transformers does, which gives the parameter other `data`."""
    results = []
    for make in (
        lambda params: open_by(way, params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1),
    ):
        params = [torch.nn.Parameter(torch.ones(16, 4)), torch.nn.Parameter(torch.linspace(-1, 1, 9))]
        optimizer = make(params)
        params[0].data = torch.linspace(1, 2, size * 4).view(size, 4)
        for _ in range(3):
            sum((p * p).sum() for p in params).backward()
            step(optimizer)
        results.append([p.detach().clone() for p in params])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@WAYS
@pytest.mark.parametrize("shape", [(3, 4), (70, 4), (4, 16)])
def test_another_shape_after_a_step_is_refused(way, by_link, shape):
    """Case M-07: by name, with the way out; nothing is written."""
    params = [torch.nn.Parameter(torch.ones(16, 4)), torch.nn.Parameter(torch.ones(9))]
    optimizer = open_by(way, params, lr=0.1)
    sum(p.sum() for p in params).backward()
    step(optimizer)
    params[0].data = torch.ones(shape)
    before = [p.detach().clone() for p in params]
    sum(p.sum() for p in params).backward()
    with pytest.raises(
        orlop.UsageError, match=rf"has shape \[{shape[0]}, {shape[1]}\].*\[16, 4\].*new optimizer"
    ):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@WAYS
@pytest.mark.parametrize("when", ["before backward", "before step"])
@pytest.mark.parametrize("first", [0, 3])
def test_another_order_of_elements(way, by_link, when, first):
    """model.to(memory_format=...) after the optimizer was made: states follow their elements."""
    results = []
    for make in (
        lambda params: open_by(way, params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1),
    ):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(2, 3, 4, 5)), torch.nn.Parameter(torch.randn(7))]
        optimizer = make(params)
        for turn in range(5):
            if turn == first and when == "before backward":
                params[0].data = params[0].data.to(memory_format=torch.channels_last)
            sum((p * torch.randn(p.shape)).sum() for p in params).backward()
            if turn == first and when == "before step":
                params[0].data = params[0].data.to(memory_format=torch.channels_last)
            step(optimizer)
        moments = [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]
        results.append([p.detach().clone() for p in params] + moments)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@WAYS
def test_what_has_not_moved_keeps_its_master_and_gradient(way, by_link):
    """While another parameter is converted."""
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(1000).bfloat16()) for _ in range(2))
    optimizer = open_by(way, [a, b], lr=1e-3)
    for _ in range(3):
        ((a + b) * torch.randn(1000)).sum().backward()
        step(optimizer)
    before = optimizer.master(a)
    assert not torch.equal(before, a.float())
    b.data = b.data.float()
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    a.sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.master(a), before)
    assert int(optimizer.state[a]["step"]) == 4 and int(optimizer.state[b]["step"]) == 3


def test_masters_after_a_conversion():
    """Asked for, written and loaded before the next step: of the weights as they are now."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = orlop.AdamW(model.parameters())
    model.bfloat16()
    assert torch.equal(optimizer.master(model.weight), model.weight.float())
    wanted = torch.randn(64, 64)
    optimizer.set_master(model.weight, wanted)
    assert torch.equal(optimizer.master(model.weight), wanted)
    model(torch.ones(2, 64).bfloat16()).sum().backward()
    optimizer.step()
    saved = {key: value for key, value in optimizer.state_dict().items()}
    again = copy.deepcopy(model).float()
    other = orlop.AdamW(again.parameters())
    again.bfloat16()
    other.load_state_dict(saved)
    assert torch.equal(other.master(again.weight), optimizer.master(model.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loaded_master_survives_a_move(tmp_path, away, dtype):
    """It waits for the weights that belong to it; a move before these have come makes new room, on new drives."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 35).view(7, 5).to(dtype))
    before = orlop.AdamW([p], lr=1e-2, states="host", nvme=[str(tmp_path / "a")])
    for _ in range(2):
        p.sum().backward()
        step(before)
    expected, saved = before.master(p), copy.deepcopy(before.state_dict())
    before.close()
    optimizer = orlop.AdamW([p], lr=1e-2, states="host", nvme=[str(tmp_path / "b")])
    optimizer.load_state_dict(saved)
    p.data = p.data.t().contiguous().t()
    assert torch.equal(optimizer.master(p), expected)
    assert not torch.equal(expected, p.float())
    optimizer.close()


def test_weights_that_lie_elsewhere_are_followed(away):
    """Case B-09: other `data` of the same kind, which no version counter tells of."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 50))
    optimizer = orlop.AdamW([p], lr=1e-2)
    p.sum().backward()
    step(optimizer)
    p.data = wanted = torch.linspace(-1, 1, 50)
    wanted = wanted.clone()
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    p.sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(p, wanted)
    optimizer.close()


@GRADIENTS
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.share_memory(),
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16).float(),
    ],
    ids=["half", "bfloat16", "share", "to", "twice"],
)
def test_a_module_converts_the_gradients_that_it_has(convert, gradients):
    """Between backward and step."""
    results = []
    for make in (orlop.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        options = {"gradients": gradients} if make is orlop.AdamW else {}
        optimizer = make(model.parameters(), lr=0.1, **options)
        model(torch.ones(2, 4)).sum().backward()
        convert(model)
        assert all(type(p.grad) is torch.Tensor and p.grad.dtype == p.dtype for p in model.parameters())
        optimizer.step()
        results.append([p.detach().float() for p in model.parameters()])
    # A step is 0.1; torch's own rounds each of its operations on 16-bit weights below 1 to 2^-9 of them.
    torch.testing.assert_close(*results, atol=4e-3, rtol=0)


def test_moved_and_converted_parameters():
    """module.to() after the optimizer was made: states follow, masters come from the new weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = optimizer.state[model.weight]["exp_avg"].clone()
    model.to(torch.bfloat16)
    optimizer.param_groups[0]["lr"] = 0.0
    expected = model.weight.detach().clone()
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, expected)
    assert int(optimizer.state[model.weight]["step"]) == 2
    torch.testing.assert_close(optimizer.state[model.weight]["exp_avg"], 0.9 * moments + 0.1 * 2.0)
