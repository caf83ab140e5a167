"""State dicts of orlop.AdamW: torch's layout, both ways, and exact resumption."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def build(dtype=torch.float32, optimizer_class=orlop.AdamW, **options):
    """Interleaved groups, one parameter frozen."""
    torch.manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (5, 17, 3, 64)]
    params[2].requires_grad_(False)
    groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "weight_decay": 0.0}]
    return params, optimizer_class(groups, **options)


def train(params, optimizer, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        loss = sum(
            (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum()
            for p in params
            if p.requires_grad
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer_sync = getattr(optimizer, "synchronize", None)
    if optimizer_sync:
        optimizer_sync()
    return [p.detach().clone() for p in params]


def assert_same_states(a, b):
    assert a["state"].keys() == b["state"].keys()
    for index, state in a["state"].items():
        assert state.keys() == b["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(value, b["state"][index][key]), (index, key)
    assert a["param_groups"] == b["param_groups"]


def test_layout_is_that_of_torch():
    params, optimizer = build()
    reference_params, reference = build(optimizer_class=torch.optim.AdamW)
    assert optimizer.state_dict()["state"] == {}
    train(params, optimizer, 3)
    train(reference_params, reference, 3)
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            mine = ours["state"][index][key]
            assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device)
            torch.testing.assert_close(mine, value, atol=1e-6, rtol=1e-5)
    for group in theirs["param_groups"]:
        group.setdefault("decoupled_weight_decay", True)  # which an older torch does not name
    assert ours["param_groups"] == theirs["param_groups"]


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_training_goes_on_in_the_other(direction):
    """Cases C-22, C-23: moments and steps are taken, both ways; a loaded dict need not be loaded twice."""
    classes = (orlop.AdamW, torch.optim.AdamW)
    first, second = classes if direction == "to torch" else classes[::-1]
    straight_params, straight = build(optimizer_class=torch.optim.AdamW)
    expected = train(straight_params, straight, 20)
    params, optimizer = build(optimizer_class=first)
    weights = train(params, optimizer, 10)
    other_params, other = build(optimizer_class=second)
    with torch.no_grad():
        for p, w in zip(other_params, weights, strict=True):
            p.copy_(w)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    result = train(other_params, other, 10, first=10)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_masters_start_from_the_weights_with_one_notice(caplog):
    """Case C-23: a torch state of bf16 weights has no masters."""
    params, optimizer = build(torch.bfloat16)
    reference_params, reference = build(torch.bfloat16, torch.optim.AdamW)
    train(reference_params, reference, 3)
    optimizer.load_state_dict(reference.state_dict())
    assert len(caplog.records) == 1 and "3 masters" in caplog.text
    assert torch.equal(optimizer.master(params[0]), params[0].detach().float())
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32


@DTYPES
@pytest.mark.parametrize("weights_first", [True, False])
def test_resume_equals_straight_run(dtype, weights_first, tmp_path):
    """Cases C-07, C-10, N-22: through a file, bit for bit, whichever is loaded first; saving at once after
    loading gives the same file content."""
    straight_params, straight = build(dtype)
    expected = train(straight_params, straight, 100)
    params, optimizer = build(dtype)
    train(params, optimizer, 50)
    torch.save({"weights": params, "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh_params, fresh = build(dtype)
    with torch.no_grad():
        if not weights_first:
            fresh.load_state_dict(saved["optimizer"])
        for p, w in zip(fresh_params, saved["weights"], strict=True):
            p.copy_(w)
        if weights_first:
            fresh.load_state_dict(saved["optimizer"])
    assert_same_states(fresh.state_dict(), saved["optimizer"])
    for p, q in zip(params, fresh_params, strict=True):
        if p.requires_grad:
            assert torch.equal(optimizer.master(p), fresh.master(q))
    result = train(fresh_params, fresh, 50, first=50)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@DTYPES
def test_load_in_the_process_that_saved(dtype):
    """Case C-08: train, save, train, load, train: the last two are the same."""
    params, optimizer = build(dtype)
    train(params, optimizer, 10)
    saved = copy.deepcopy((optimizer.state_dict(), params))
    second = train(params, optimizer, 10, first=10)
    optimizer.load_state_dict(saved[0])
    with torch.no_grad():
        for p, w in zip(params, saved[1], strict=True):
            p.copy_(w)
    third = train(params, optimizer, 10, first=10)
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))


def test_states_outlive_the_optimizer():
    """Case N-22: a state dict is a view, as torch's is, and keeps its memory."""
    params, optimizer = build()
    train(params, optimizer, 2)
    state = optimizer.state_dict()["state"]
    copied = copy.deepcopy(state)
    optimizer.close()
    del optimizer
    gc.collect()
    for index, entry in state.items():
        assert all(torch.equal(value, copied[index][key]) for key, value in entry.items())


