"""What is not finite, and what users read and write of an orlop.AdamW."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import GRADIENTS, backward, pair  # noqa: E402

import orlop  # noqa: E402
from adam_reference import masters_of_written  # noqa: E402

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


# --- B-08, B-09: what a user reads and writes ------------------------------------------------------


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
    before, masters, memory = p.detach().clone(), optimizer.master(p), p.data
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
    assert torch.equal(memory, before if change == "replace" else changed)  # whoever else has it
    master = optimizer.master(p)
    assert torch.equal(master, masters_of_written(changed, masters))


def test_step_counts_as_an_in_place_change():
    """Autograd refuses a backward through weights that a step has changed, as with torch."""
    (p, optimizer), _ = pair()
    kept = (p**2).sum()
    backward(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
