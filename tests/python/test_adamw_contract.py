"""orlop.AdamW keeps what torch.optim.Optimizer promises, and refuses by name what it cannot do."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

torch = pytest.importorskip("torch")

from memory_use import allocated, arena_bytes, resident_bytes  # noqa: E402

import orlop  # noqa: E402

GRADIENTS = pytest.mark.parametrize("gradients", ["stay", "leave"])


def pair(numel=6, dtype=torch.float32, **options):
    """The same parameter in two optimizers: ours and torch's."""
    torch.manual_seed(2)
    weights = torch.randn(numel).to(dtype)
    ours, theirs = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.clone())
    common = {k: v for k, v in options.items() if k not in ("gradients", "nonfinite", "moments")}
    return (ours, orlop.AdamW([ours], **options)), (theirs, torch.optim.AdamW([theirs], **common))


def backward(p, seed=0):
    generator = torch.Generator().manual_seed(seed)
    (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum().backward()


def run_python(code, timeout=120, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


# --- B-02: an Optimizer ---------------------------------------------------------------------------


def test_learning_rate_of_the_moment_is_used():
    """Case B-02: lr edited in param_groups, 1e-3 -> 0 -> 1e-4, is that of the next step, by value."""
    (ours, optimizer), (theirs, reference) = pair()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 1e-3
    for step, lr in enumerate((1e-3, 0.0, 1e-4)):
        before = ours.detach().clone()
        for p, o in ((ours, optimizer), (theirs, reference)):
            o.param_groups[0]["lr"] = lr
            backward(p, step)
            o.step()
            o.zero_grad()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert torch.equal(before, ours) == (lr == 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    ],
    ids=["lambda", "onecycle", "plateau", "restarts", "exponential"],
)
def test_schedulers(make):
    """Case B-02: torch's schedulers accept it and their rates and momenta count."""
    (ours, optimizer), (theirs, reference) = pair()
    for p, o in ((ours, optimizer), (theirs, reference)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler = make(o)
            for step in range(10):
                backward(p, step)
                o.step()
                o.zero_grad()
                metrics = (1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
                scheduler.step(*metrics)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_warm_up_of_transformers():
    """Case B-02: the polynomial schedule reads defaults["lr"]."""
    transformers = pytest.importorskip("transformers")
    (p, optimizer), _ = pair()
    scheduler = transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 2, 10, lr_end=1e-7)
    backward(p)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_learning_rate_as_tensor():
    (ours, optimizer), (theirs, reference) = pair(lr=torch.tensor(1e-2))
    for p, o in ((ours, optimizer), (theirs, reference)):
        backward(p)
        o.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_closure_and_hooks(gradients):
    (p, optimizer), _ = pair(gradients=gradients)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert float(optimizer.step(closure).detach()) == pytest.approx(float((before**2).sum()))
    assert calls == ["pre", "closure", "post"]
    assert not torch.equal(before, p)


@GRADIENTS
def test_zero_grad(gradients):
    """Case B-02: set_to_none and zeros, from the optimizer and from the module."""
    for set_to_none in (True, False):
        (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
        module = torch.nn.Module()
        module.p = ours
        for p, o in ((ours, optimizer), (theirs, reference)):
            for step in range(3):
                backward(p, step)
                o.step()
                o.zero_grad(set_to_none=set_to_none)
            o.step()  # zeros move the moments, None does not
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        backward(ours, 7)
        module.zero_grad(set_to_none=set_to_none)
        before = optimizer.state[ours]["exp_avg"].clone()
        optimizer.step()
        assert torch.equal(before, optimizer.state[ours]["exp_avg"]) == set_to_none


@GRADIENTS
def test_gradients_stay_until_they_are_dropped(gradients):
    """As in torch: two steps on one gradient, and a backward that adds to it."""
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    for p, o in ((ours, optimizer), (theirs, reference)):
        backward(p, 1)
        o.step()
        o.step()
        backward(p, 2)
        o.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@GRADIENTS
def test_add_param_group(gradients):
    (ours, optimizer), (theirs, reference) = pair(gradients=gradients)
    more = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))]
    for p, q, o in ((ours, more[0], optimizer), (theirs, more[1], reference)):
        for step in range(6):
            if step == 2:
                o.add_param_group({"params": [q], "lr": 0.1})
            backward(p, step)
            backward(q, step)
            o.step()
            o.zero_grad()
            if step < 2:
                q.grad = None
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(more[0], more[1], atol=1e-6, rtol=1e-5)
    with pytest.raises(TypeError, match="float64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 2


def test_groups_keep_number_and_order():
    """Case B-06: an empty group and a frozen one are seen by a scheduler where they were given."""
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = orlop.AdamW(
        [{"params": [], "lr": 1.0}, {"params": [frozen], "lr": 2.0}, {"params": [p], "lr": 3.0}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert scheduler.get_last_lr() == [1.0, 2.0, 3.0]
    backward(p)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(3))


# --- B-01, B-03, N-13, N-15, N-16, U-12: refusals -------------------------------------------------


@pytest.mark.parametrize("option", ["amsgrad", "foreach", "fused", "capturable", "differentiable"])
def test_options_are_refused_by_name(option):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(orlop.UsageError, match=option):
        orlop.AdamW([p], **{option: True})
    optimizer = orlop.AdamW([p])
    optimizer.param_groups[0][option] = True
    backward(p)
    with pytest.raises(orlop.UsageError, match=option):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"betas": (1.0, 0.9)}, "index 0"),
        ({"betas": (0.9, -0.1)}, "index 1"),
        ({"eps": -1e-8}, "epsilon"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_hyperparameters_out_of_range(options, text):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=text):
        orlop.AdamW([p], **options)
    optimizer = orlop.AdamW([p])
    optimizer.param_groups[0].update(options)
    backward(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(before, p)


@pytest.mark.parametrize(
    ("parameter", "error", "text"),
    [
        (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)), TypeError, "float64"),
        (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)), TypeError, "complex64"),
        (lambda: torch.nn.Parameter(torch.ones(3, device="meta")), orlop.UsageError, "meta"),
        (lambda: torch.nn.Parameter(torch.ones(2, 6)[:, ::2]), orlop.UsageError, "contiguous"),
        (lambda: torch.nn.Parameter(torch.ones(1).expand(4)), orlop.UsageError, "contiguous"),
    ],
    ids=["float64", "complex", "meta", "gaps", "expanded"],
)
def test_parameters_are_refused_by_name(parameter, error, text):
    """Cases B-01, B-03: an exception that names the parameter, never a fault."""
    named = [("fine", torch.nn.Parameter(torch.ones(2))), ("layer.bad", parameter())]
    with pytest.raises(error, match=text) as raised:
        orlop.AdamW([p for _, p in named])
    assert "parameter 1 of group 0" in str(raised.value)
    holder = torch.nn.Module()
    holder.layer = torch.nn.Module()
    holder.layer.register_parameter("bad", named[1][1])
    with pytest.raises(error, match=r"layer\.bad"):
        orlop.AdamW([named[1][1]], module=holder)


