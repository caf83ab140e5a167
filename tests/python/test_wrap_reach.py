"""Weights of a wrapped model that are reached from outside of their block's forward and the backward of its output:
tensors that share their memory, graphs that nobody announces. On a GPU with ORLOP_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import dataclasses
import io

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model, assert_same, batch, plain, streamed, train, weights  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

pytestmark = pytest.mark.any_device

needs_use_counts = pytest.mark.skipif(
    not hasattr(torch.Tensor, "_use_count"), reason="this torch does not tell who uses a tensor"
)


class Scaled(torch.autograd.Function):
    """x * weight; its backward fails, where the product itself would end the process, once the weight is away."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        assert weight.untyped_storage().nbytes() > 0, "the weights are away"
        return gradient * weight, (gradient * x).sum(0)


class Gated(torch.nn.Linear):
    def __init__(self, width=24):
        super().__init__(width, width)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        return Scaled.apply(super().forward(x), self.scale)


def with_blocks(kind, **rest):
    model = Model(**rest)
    for index in range(len(model.blocks)):
        torch.manual_seed(index)
        model.blocks[index] = kind()
    return model.to(DEVICE)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(model, reference):
    wanted = gradients(reference)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name


# --- tensors that are kept ----------------------------------------------------------------------


def details(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def one_graph_alive(model):
    model.graph = model(batch(9)).square().mean()
    return details(model)


@pytest.mark.parametrize("keep", [torch.nn.Module.state_dict, details, one_graph_alive])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", [True, False])
def test_what_is_kept_of_gathered_weights_stays_valid(keep, grad, write):
    """Case M-11: it has the values of then, through passes and steps; the block has a memory of its own."""
    model, optimizer = streamed(Model())
    reference, reference_optimizer = plain(Model())
    before = weights(model)
    with torch.set_grad_enabled(grad), orlop.gathered(model, write=write):
        kept = keep(model)
    inside = [kept[name] for name in before if "blocks" in name]
    assert all(value.untyped_storage().nbytes() > 0 for value in inside)
    assert train(model, optimizer, 3) == train(reference, reference_optimizer, 3)
    assert all(value.untyped_storage().nbytes() > 0 for value in inside)
    assert all(torch.equal(kept[name].cpu(), before[name]) for name in before if "blocks" in name)
    file = io.BytesIO()
    torch.save(kept, file)
    model.__dict__.pop("graph", None)
    model(batch(4)).sum().backward()
    optimizer.zero_grad()
    assert stream_of(model).resident_blocks() == []
    with orlop.gathered(model.blocks[1]):
        assert model.blocks[1].weight.data_ptr() != kept["blocks.1.weight"].data_ptr()


@pytest.mark.parametrize("grad", [True, False])
def test_kept_between_forward_and_backward(grad):
    """The graph that is alive has its weights, too."""
    model, optimizer = streamed(Model())
    reference, _ = plain(Model())
    loss = model(batch(0)).square().mean()
    with torch.set_grad_enabled(grad), orlop.gathered(model):
        kept = details(model)
    assert all(value.untyped_storage().nbytes() > 0 for value in kept.values())
    loss.backward()
    reference(batch(0)).square().mean().backward()
    assert_same_gradients(model, reference)
    optimizer.step()
    del loss
    assert all(value.untyped_storage().nbytes() > 0 for value in kept.values())
    assert all(torch.equal(kept[name], p) for name, p in reference.named_parameters() if "blocks" in name)


@pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="this torch does not tell")
def test_a_section_that_keeps_nothing_takes_no_other_memory():
    model, optimizer = streamed(Model())
    storage = stream_of(model).blocks[1].storage
    loss = model(batch(0)).square().mean()
    for _ in range(2):
        with torch.no_grad(), orlop.gathered(model):
            norm = model.blocks[1].weight.norm().item()
    assert norm > 0 and stream_of(model).resident_blocks() == []
    loss.backward()
    optimizer.step()
    assert stream_of(model).blocks[1].storage is storage


class Reveals(torch.nn.Linear):
    def __init__(self):
        super().__init__(24, 24)

    def forward(self, x):
        self.last = self.weight[2:4].detach()
        return super().forward(x), self.weight[:2]


