"""Checkpoints of a wrapped model's training: every path of resuming, and what no longer fits.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model, batch, weights  # noqa: E402

import orlop  # noqa: E402
from orlop import deepspeed_compat as deepspeed  # noqa: E402

pytestmark = pytest.mark.any_device

LIMITS = {"limits": {"gpu": 2 * 4 * 600}}


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps(model, optimizer, scheduler, first, count):
    losses = []
    for step in range(first, first + count):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(seed=0):
    torch.manual_seed(seed)
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2}, LIMITS)
    return model, optimizer, schedule(optimizer)


def door1(optimizer_class=orlop.AdamW):
    model = Model()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    return model, optimizer, schedule(optimizer)


def torch_adamw():
    return door1(torch.optim.AdamW)


def saved_by(made):
    model, optimizer, scheduler = made
    parts = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    return copy.deepcopy(parts)


def loaded(make, saved):
    made = make()
    for part, state in zip(made, saved, strict=True):
        part.load_state_dict(state)
    return made


def facts(optimizer):
    """Step, learning rate and moments of all parameters, in their order."""
    state = optimizer.state_dict()
    rates = [group["lr"] for group in state["param_groups"]]
    return rates, {
        (index, key): value.cpu().clone()
        for index, entry in state["state"].items()
        for key, value in entry.items()
    }


def assert_same_facts(optimizer, expected):
    rates, tensors = facts(optimizer)
    assert rates == expected[0]
    assert tensors.keys() == expected[1].keys() and len(tensors) >= 3 * 14
    for key, value in expected[1].items():
        assert torch.equal(tensors[key], value), key


@pytest.mark.parametrize("source", [wrapped, door1, torch_adamw])
@pytest.mark.parametrize("target", [wrapped, door1, torch_adamw])
def test_each_way_has_step_rate_and_moments(source, target, tmp_path):
    """Case C-09: from every door into every door, by way of a file."""
    made = source()
    steps(*made, 0, 4)
    torch.save(saved_by(made), tmp_path / "checkpoint.pt")
    other = loaded(target, torch.load(tmp_path / "checkpoint.pt"))
    assert_same_facts(other[1], facts(made[1]))
    assert other[2].last_epoch == 4
    assert weights(other[0]).keys() == weights(made[0]).keys()
    expected = steps(*made, 4, 4)
    torch.testing.assert_close(steps(*other, 4, 4), expected, atol=0, rtol=0 if source is target else 1e-5)


def test_a_torch_optimizer_is_taken_over_in_the_middle():
    """Case C-09: wrap() itself is such a path."""

    def steady(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    model, optimizer, _ = torch_adamw()
    steps(model, optimizer, steady(optimizer), 0, 4)
    before = facts(optimizer)
    other, other_optimizer, _ = loaded(torch_adamw, saved_by((model, optimizer, schedule(optimizer))))
    expected = steps(other, other_optimizer, steady(other_optimizer), 4, 4)
    model, optimizer = orlop.wrap(model, optimizer, LIMITS)
    assert_same_facts(optimizer, before)
    torch.testing.assert_close(steps(model, optimizer, steady(optimizer), 4, 4), expected, atol=0, rtol=1e-5)


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}}


def engine(scheduler=SCHEDULER):
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        **({"scheduler": scheduler} if scheduler else {}),
    }
    return deepspeed.initialize(model=Model(), config=config)[0]


def engine_steps(made, first, count):
    losses = []
    for step in range(first, first + count):
        loss = made(batch(step)).square().mean()
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def test_engine_has_step_rate_and_moments(tmp_path):
    """Case C-09."""
    made = engine()
    engine_steps(made, 0, 4)
    made.save_checkpoint(tmp_path)
    expected = facts(made.optimizer)
    after = engine_steps(made, 4, 4)
    other = engine()
    other.load_checkpoint(tmp_path)
    assert_same_facts(other.optimizer, expected)
    assert other.global_steps == 4 and other.get_lr() == expected[0]
    assert engine_steps(other, 4, 4) == after


def drop_states(folder):
    (folder / "optimizer.safetensors").unlink()


def drop_one_moment(folder):
    import safetensors.torch

    path = folder / "optimizer.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["blocks.1.weight.exp_avg_sq"]
    safetensors.torch.save_file(tensors, path)
    state = json.loads((folder / "state.json").read_text())
    state["bytes"][path.name] = path.stat().st_size
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (drop_states, r"optimizer\.safetensors: no bytes"),
        (drop_one_moment, r"blocks\.1\.weight lacks exp_avg_sq"),
    ],
)
def test_missing_states_are_refused(tmp_path, spoil, text):
    """Case C-09: never as if from scratch."""
    made = engine()
    engine_steps(made, 0, 2)
    made.save_checkpoint(tmp_path, tag="t")
    spoil(tmp_path / "t")
    with pytest.raises((orlop.InvalidDataError, ValueError), match=text):
        engine().load_checkpoint(tmp_path)


def test_a_missing_schedule_is_refused_unless_weights_alone_are_wanted(tmp_path):
    """Case C-09."""
    made = engine(scheduler=None)
    engine_steps(made, 0, 3)
    made.save_checkpoint(tmp_path)
    other = engine()
    before = weights(other.module)
    with pytest.raises(orlop.InvalidDataError, match="load_lr_scheduler_states=False"):
        other.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in weights(other.module).items())
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert all(torch.equal(v, weights(made.module)[n]) for n, v in weights(other.module).items())
    assert other.global_steps == 0
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert other.global_steps == 3


# --- what has changed since ---------------------------------------------------------------------


def one_more(model):
    model.blocks.append(torch.nn.Linear(24, 24).to(DEVICE))


def renamed(model):
    model.entry = model._modules.pop("inp")


def reshaped(model):
    model.blocks[2] = torch.nn.Linear(24, 30).to(DEVICE)


CHANGES = pytest.mark.parametrize(
    ("change", "missing", "unexpected", "mismatched"),
    [
        (one_more, ["blocks.5.weight", "blocks.5.bias"], [], []),
        (renamed, ["entry.weight", "entry.bias"], ["inp.weight", "inp.bias"], []),
        (reshaped, [], [], ["blocks.2.weight", "blocks.2.bias"]),
    ],
)


@CHANGES
def test_changed_models_are_told_by_name(change, missing, unexpected, mismatched):
    """Case C-19: weights; what is the same is loaded by name when that is asked for."""
    made = wrapped()
    steps(*made, 0, 2)
    saved = saved_by(made)[0]
    model = Model()
    change(model)
    model, _ = orlop.wrap(model, {"lr": 1e-2}, LIMITS | {"limits": {"gpu": 1 << 20}})
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(saved)
    for name in missing + unexpected + mismatched:
        assert name in str(raised.value), name
    if mismatched:
        saved = {name: value for name, value in saved.items() if name not in mismatched}
    found = model.load_state_dict(saved, strict=False)
    assert found.missing_keys == missing + mismatched and found.unexpected_keys == unexpected
    after = weights(model)
    assert all(torch.equal(after[name], value.cpu()) for name, value in saved.items() if name in after)


@CHANGES
def test_states_of_changed_models_are_told_by_name(change, missing, unexpected, mismatched):
    """Case C-19: of optimizers that know the names."""

    def optimizer_of(model):
        return orlop.AdamW(list(model.named_parameters()), lr=1e-2)

    model = Model()
    optimizer = optimizer_of(model)
    model(batch(0)).sum().backward()
    optimizer.step()
    changed = Model()
    change(changed)
    other = optimizer_of(changed)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError) as raised:
        other.load_state_dict(optimizer.state_dict())
    for name in missing + unexpected + mismatched:
        assert name in str(raised.value), name
    assert other.state_dict() == before


def test_groups_in_another_order_are_refused():
    """Case C-19: positions alone would give states to other parameters of the same shape."""

    def optimizer_of(order):
        named = dict(Model().named_parameters())
        return orlop.AdamW([{"params": [(name, named[name])]} for name in order], lr=1e-2)

    order = [f"blocks.{index}.weight" for index in range(5)]
    saved = optimizer_of(order).state_dict()
    optimizer_of(order).load_state_dict(saved)
    with pytest.raises(ValueError, match="another order"):
        optimizer_of(order[::-1]).load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["param_names"]
    optimizer_of(order[::-1]).load_state_dict(saved)  # as torch: without names, positions count