def test_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = orlop.AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_sharing_memory_is_refused():
    """Case N-16: duplicates as in torch; two parameters over one storage would step twice."""
    p = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="more than one parameter group"):
        orlop.AdamW([{"params": [p]}, {"params": [p]}])
    with pytest.raises(orlop.UsageError, match="share memory"):
        orlop.AdamW([p, torch.nn.Parameter(p.detach()[2:])])


def test_tied_weight_steps_once():
    """Case N-16: one module parameter in two places."""
    results = []
    for optimizer_class in (orlop.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        embedding, head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False)
        head.weight = embedding.weight
        model = torch.nn.ModuleList([embedding, head])
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        for step in range(20):
            ids = torch.tensor([step % 7, (step * 3) % 7])
            torch.nn.functional.cross_entropy(head(embedding(ids)), (ids + 1) % 7).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(embedding.weight.detach())
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_other_wrapper_is_refused():
    """Case U-12: a parameter that DeepSpeed manages."""
    p = torch.nn.Parameter(torch.ones(4))
    p.ds_id = 3
    with pytest.raises(orlop.UsageError, match="DeepSpeed"):
        orlop.AdamW([p])


def test_closed_optimizer():
    """Case B-01: a call after close() is an exception."""
    (p, optimizer), _ = pair()
    backward(p)
    optimizer.step()
    optimizer.close()
    backward(p)
    with pytest.raises(orlop.UsageError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize(
    "action", [copy.deepcopy, lambda o: __import__("pickle").dumps(o)], ids=["deepcopy", "pickle"]
)
def test_copies_are_refused(action):
    (_, optimizer), _ = pair()
    with pytest.raises(orlop.UsageError, match="state_dict"):
        action(optimizer)


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

    for scaler_class, gradients in itertools.product([torch.amp.GradScaler, orlop.GradScaler], ["stay", "leave"]):
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
    ],
    ids=["add", "clamp", "setitem", "out", "copy", "div", "mul_tensor"],
)
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