class Revealed(Model):
    def __init__(self):
        super().__init__()
        self.blocks[2] = Reveals().to(DEVICE)

    def forward(self, x):
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index == 2:
                y, rows = block(x)
                there = [part.untyped_storage().nbytes() > 0 for part in (rows, block.last)]
                assert there == [True, True]
                x = torch.tanh(y) + x * rows.sum(0) * block.last.mean()
            else:
                x = torch.tanh(block(x)) + x
        return self.out(x)


def test_weights_in_the_output_of_a_block():
    """Case M-11: a part of them that the caller uses, by itself or from an attribute."""
    model, _ = assert_same(make=Revealed)
    reference = Revealed()
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch(0)), reference(batch(0)))


# --- sections without steps ---------------------------------------------------------------------


@needs_use_counts
@pytest.mark.parametrize("optimizer", [{"lr": 1e-2}, None], ids=["unstepped", "without"])
def test_reading_without_a_step_leaves_nothing_on_the_device(optimizer):
    """Case M-12: with gradients enabled, and whatever was computed."""
    model, _ = orlop.wrap(Model(), optimizer, {"limits": {"gpu": 4800}})
    for block in model.blocks:
        with orlop.gathered(block):
            assert (block.weight.square().sum() + block.bias.sum()).item() > 0
        assert stream_of(model).resident_blocks() == []


@needs_use_counts
def test_a_graph_of_gathered_weights_keeps_its_block():
    """As long as it is there, over other backwards and passes."""
    model, _ = orlop.wrap(Model(), config={"limits": {"gpu": 4800}})
    weight = model.blocks[1].weight
    before = weights(model)["blocks.1.weight"]
    with orlop.gathered(model.blocks[1]):
        penalty = (weight**3).sum()
    model(batch(0)).sum().backward()
    assert stream_of(model).resident_blocks() == [1]
    model.zero_grad()
    penalty.backward()
    assert torch.equal(weight.grad.cpu(), 3 * before**2)
    del penalty
    with torch.no_grad():
        model(batch(0))
    assert stream_of(model).resident_blocks() == []


def test_a_graph_of_gathered_weights_that_outlives_a_step_says_so():
    """As in plain PyTorch, where the step has changed what the graph has saved; frozen weights are not there, either."""
    model = Model()
    model.blocks[1].bias.requires_grad_(False)
    model, optimizer = streamed(model)
    x = torch.ones(24, device=DEVICE, requires_grad=True)
    with orlop.gathered(model.blocks[1]):
        late = [(model.blocks[1].weight ** 3).sum(), (model.blocks[1].bias * x).sum()]
    versions = [p._version for p in model.blocks[1].parameters()]
    train(model, optimizer, 1)
    assert all(p._version > v for p, v in zip(model.blocks[1].parameters(), versions, strict=True))
    assert stream_of(model).resident_blocks() == []
    for graph in late:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


# --- graphs that nobody announces ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [Gated, lambda: torch.nn.Linear(24, 24)])
def test_backward_of_a_backward(kind):
    """Case M-13: a penalty on the gradient of the input."""

    def forward(model, x, _):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        assert all(p.untyped_storage().nbytes() > 0 for p in model.blocks.parameters())
        return gradient

    assert_same(forward=forward, make=lambda: with_blocks(kind))


class Balanced(Gated):
    """Leaves a loss of its own in an attribute, as mixtures of experts do."""

    def __init__(self, where):
        super().__init__()
        self.aux, self.kept, self.where = None, [], where

    def forward(self, x):
        y = super().forward(x)
        aux = Scaled.apply(y, self.scale).square().mean()
        if self.where == "attribute":
            self.aux = aux
        elif self.where == "list":
            self.kept[:] = [{"aux": aux}]
        elif self.where == "new":
            self.__dict__["later"] = aux
        else:
            self._buffers["buffer"] = aux
        return y

    def loss(self):
        if self.where == "list":
            return self.kept[0]["aux"]
        return {"attribute": self.aux, "new": vars(self).get("later")}.get(
            self.where, self._buffers.get("buffer")
        )


