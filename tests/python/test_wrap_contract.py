"""orlop.wrap at the edges: shared storage, overflows, resume in 16 bits, writes inside a forward, new parameters.

On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import contextlib
import copy
import io

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model, batch, plain, streamed, train, weights  # noqa: E402

import orlop  # noqa: E402
from adam_reference import masters_of_written  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

pytestmark = pytest.mark.any_device


# --- shared storage -----------------------------------------------------------------------------


def share_whole(model):
    model.blocks[3].weight.data = model.blocks[1].weight.data
    return "blocks.1.weight", "blocks.3.weight"


def share_slice(model):
    both = torch.randn(24, 24, device=DEVICE)
    model.blocks[0].weight.data, model.blocks[4].bias.data = both, both[5]
    return "blocks.0.weight", "blocks.4.bias"


def share_with_head(model):
    model.out.weight.data = model.blocks[2].weight.data[:4]
    return "blocks.2.weight", "out.weight"


@pytest.mark.parametrize("optimizer", [{"lr": 1e-2}, None], ids=["trained", "evaluated"])
@pytest.mark.parametrize("share", [share_whole, share_slice, share_with_head])
def test_two_parameters_over_one_storage_are_refused(share, optimizer):
    """Cases N-16, C-02: as two copies they would be untied without a word; the model stays as it was."""
    model = Model()
    one, other = share(model)
    before = weights(model)
    kinds = [type(p) for p in model.parameters()]
    with pytest.raises(orlop.UsageError, match=rf"({one} and {other}|{other} and {one}) share memory"):
        orlop.wrap(model, optimizer)
    assert [type(p) for p in model.parameters()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    model(batch(0)).sum().backward()


# --- overflows ----------------------------------------------------------------------------------


def scaled_steps(model, optimizer, scaler, steps):
    for step in steps:
        scaler.scale(model(batch(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_overflow_in_a_block_halves_the_scale():
    """Case N-07: only the overflowing step is left out; the rest is the run of the plain model."""

    def run(make):
        model, optimizer = make(Model())
        scaler = orlop.GradScaler(DEVICE, init_scale=2.0**16)
        scaled_steps(model, optimizer, scaler, range(2))
        handle = model.blocks[2].weight.register_hook(lambda g: g * torch.inf)
        scaled_steps(model, optimizer, scaler, range(2, 3))
        handle.remove()
        scales = [scaler.get_scale()]
        scaled_steps(model, optimizer, scaler, range(3, 6))
        return [*scales, scaler.get_scale()], weights(model)

    (scales, got), (_, expected) = run(streamed), run(plain)
    assert scales == [2.0**15, 2.0**15]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("bad", ["weight", "gradient"])
def test_overflow_at_the_floor_names_the_parameter_of_a_block(bad):
    """Case N-07: weights that are away are looked at where they are."""
    model, optimizer = streamed(Model())
    scaler = orlop.GradScaler(DEVICE, init_scale=2.0, max_failures=3)
    if bad == "weight":
        with orlop.gathered(model.blocks[2], write=True), torch.no_grad():
            model.blocks[2].weight[3, 4] = torch.nan
        for name, p in model.named_parameters():  # what it makes of others is not what this is about
            if name != "blocks.2.weight":
                p.requires_grad_(False)
    else:
        model.blocks[2].weight.register_hook(lambda g: g * torch.inf)
    text = {
        "weight": r"the weight of blocks\.2\.weight itself is not finite",
        "gradient": r"the gradient of blocks\.2\.weight is not finite, its weight is",
    }[bad]
    with pytest.raises(orlop.errors.NonFiniteError, match=rf"3 times in a row.*{text}"):
        scaled_steps(model, optimizer, scaler, range(8))
    assert scaler.get_scale() == 1.0


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["optimizer", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
def test_resume_in_either_order_has_the_masters(dtype, first, resident):
    """Case C-10: masters are those of the straight run right after loading, and after further steps."""

    def make(seed):
        model = Model(dtype=dtype)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.2)
        limit = 1 << 30 if resident else 2 * 600 * dtype.itemsize
        return orlop.wrap(model, {"lr": 1e-3}, {"limits": {"gpu": limit}})

    def masters(model, optimizer):
        return {name: optimizer.master(p) for name, p in model.named_parameters()}

    model, optimizer = make(1)
    train(model, optimizer, 4)
    saved = {
        "weights": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
    at_save = masters(model, optimizer)

    other, other_optimizer = make(2)
    targets = {"weights": other, "optimizer": other_optimizer}
    for what in (first, next(k for k in targets if k != first)):
        targets[what].load_state_dict(saved[what])
    loaded = masters(other, other_optimizer)
    assert all(torch.equal(loaded[name], at_save[name]) for name in at_save)
    expected = train(model, optimizer, 3, first=4)
    assert train(other, other_optimizer, 3, first=4) == expected
    straight, resumed = masters(model, optimizer), masters(other, other_optimizer)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_edit_after_a_resume_is_the_master():
    """What was loaded does not come back in the place of what is written later."""
    model, optimizer = streamed(Model(dtype=torch.bfloat16))
    train(model, optimizer, 4)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    before = optimizer.master(model.blocks[2].weight).cpu()
    model, optimizer = streamed(Model(dtype=torch.bfloat16))
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    with orlop.gathered(model.blocks[2], write=True), torch.no_grad():
        model.blocks[2].weight.fill_(0.0)
    master = optimizer.master(model.blocks[2].weight).cpu()
    assert torch.equal(master, masters_of_written(torch.zeros(24, 24, dtype=torch.bfloat16), before))


# --- writes inside a forward --------------------------------------------------------------------


class Clamped(torch.nn.Linear):
    """Keeps its weights small as part of its forward, before it uses them."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampedModel(Model):
    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.blocks[1] = Clamped(24, 24)
        self.to(DEVICE, dtype)