def test_gradient_that_has_left_reads_as_a_tensor():
    """Case B-08: shape, dtype, device, values, norm."""
    p = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = orlop.AdamW([p], gradients="leave")
    (p**2).sum().backward()
    expected = 2 * p.detach()
    assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device)
    assert type(p.grad).__name__ == "OffloadedGradient"
    assert torch.equal(p.grad + 0, expected)
    assert torch.equal(p.grad.cpu(), expected)
    assert torch.equal(p.grad[1], expected[1])
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


# --- memory, processes ----------------------------------------------------------------------------


def test_frozen_weights_cost_nothing():
    """Case M-01: bytes follow trainable elements; a frozen group is accepted and keeps its bytes."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(24)).to(torch.bfloat16)
    layers[:23].requires_grad_(False)
    frozen = [p.detach().clone() for p in layers[:23].parameters()]
    decay = [p for p in layers.parameters() if p.ndim == 2]
    rest = [p for p in layers[:23].parameters() if p.ndim == 1]
    optimizer = orlop.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], gradients="leave")
    report = optimizer.memory_report()
    assert (report["masters"], report["moments"], report["gradients"]) == (2 * 4096, 8 * 4096, 2 * 4096)
    for _ in range(20):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(frozen, layers[:23].parameters(), strict=True))
    assert optimizer.memory_report() == report


@pytest.mark.parametrize("end", ["close", "collected", "refused"])
def test_twenty_optimizers_leave_nothing_behind(end):
    """Case R-10: memory and threads after round 20 are those after round 2, as arenas and allocators count them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    bad = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    after = []
    for _ in range(20):
        before = arena_bytes()
        optimizer = orlop.AdamW(model.parameters(), module=model)
        assert arena_bytes() > before, "what is counted below"
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if end == "refused":
            with pytest.raises(TypeError):
                optimizer.add_param_group({"params": [bad]})
        if end == "close":
            optimizer.close()
        del optimizer
        after.append((arena_bytes(), len(os.listdir("/proc/self/task")), *allocated()))
    (arenas, threads, heap, blocks, tensors), last = after[1], after[-1]
    assert last[0] <= arenas, after
    assert last[1] <= threads
    assert last[2] <= heap + (64 << 10), after
    assert last[3] <= blocks + 400 and last[4] == tensors, after
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@GRADIENTS
def test_a_thousand_steps_do_not_grow(gradients):
    p = torch.nn.Parameter(torch.ones(4096))
    optimizer = orlop.AdamW([p], gradients=gradients)
    for step in range(1100):
        if step == 100:
            before = resident_bytes()
        backward(p, step)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert resident_bytes() <= before + 2**20