class Inside(torch.nn.Module):
    def __init__(self, where):
        super().__init__()
        self.inner = torch.nn.Sequential(Balanced(where), torch.nn.Tanh())

    def forward(self, x):
        self.seen = x  # what others have made begins nobody's backward here
        return self.inner(x)

    def loss(self):
        return self.inner[0].loss()


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("where", ["attribute", "list", "new", "buffer"])
def test_losses_in_attributes(where, inside):
    """Case M-13."""

    def forward(model, x, step):
        y = model(x)
        aux = 0.1 * sum(block.loss() for block in model.blocks)
        if step % 3 == 2:
            aux.backward(retain_graph=True)
        return torch.cat([y.flatten(), aux.sqrt()[None]])

    kind = Inside if inside else Balanced
    assert_same(forward=forward, make=lambda: with_blocks(lambda: kind(where)))


def leave_loss(module, _, output):
    if hasattr(module, "extra"):
        module.extra.holder.aux = Scaled.apply(output, module.scale).square().mean()


def test_losses_of_modules_that_come_later():
    """What a block consists of may change while it is wrapped."""
    model, reference = with_blocks(Gated), with_blocks(Gated)
    for m in (model, reference):
        m.blocks[1].register_forward_hook(leave_loss)
    model, _ = streamed(model)
    for m in (model, reference):
        m(batch(0)).square().mean().backward()
        m.zero_grad()
        m.blocks[1].extra = torch.nn.Sequential()
        m.blocks[1].extra.holder = torch.nn.Module()
        y = m(batch(0))
        m.blocks[1].extra.holder.aux.backward(retain_graph=True)
        y.square().mean().backward()
    assert_same_gradients(model, reference)


class Hides:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Holds:
    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Record:
    value: object


class Packs(Gated):
    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, x):
        return self.pack(super().forward(x))


PACKS = {
    "mixed": (lambda y: (y.detach(), Hides(y)), lambda out: out[1].hidden),
    "function": (lambda y: {"call": lambda: y, "n": 3}, lambda out: out["call"]()),
    "object": (lambda y: (y.detach(), Holds([y])), lambda out: out[1].value[0]),
    "record": (lambda y: Record(Hides(y)), lambda out: out.value.hidden),
    "number": (lambda y: (y, 3, None, "text", torch.float32), lambda out: out[0]),
}


@pytest.mark.parametrize("how", PACKS)
def test_outputs_that_hide_their_graph(how):
    """Their block stays for the backward; one whose tensors can be found does not."""
    pack, unpack = PACKS[how]
    here = []

    def forward(model, x, _):
        x = model.inp(x)
        for block in model.blocks:
            x = torch.tanh(unpack(block(x))) + x
        here.append([block.weight.untyped_storage().nbytes() > 0 for block in model.blocks])
        return model.out(x)

    reference, reference_optimizer = plain(with_blocks(lambda: Packs(pack)))
    expected = train(reference, reference_optimizer, forward=forward)
    model, optimizer = streamed(with_blocks(lambda: Packs(pack)))
    assert train(model, optimizer, forward=forward) == expected
    stays = how not in ("object", "number")
    assert here[-1] == [stays] * 5 if stays else not all(here[-1])
    if hasattr(torch.Tensor, "_use_count"):
        stream_of(model).end_pass()
        assert stream_of(model).resident_blocks() == []


class Calls(Gated):
    """Its output is that of another block."""

    def __init__(self, other=None):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        x = torch.tanh(super().forward(x))
        return x if self.other[0] is None else self.other[0](x)


def test_block_that_returns_what_another_returned():
    def calling():
        model = with_blocks(Calls)
        model.blocks[4].other = [model.blocks[1]]
        return model

    assert_same(forward=lambda model, x, _: model(x, [0, 2, 3, 4]), make=calling)


class Through(Gated):
    def forward(self, x):
        x, first = x if isinstance(x, tuple) else (x, None)
        y = super().forward(x)
        return y, (torch.tanh(Scaled.apply(y, self.scale)) if first is None else first)


def test_tensor_that_passes_through_all_blocks():
    """Its backward is that of the block that made it."""

    def forward(model, x, _):
        x = model.inp(x)
        for block in model.blocks:
            x = block(x)
        return model.out(x[0] + x[1])

    assert_same(forward=forward, make=lambda: with_blocks(Through))
