"""Gradients of orlop.AdamW that have left: what a user reads of them and does to them."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS, backward, pair  # noqa: E402

import orlop  # noqa: E402

# --- N-14, B-08, B-09, U-06: what a user reads and writes ----------------------------------------


@GRADIENTS
@pytest.mark.parametrize("clip", ["ours", "torch"])
def test_edited_gradients_count(clip, gradients):
    """Cases N-14, U-06: ten times the gradient, then clipping; the norm is that before clipping."""
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    for step in range(4):
        for p in (ours, theirs):
            backward(p, step)
            p.grad.mul_(10)
        expected = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        norm = (
            optimizer.clip_grad_norm_(1.0) if clip == "ours" else torch.nn.utils.clip_grad_norm_([ours], 1.0)
        )
        torch.testing.assert_close(norm, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(optimizer.gradient(ours), theirs.grad, atol=1e-6, rtol=1e-5)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.add_(1.0),
        lambda g: g.clamp_(-0.1, 0.1),
        lambda g: g.__setitem__(slice(0, 2), 0.0),
        lambda g: torch.add(g, 1.0, out=g),
        lambda g: g.copy_(g * 2 + 1),
        lambda g: g.div_(3.0),
        lambda g: g.mul_(torch.linspace(0, 1, 6)),
        lambda g: g.data.clamp_(-0.1, 0.1),
        lambda g: g.data.mul_(0.5),
        lambda g: g.detach().zero_(),
        lambda g: g[2:].zero_(),
        lambda g: g.view(2, 3).t()[0].fill_(1.0),
        lambda g: g.numpy().fill(0.25),
        lambda g: torch.nn.functional.relu(g, inplace=True),
        lambda g: setattr(g, "data", torch.ones(6)),
        lambda g: g.detach_(),
        lambda g: (g.add_(1.0), g.clamp_(-0.5, 0.5)),
        lambda g: (g.data.add_(1.0), g.mul_(0.5), g.div_(g.norm())),
        lambda g: (torch._foreach_add_([g], 1.0), torch._foreach_mul_([g], 0.5)),
        lambda g: (g.requires_grad_(False), g.zero_()),
        lambda g: torch.nn.functional.normalize(g, dim=0, out=g),
    ],
    ids=[
        "add", "clamp", "setitem", "out", "copy", "div", "mul_tensor", "data", "data_mul", "detach", "item", "view",
        "numpy", "inplace", "set_data", "detach_", "twice", "thrice", "foreach", "zero_grad", "normalize",
    ],
)  # fmt: skip
def test_any_edit_of_a_gradient_that_has_left(edit):
    """Case N-14: what stands in p.grad can be read and changed as a tensor."""
    (ours, optimizer), (theirs, reference) = pair(gradients="leave")
    for p, o in ((ours, optimizer), (theirs, reference)):
        backward(p, 1)
        backward(p, 2)
        edit(p.grad)
        o.step()
        o.zero_grad()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


ALIASES = {
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "view": lambda g: g.view(-1),
    "view_as": lambda g: g.view_as(torch.ones(6)),
    "reshape": lambda g: torch.reshape(g, (6,)),
    "flatten": lambda g: g.flatten(),
    "index": lambda g: g[0],
    "ellipsis": lambda g: g[..., None],
    "narrow": lambda g: torch.narrow(g, 0, 0, 1),
    "select": lambda g: g.select(0, 1),
    "squeeze": lambda g: g.squeeze(),
    "unsqueeze": lambda g: g.unsqueeze(0),
    "transpose": lambda g: g.transpose(0, 1),
    "permute": lambda g: g.permute(1, 0),
    "movedim": lambda g: g.movedim(0, 1),
    "t": lambda g: g.t(),
    "T": lambda g: g.T,
    "mT": lambda g: g.mT,
    "unbind": lambda g: g.unbind()[0],
    "iter": lambda g: list(g)[1],
    "split": lambda g: torch.split(g, 1)[0],
    "chunk": lambda g: g.chunk(2)[1],
    "as_strided": lambda g: g.as_strided((3,), (2,)),
    "expand": lambda g: g.expand(2, 2, 3)[0],
    "broadcast": lambda g: torch.broadcast_tensors(g, torch.ones(1))[0],
    "diagonal": lambda g: g.diagonal(),
    "unfold": lambda g: g.unfold(0, 1, 1),
    "contiguous": lambda g: g.contiguous(),
    "same_dtype": lambda g: g.to(torch.float32),
    "same_device": lambda g: g.cpu(),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "aten": lambda g: torch.ops.aten.view.default(g, [6]),
}
READS = {
    "norm": lambda g: g.norm(),
    "clone": lambda g: g.clone(),
    "sum": lambda g: g.sum().item(),
    "arithmetic": lambda g: (g + 0, g * g, -g),
    "comparison": lambda g: g > 0,
    "max": lambda g: g.max(0),
    "mask": lambda g: g[torch.tensor([True, False])],
    "other_dtype": lambda g: g.double(),
    "copy": lambda g: g.to(torch.float32, copy=True).numpy(),
    "deepcopy": copy.deepcopy,
    "tolist": lambda g: g.tolist(),
    "cat": lambda g: torch.cat([g, g]),
    "sparse": lambda g: g.to_sparse(),
    "str": str,
}


def gradient_that_has_left():
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = orlop.AdamW([p], gradients="leave")
    (p * torch.arange(6.0).view(2, 3)).sum().backward()
    assert type(p.grad).__name__ == "OffloadedGradient"
    return p, optimizer


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_of_the_gradient_itself(alias):
    """Case N-14: whoever may write it through one finds it in p.grad, and what was read is what is written."""
    p, optimizer = gradient_that_has_left()
    expected = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        for gradient in (p.grad, expected):
            view = ALIASES[alias](gradient)
            view.copy_(torch.full_like(view, 7.0))
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, expected)
    optimizer.close()


@pytest.mark.parametrize("read", READS)
def test_what_reads_leaves_the_gradient_where_it_is(read):
    p, optimizer = gradient_that_has_left()
    READS[read](p.grad)
    assert type(p.grad).__name__ == "OffloadedGradient"
    optimizer.close()


def test_a_kept_stand_in_means_the_gradient_as_long_as_that_is_there(away):
    """Also where norms and scaling would work elsewhere, beside others, and never that of another backward."""
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = orlop.AdamW([p, q])
    (p.sum() + 2 * q.sum()).backward()
    kept = [p.grad, q.grad]
    torch.nn.utils.clip_grad_value_([p, q], 1.5, foreach=True)
    kept[0].add_(1.0)
    torch._foreach_mul_(kept, 2.0)
    assert [x.tolist() for x in torch._foreach_norm(kept)] == pytest.approx([4 * 3**0.5, 3 * 3**0.5])
    assert (p.grad.tolist(), q.grad.tolist()) == ([4.0] * 3, [3.0] * 3)
    p.grad, before = None, p.grad
    assert kept[0].tolist() == [4.0] * 3
    p.grad = kept[0]  # accumulates, and is taken
    p.sum().backward()
    assert p.grad.tolist() == before.tolist() == [5.0] * 3
    assert before.tolist() == [5.0] * 3
    with pytest.raises(orlop.UsageError, match="earlier backward"):
        kept[0].zero_()
    p.grad, dropped = None, p.grad
    dropped.data.mul_(3.0)
    assert (dropped.tolist(), dropped[0].item()) == ([15.0] * 3, 15.0)
    p.grad = dropped
    assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx((3 * 15**2 + 3 * 3**2) ** 0.5)
    assert p.grad.tolist() == [15.0] * 3
    with pytest.raises(orlop.UsageError, match="earlier backward"):
        dropped.zero_()
    optimizer.close()


@GRADIENTS
@pytest.mark.parametrize("clip", ["ours", "torch"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clipping_applies_what_is_not_finite(bad, clip, gradients):
    """As torch does, in the mode that promises it."""
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients, nonfinite="apply")
    for p, o in ((ours, optimizer), (theirs, reference)):
        (p * torch.tensor([1.0, 2.0, bad, 0.0, 1.0, 1.0])).sum().backward()
        if clip == "ours" and o is optimizer:
            o.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_([p], 1.0)
        o.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_factors_that_overflow_are_applied(gradients):
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients, nonfinite="apply")
    for p, o in ((ours, optimizer), (theirs, reference)):
        (p * torch.tensor([1.0, 0.0, 1e-30, -1.0, 1.0, 1.0])).sum().backward()
        p.grad *= 1e30
        p.grad *= 1e30
        o.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
def test_a_gradient_that_is_part_of_a_graph_stays(away, hidden):
    """backward(create_graph=True), a penalty of its gradients, and what comes after it; beside one without a graph."""
    results = []
    for make in (torch.optim.AdamW, orlop.AdamW):
        torch.manual_seed(2)
        model = torch.nn.ParameterList([torch.randn(6), torch.randn(6)])
        p, q = model
        hides = {"module": model} if hidden and make is orlop.AdamW else {}
        optimizer = make(model.parameters(), lr=1e-2, **hides)
        for step in range(4):
            ((p - 1).square().sum() + q.sum()).backward()
            if step != 1:
                p.sin().sum().backward(create_graph=True)
                assert type(p.grad) is torch.Tensor and p.grad.requires_grad
                p.grad.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if make is orlop.AdamW:
                optimizer.synchronize()
        results.append([p.detach(), q.detach()])
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_what_torch_writes_from_below_is_refused_by_name():
    """As DistributedDataParallel does while backward runs."""
    p, optimizer = gradient_that_has_left()
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(orlop.UsageError, match=r'parameter 0 of group 0.*gradients="stay".*DistributedData'),
    ):
        p.grad.copy_(torch.ones(2, 3))
    optimizer.close()


def test_gradient_that_has_left_reads_as_a_tensor():
    """Case B-08: shape, dtype, device, values, norm."""
    p = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = orlop.AdamW([p], gradients="leave")
    (p**2).sum().backward()
    expected = 2 * p.detach()
    assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device)
    assert type(p.grad).__name__ == "OffloadedGradient"
    assert torch.equal(p.grad + 0, expected)
    assert torch.equal(p.grad.clone()[1], expected[1])
    assert float(p.grad.norm()) == pytest.approx(float(expected.norm()))
    assert p.grad.abs().max() == expected.max()
    assert torch.isfinite(p.grad).all()
    assert "OffloadedGradient" in repr(p.grad)
    stale = p.grad
    optimizer.zero_grad()
    with pytest.raises(orlop.UsageError, match="dropped"):
        stale.norm()


def test_a_module_that_converts_to_what_cannot_be_trained():
    p, optimizer = gradient_that_has_left()
    with pytest.raises(RuntimeError, match="assign"):
        p.grad.data = torch.ones(2, 3, dtype=torch.float64)
    assert type(p.grad).__name__ == "OffloadedGradient"
    module = torch.nn.Module()
    module.p = p
    module.double()
    assert p.grad.dtype == torch.float64
    with pytest.raises(TypeError, match="float64"):
        optimizer.step()