def halve(module, _):
    with torch.no_grad():
        module.weight.mul_(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["forward", "hook"])
def test_write_inside_the_forward_of_a_block_stays(how, dtype):
    """Case B-09: what the forward of a block writes is what its master starts from, as without the wrap."""

    def run(prepare):
        model, optimizer = prepare(ClampedModel(dtype) if how == "forward" else Model(dtype=dtype))
        if how == "hook":
            model.blocks[1].register_forward_pre_hook(halve)
        losses = train(model, optimizer)
        return losses, weights(model)

    (losses, got), (expected, wanted) = run(streamed), run(plain)
    assert losses == expected
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_write_inside_a_forward_is_the_master_in_bf16():
    """Before any step."""
    model, optimizer = streamed(Model(dtype=torch.bfloat16))
    train(model, optimizer, 3)
    model.blocks[1].register_forward_pre_hook(halve)
    before, masters = weights(model)["blocks.1.weight"], optimizer.master(model.blocks[1].weight).cpu()
    model(batch(3, torch.bfloat16)).float().square().mean().backward()
    assert torch.equal(weights(model)["blocks.1.weight"], 0.5 * before)
    assert torch.equal(
        optimizer.master(model.blocks[1].weight).cpu(), masters_of_written(0.5 * before, masters)
    )


def test_write_inside_an_evaluation_stays():
    model, _ = orlop.wrap(Model())
    model.blocks[1].register_forward_pre_hook(halve)
    expected = weights(Model())["blocks.1.weight"] * 0.25
    with torch.no_grad():
        model(batch(0))
        model(batch(0))
    assert torch.equal(weights(model)["blocks.1.weight"], expected)


def test_step_inside_gathered_is_not_undone():
    """The copy that an update has passed by is no write of the user's."""
    reference, reference_optimizer = plain(Model())
    model, optimizer = streamed(Model())
    for m, o in ((reference, reference_optimizer), (model, optimizer)):
        m(batch(0)).square().mean().backward()
        if m is model:
            with orlop.gathered(m):
                o.step()
        else:
            o.step()
        o.zero_grad()
    assert all(torch.equal(value, weights(reference)[name]) for name, value in weights(model).items())


def test_write_to_a_copy_that_a_step_has_passed_by_is_refused():
    """Case B-09: a block that stays, with its states in host memory, has its old weights until somebody waits for
    the new ones."""
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2, "states": "host"}, {"limits": {"gpu": 1 << 30}})
    train(model, optimizer, 2)
    with torch.no_grad():
        model.blocks[2].weight.mul_(0.5)
    with pytest.raises(orlop.UsageError, match=r"blocks\.2\.weight was written .* synchronize\(\)"):
        model(batch(2))
    optimizer.synchronize()
    before = optimizer.master(model.blocks[2].weight)
    with torch.no_grad():
        model.blocks[2].weight.mul_(0.5)
    assert torch.equal(optimizer.master(model.blocks[2].weight), 0.5 * before)
    train(model, optimizer, 1, first=2)


# --- new parameters -----------------------------------------------------------------------------