def test_two_optimizers_in_turn():
    """Case B-07: each equals its run alone, also when the other ends in the middle."""

    def run(p, optimizer, step):
        backward(p, step)
        optimizer.step()
        optimizer.zero_grad()

    alone, together = [], []
    for seed in (1, 2):
        p = torch.nn.Parameter(torch.full((100,), float(seed)))
        optimizer = orlop.AdamW([p], lr=0.1 * seed)
        for step in range(10):
            run(p, optimizer, step)
        alone.append(p.detach())
    params = [torch.nn.Parameter(torch.full((100,), float(seed))) for seed in (1, 2)]
    optimizers = [orlop.AdamW([p], lr=0.1 * (i + 1)) for i, p in enumerate(params)]
    for step in range(10):
        for p, optimizer in zip(params, optimizers, strict=True):
            if not (step >= 5 and p is params[1]):
                run(p, optimizer, step)
        if step == 5:
            kept = params[1].detach().clone()
            optimizers[1].close()
    together = params[0].detach()
    assert torch.equal(together, alone[0])
    assert torch.equal(kept, params[1])


def test_forked_workers_leave_the_optimizer_alone():
    """Case B-05: children of a data loader end normally or by exception, without a word."""
    result = run_python(
        """
        import os, sys, torch, orlop
        p = torch.nn.Parameter(torch.ones(1000))
        optimizer = orlop.AdamW([p], gradients="leave")
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 16
            def __getitem__(self, i):
                if i == 13: raise ValueError("planted")
                return torch.tensor(float(i))
        pid = os.fork()
        if pid == 0:
            try: optimizer.synchronize()
            except orlop.UsageError as error: print("refused:", "fork" in str(error), flush=True)
            del optimizer
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        try:
            for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
                (p * batch.sum()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ValueError:
            print("planted error arrived")
        p.sum().backward()
        optimizer.step()
        print("steps", optimizer.steps)
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n")[:2] == ["refused: True", "planted error arrived"]
    assert "steps" in result.stdout


def test_exit_while_an_update_runs():
    """Case B-04: the interpreter ends at once, with and without a reference left, many times."""
    # Interpreters that are forked from one that has imported what the first optimizer imports: that is most of the time
    # of such a process.
    code = """
        import os, sys, torch, torch._dynamo, orlop
        for end in ("pass", "del optimizer", "del model", "optimizer.close()") * 2:
            pid = os.fork()
            if pid == 0:
                break
            assert os.waitpid(pid, 0)[1] == 0, end
        else:
            sys.exit(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))
        optimizer = orlop.AdamW(model.parameters(), module=model, threads=1)
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        exec(end)
        print("end of", end, flush=True)
        """
    result = run_python(code, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")
    ends = ("pass", "del optimizer", "del model", "optimizer.close()") * 2
    assert result.stdout.splitlines() == [f"end of {end}" for end in ends]


def test_importing_orlop_imports_no_torch():
    result = run_python("import sys, orlop; print('torch' in sys.modules, 'AdamW' in dir(orlop))")
    assert (result.stdout, result.stderr) == ("False True\n", "")


@pytest.mark.parametrize(
    ("fake", "text"),
    [
        ("raise ImportError(\"No module named 'torch'\")", "not installed"),
        ("__version__ = '2.3.1+cu121'", "2.3.1+cu121 is installed"),
    ],
    ids=["missing", "old"],
)
def test_one_clear_message_without_torch(tmp_path, fake, text):
    """Without torch, and with one that is too old."""
    (tmp_path / "torch.py").write_text(fake)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run_python(
        """
        import orlop
        try: orlop.AdamW
        except orlop.UsageError as error: print(error)
        try: from orlop import AdamW
        except ImportError as error: print("ImportError")
        """,
        PYTHONPATH=path,
    )
    message, *rest = result.stdout.splitlines()
    assert "PyTorch 2.4 or newer" in message and text in message and "pip install" in message
    assert (rest, result.stderr) == (["ImportError"], "")