def test_states_replaced_or_removed_by_the_user():
    """As with torch: a removed state starts anew, a replaced tensor counts."""
    params, optimizer = build()
    reference_params, reference = build(optimizer_class=torch.optim.AdamW)
    for ps, o in ((params, optimizer), (reference_params, reference)):
        train(ps, o, 3)
        del o.state[ps[0]]
        o.state[ps[1]]["exp_avg"] = torch.ones(17)
        o.state[ps[3]]["exp_avg_sq"].mul_(2.0)
        train(ps, o, 3, first=3)
    for a, b in zip(params, reference_params, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda d: d["param_groups"].pop(), "different number of parameter groups"),
        (lambda d: d["param_groups"][0]["params"].pop(), "group 0 has 1 parameters, here are 2"),
        (lambda d: d["state"].update({99: d["state"][0]}), "state 99"),
        (lambda d: d["state"][0].pop("exp_avg_sq"), "lacks exp_avg_sq"),
        (lambda d: d["state"][2].update(exp_avg=torch.ones(4)), r"shape \[4\]"),
        (lambda d: d["state"][0].update(max_exp_avg_sq=torch.ones(5)), "amsgrad"),
        (lambda d: d["param_groups"][1].update(decoupled_weight_decay=False), "saved by Adam"),
        (lambda d: d["param_groups"][1].update(amsgrad=True), "amsgrad"),
    ],
    ids=["groups", "size", "unknown", "missing", "shape", "amsgrad_state", "adam", "amsgrad_group"],
)
def test_what_does_not_fit_is_listed_and_changes_nothing(spoil, text):
    """Cases C-19, C-22."""
    params, optimizer = build()
    train(params, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    spoil(wrong)
    with pytest.raises((ValueError, orlop.UsageError), match=text):
        optimizer.load_state_dict(wrong)
    assert_same_states(optimizer.state_dict(), before)


def test_hooks_of_state_dicts_run():
    params, optimizer = build()
    train(params, optimizer, 1)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append(d.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", 1, "loaded"]


def test_fused_state_of_torch_loads():
    """What torch notes about how it computes is no property of the state."""
    params, optimizer = build()
    reference_params, reference = build(optimizer_class=torch.optim.AdamW, fused=True)
    train(reference_params, reference, 2)
    with torch.no_grad():
        for p, q in zip(params, reference_params, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(reference.state_dict())
    ours, theirs = train(params, optimizer, 1, first=2), train(reference_params, reference, 1, first=2)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_saving_does_not_grow():
    """Case R-09: resident memory after 20 saves."""
    import io

    from memory_use import resident_bytes

    p = torch.nn.Parameter(torch.ones(1 << 18))
    optimizer = orlop.AdamW([p])
    after = []
    for _ in range(20):
        train([p], optimizer, 5)
        torch.save(optimizer.state_dict(), io.BytesIO())
        after.append(resident_bytes())
    assert after[-1] <= after[1] * 1.01