def replaced_table(model):
    """As a resize of the embeddings does: a larger weight in the place of the old one, whose rows it has."""
    old = model.inp
    model.inp = torch.nn.Linear(8, 24).to(DEVICE)
    with torch.no_grad():
        model.inp.weight.copy_(old.weight)
    return ["inp.weight", "inp.bias"]


def replaced_in_block(model):
    model.blocks[2].weight = torch.nn.Parameter(torch.eye(24, device=DEVICE))
    return ["blocks.2.weight"]


def hidden(model):
    return model, orlop.AdamW(model.parameters(), lr=1e-2, module=model)


@pytest.mark.parametrize("change", [replaced_table, replaced_in_block])
@pytest.mark.parametrize("make", [streamed, hidden])
def test_parameters_that_come_later_are_named(make, change):
    """Cases M-07, M-14: trained once they are given to the optimizer, never left out without a word."""
    model, optimizer = make(Model())
    train(model, optimizer, 2)
    names = change(model)
    before = weights(model)
    model(batch(2)).square().mean().backward()
    with pytest.raises(orlop.UsageError, match=f"{', '.join(names)}: .*add_param_group"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    new = dict(model.named_parameters())
    optimizer.add_param_group({"params": [new[name] for name in names]})
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in weights(model).items())
    optimizer.zero_grad()
    losses = train(model, optimizer, 3, first=3)
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("make", [streamed, hidden])
def test_frozen_parameters_may_come_later(make):
    model, optimizer = make(Model())
    train(model, optimizer, 2)
    names = replaced_table(model)
    model.inp.requires_grad_(False)
    before = weights(model)
    train(model, optimizer, 2, first=2)
    stayed = [name for name, value in weights(model).items() if torch.equal(value, before[name])]
    assert stayed == names


# --- copies -------------------------------------------------------------------------------------


def test_a_copy_of_the_model_is_made_where_all_weights_are():
    """Else it would hold weights that are nowhere: one error that says how. The copy is a model of its own."""
    model, optimizer = streamed(Model())
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\.weight.*host memory.*gathered"):
        copy.deepcopy(model)
    with orlop.gathered(model.parameters()):
        copied = copy.deepcopy(model)
    assert {type(p) for p in copied.parameters()} == {torch.nn.Parameter}
    before = copied(batch(0)).detach()
    assert torch.equal(before, model(batch(0)))
    train(model, optimizer)
    assert torch.equal(copied(batch(0)), before)
    assert not torch.equal(model(batch(0)), before)


def test_parameters_are_pickled_where_their_weights_are():
    """Case C-05: a plain parameter, its gradient's wish and attributes included, that shares memory with none."""
    model, _ = streamed(Model())
    model.blocks[1].bias.requires_grad_(False)
    model.blocks[1].weight.tag = "kept"
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\.weight: .*host memory.*gathered.*state_dict"):
        torch.save(dict(model.named_parameters()), io.BytesIO())
    file = io.BytesIO()
    with orlop.gathered(model):
        torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert {type(p) for p in loaded.values()} == {torch.nn.Parameter}
    assert {name: p.requires_grad for name, p in loaded.items()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }
    assert all(torch.equal(loaded[name].detach().cpu(), value) for name, value in weights(model).items())
    assert vars(loaded["blocks.1.weight"]) == {"tag": "kept"}
    assert loaded["blocks.1.bias"].untyped_storage().nbytes() == 24 * 4


@pytest.mark.parametrize("optimizer", [{"lr": 1e-2}, None], ids=["trained", "evaluated"])
def test_wrapped_models_are_not_pickled(optimizer):
    """One error that says how; unwrapped, the model is any model."""
    model, optimizer = orlop.wrap(Model(), optimizer, {"limits": {"gpu": 4800}})
    for what in (model, model.blocks[1]):
        for context in (contextlib.nullcontext(), orlop.gathered(model)):
            with context, pytest.raises(orlop.UsageError, match=r"state_dict\(\)"):
                torch.save(what, io.BytesIO())
    if optimizer is not None:
        train(model, optimizer, 2)
        optimizer.close()
    orlop.unwrap(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(batch(0)), model(batch(0)))


def test_hooks_of_a_copy_do_nothing():
    model, _ = streamed(Model())
    with orlop.gathered(model):
        copied = copy.deepcopy(model)
    fetches = stream_of(model).fetches
    copied(batch(0)).sum().backward()
    assert stream_of(model).fetches == fetches
    assert all(p.grad is not None for p in copied.parameters())
