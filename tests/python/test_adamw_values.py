"""What is not finite, and what users read and write of an orlop.AdamW."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS, backward, pair  # noqa: E402

import orlop  # noqa: E402

# --- N-06, N-07, U-05: NaN and Inf ----------------------------------------------------------------


@GRADIENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_bad_step_is_left_out_as_a_whole(bad, dtype, gradients, caplog):
    """Cases N-06, U-05: masters, moments, counters and weights keep their bits; the message names it."""
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)), torch.nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = orlop.AdamW(params, gradients=gradients)
    for step in range(3):
        for p in params:
            backward(p, step)
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"]), [p.detach().clone() for p in params]
    backward(params[0])
    (params[1] * torch.tensor([1.0, bad, 1.0], dtype=dtype)).sum().backward()
    optimizer.step()
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, 1)
    after = optimizer.state_dict()["state"]
    for i, p in enumerate(params):
        assert torch.equal(p, before[1][i])
        assert all(torch.equal(after[i][key], before[0][i][key]) for key in after[i])
    assert "parameter 1 of group 0" in caplog.text
    assert "scale" not in caplog.text
    optimizer.zero_grad()
    backward(params[0])
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_bad_step_raises_or_applies():
    """Case N-06: the strict mode, and torch's own behaviour."""
    (p, optimizer), _ = pair(nonfinite="raise")
    p.grad = torch.full_like(p, float("nan"))
    with pytest.raises(orlop.NonFiniteError, match="parameter 0 of group 0"):
        optimizer.step()
    (ours, optimizer), (theirs, reference) = pair(nonfinite="apply")
    for q, o in ((ours, optimizer), (theirs, reference)):
        q.grad = torch.ones_like(q)
        q.grad[2] = float("nan")
        o.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_loss_scale_recovers_and_ends(gradients):
    """Case N-07: overflow of the scaled gradient alone halves the scale; NaN for ever ends with an error."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = orlop.AdamW([p], gradients=gradients)
    scaler = orlop.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000, max_failures=3)
    weight = torch.full((4,), 2.0**115)
    losses = 0
    for _ in range(20):
        scaler.scale((p * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += int(not torch.equal(p, torch.ones(4)))
    assert scaler.get_scale() == 2.0**12
    assert losses == 16
    with pytest.raises(orlop.NonFiniteError, match="gradient of parameter 0 of group 0"):
        for _ in range(100):
            scaler.scale((p * float("nan")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 1.0


@GRADIENTS
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, orlop.GradScaler])
def test_scalers_unscale_and_clip(scaler_class, gradients):
    """Case B-02: both scalers, with clipping in between, give the unscaled training."""
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    scaler = scaler_class("cpu", init_scale=1024.0)
    for step in range(5):
        backward(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_([theirs], 0.5)
        reference.step()
        reference.zero_grad()
        generator = torch.Generator().manual_seed(step)
        scaler.scale((ours * torch.randn(ours.shape, generator=generator)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), norm, atol=1e-6, rtol=1e-5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_fp16_parameters_and_scalers():
    """Gradients of fp16 weights are unscaled in fp32 once they have left, so that none is lost below fp16's
    smallest number; in place torch refuses them, and so do both scalers."""
    tiny = 2.0**-26  # as an fp16 number 0; scaled by 2^16 exact

    def start(scaler_class, gradients):
        p = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
        optimizer = orlop.AdamW([p], lr=0.25, weight_decay=0.0, eps=1e-12, gradients=gradients)
        scaler = scaler_class("cpu", init_scale=2.0**16)
        scaler.scale((p.float() * tiny).sum()).backward()
        return p, optimizer, scaler

    for scaler_class, gradients in itertools.product(
        [torch.amp.GradScaler, orlop.GradScaler], ["stay", "leave"]
    ):
        p, optimizer, scaler = start(scaler_class, gradients)
        if scaler_class is torch.amp.GradScaler or gradients == "stay":
            with pytest.raises(ValueError, match="unscale FP16"):
                scaler.unscale_(optimizer)
            continue
        scaler.unscale_(optimizer)
        assert float(optimizer.clip_grad_norm_(1e9)) == 8 * tiny
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(p.float(), torch.full((64,), 0.75), atol=1e-3, rtol=0)
        optimizer.zero_grad()
        scaler.scale((p.float() * float("inf")).sum()).backward()
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, before)
        assert scaler.get_scale() == 2.0**15


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


@GRADIENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_masters_and_moments_are_within_reach(dtype, gradients):
    """Case B-08: read after backward and after step; write a master."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).to(dtype))
    optimizer = orlop.AdamW([p], lr=1e-2, gradients=gradients)
    weight = torch.linspace(1, 2, 12).view(3, 4).to(dtype)
    (p * weight).sum().backward()
    assert torch.equal(optimizer.gradient(p), weight)
    optimizer.step()
    state = optimizer.state[p]
    assert state["exp_avg"].shape == p.shape
    torch.testing.assert_close(state["exp_avg"], 0.1 * weight.float())
    assert torch.equal(optimizer.master(p).to(dtype), p.detach())
    target = torch.linspace(-3, 3, 12).view(3, 4) * 1.001
    optimizer.set_master(p, target)
    assert torch.equal(optimizer.master(p), target)
    torch.testing.assert_close(p.detach().float(), target, atol=0, rtol=2.0**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("change", ["halve", "zero", "assign", "replace"])
def test_weights_changed_in_place_are_where_the_next_step_starts(change, through_data, dtype):
    """Case B-09: with and without autograd's version counter."""
    torch.manual_seed(0)
    p = torch.nn.Parameter((torch.randn(300) * 3).to(dtype))
    optimizer = orlop.AdamW([p], lr=1e-2)
    for step in range(3):
        backward(p, step)
        optimizer.step()
        optimizer.zero_grad()
    before = p.detach().clone()
    with torch.no_grad():
        target = p.data if through_data else p
        if change == "halve":
            target.mul_(0.5)
        elif change == "zero":
            target[::2] = 0.0
        elif change == "assign":
            target.copy_(torch.randn(300))
        else:
            p.data = torch.randn(300).to(dtype)
    changed = p.detach().clone()
    optimizer.param_groups[0].update(lr=0.0)
    backward(p)
    optimizer.step()
    assert torch.equal(p, changed)
    half_a_unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    master = optimizer.master(p)
    torch.testing.assert_close(master, changed.float(), atol=1e-40, rtol=half_a_unit)
    if dtype == torch.float16:
        written = before != changed
        assert torch.equal(master[written], changed[written].float())


def test_step_counts_as_an_in_place_change():
    """Autograd refuses a backward through weights that a step has changed, as with torch."""
    (p, optimizer), _ = pair()
    kept = (p**2).sum()
    backward(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


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
        optimizer = make(model.parameters(), lr=1e-2, **options)
        model(torch.ones(2, 4)).sum().backward()
        convert(model)
        assert all(type(p.grad) is torch.Tensor and p.grad.dtype == p.dtype for p in model.parameters())
        optimizer.step()
        results.append([p.detach().float() for p in model.parameters()])
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)


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
