"""orlop.wrap: weights of blocks come and go; training, evaluation and files are those of the plain model."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, STEPS, Model, assert_same, batch, plain, streamed, train, weights  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_with_two_blocks_at_a_time(dtype):
    """Case N-19: offloaded weights change nothing; never more than two blocks are on the device."""
    model, _ = assert_same(make=lambda: Model(dtype=dtype))
    assert stream_of(model).peak_blocks == 2
    assert all(p.untyped_storage().nbytes() == 0 for p in model.blocks.parameters())


def test_a_block_is_one_storage_for_life():
    """Its parameters lie in it as torch's allocator would have placed them."""
    model, optimizer = streamed(Model())
    addresses = {}
    for _ in range(2):
        for index, block in enumerate(model.blocks):
            with orlop.gathered(block):
                storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
                assert len(storages) == 1
                places = [(p.data_ptr() - min(storages), p.nbytes) for p in block.parameters()]
                assert all(begin % 512 == 0 for begin, _ in places)
                assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(sorted(places)))
                assert addresses.setdefault(index, places) == places
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("resident", range(6))
def test_same_bits_for_every_budget(resident):
    """Spare device memory keeps blocks; the result does not depend on it."""
    block = 4 * (24 * 24 + 24)
    expected = train(*plain(Model()))
    limit = 5 * block if resident == 5 else (resident + 2) * block
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2}, config={"limits": {"gpu": limit}})
    assert train(model, optimizer) == expected
    at_rest = {5: 5, 4: 5, 3: 5}.get(resident, resident)  # two for streaming and three more are all of them
    assert len(stream_of(model).resident_blocks()) == at_rest
    assert stream_of(model).peak_blocks * block <= limit


@pytest.mark.parametrize(
    "order",
    [
        lambda step: range(5) if step % 4 in (0, 1) else (0, 2, 4),
        lambda step: (0, 1, 1, 2, 1, 3, 4),
        lambda step: reversed(range(5)) if step % 2 else range(5),
        lambda step: (step % 5,),
    ],
    ids=["skipped", "repeated", "reordered", "one"],
)
def test_blocks_in_any_order(order):
    """Cases M-02, M-16: branches that some batches use, a layer that is used three times."""
    assert_same(forward=lambda model, x, step: model(x, order(step)))


def test_accumulation():
    """Cases N-03, N-21."""

    def run(make):
        model, optimizer = make(Model())
        for step in range(8):
            model(batch(step)).square().mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    a, b = run(plain), run(streamed)
    assert all(torch.allclose(a[name], b[name], atol=1e-6, rtol=1e-5) for name in a)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """Case M-05: both kinds, the bits of the run without."""

    def forward(model, x, _):
        x = model.inp(x)
        x.requires_grad_() if x.is_leaf else None
        for block in model.blocks:
            x = torch.tanh(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)) + x
        return model.out(x)

    assert_same(forward=forward)


def test_evaluation_and_exceptions_between_steps():
    """Case M-03: a pass that is stopped in the middle leaves nothing on the device."""

    def between(model, step):
        if step % 3 != 2:
            return
        model.eval()
        with torch.no_grad():
            model(batch(0))
        handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        for context in (torch.no_grad(), contextlib.nullcontext()):
            with pytest.raises(ZeroDivisionError), context:
                model(batch(0))
        handle.remove()
        assert stream_of(model).resident_blocks() == []
        model.train()

    assert_same(between=between)


def test_block_that_calls_another():
    """Its own weights stay while the other runs, in both passes."""

    class Caller(torch.nn.Module):
        def __init__(self, other):
            super().__init__()
            self.before, self.after = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
            self.other = [other]  # no submodule

        def forward(self, x):
            return self.after(torch.tanh(self.other[0](torch.tanh(self.before(x)))))

    class Calling(Model):
        def __init__(self):
            super().__init__()
            self.blocks[2] = Caller(self.blocks[4])

    assert_same(make=Calling)
    assert_same(make=Calling, forward=lambda model, x, step: model(x, range(4)))


def test_two_backwards_through_one_graph():
    def both(make):
        model, optimizer = make(Model())
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return optimizer.gradient(model.blocks[2].weight)

    torch.testing.assert_close(both(streamed), both(plain))


def test_frozen_and_unfrozen_blocks():
    """Cases M-01, R-14: frozen blocks have no states; one unfreezes later."""

    def forward(model, x, step):
        model.blocks[1].requires_grad_(step >= 4)
        return model(x)

    def make():
        model = Model()
        model.blocks[:3].requires_grad_(False)
        return model

    model, optimizer = assert_same(forward=forward, make=make)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimizer.memory_report()["moments"] == 8 * trainable


def test_inference_needs_no_optimizer():
    """Case R-13: forward only, no states at all."""
    model, optimizer = orlop.wrap(Model())
    assert optimizer is None
    with torch.no_grad():
        assert torch.equal(model(batch(0)), Model()(batch(0)))


def test_weight_reports_itself_while_it_is_away():
    """Cases M-06, M-11: shape, dtype, device and count are true; arithmetic is an error that names it."""
    model, _ = streamed(Model())
    for (name, p), (_, q) in zip(model.named_parameters(), Model().named_parameters(), strict=True):
        assert (p.shape, p.dtype, p.device, p.numel(), p.stride()) == (
            q.shape,
            q.dtype,
            q.device,
            q.numel(),
            q.stride(),
        )
        assert isinstance(p, torch.nn.Parameter)
        if name.startswith("blocks"):
            for use in (lambda p: p * 2, lambda p: p.sum(), lambda p: torch.cat([torch.ones(24), p.flatten()]),
                        lambda p: p.mul_(0.5), lambda p: torch.nn.functional.linear(batch(0), p)):  # fmt: skip
                with pytest.raises(orlop.UsageError, match=rf"{name.replace('.', chr(92) + '.')}.*gathered"):
                    use(p)
    weight = model.blocks[0].weight
    assert "host memory" in repr(weight) and "host memory" in f"{weight}"
    assert (len(weight), weight.type(), weight.is_signed()) == (24, Model().blocks[0].weight.type(), True)
    for made in (torch.zeros_like(weight), weight.new_zeros(24, 24)):
        assert type(made) is torch.Tensor and (made.device, made.dtype) == (weight.device, weight.dtype)
        assert torch.equal(made, torch.zeros(24, 24, device=DEVICE))


def test_a_wrapped_model_can_be_printed():
    """With parameters in containers, which torch prints by asking each for its type, as adapters have."""

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = torch.nn.ParameterDict(
                {"default": torch.nn.Parameter(torch.ones(24, device=DEVICE))}
            )

        def forward(self, x):
            return x * self.scales["default"]

    def make():
        model = Model()
        model.blocks = torch.nn.ModuleList(Part() for _ in range(3))
        return model

    model, _ = orlop.wrap(make(), {"lr": 1e-2})
    assert str(model) == str(make())


def test_gathered_reads_and_edits():
    """Cases B-09, M-12: initialisation and edits inside gathered() are where the next step starts."""
    model, optimizer = streamed(Model())
    reference, reference_optimizer = plain(Model())
    for m in (model, reference):
        context = orlop.gathered(m, write=True) if m is model else contextlib.nullcontext()
        with context, torch.no_grad():
            torch.manual_seed(5)
            for p in m.parameters():
                p.normal_(0, 0.1)
    assert train(model, optimizer, 3) == train(reference, reference_optimizer, 3)
    for m in (model, reference):  # write is noticed, not only asked for
        context = orlop.gathered([m.blocks[1].weight]) if m is model else contextlib.nullcontext()
        with context, torch.no_grad():
            m.blocks[1].weight.mul_(0.5)
    assert train(model, optimizer, 3, first=3) == train(reference, reference_optimizer, 3, first=3)
    assert stream_of(model).resident_blocks() == []


def test_a_section_ends_in_every_model(monkeypatch):
    """Also where that of another model cannot begin or end."""
    (one, _), (other, _) = (streamed(Model()) for _ in range(2))
    first, second = stream_of(one), stream_of(other)

    def fails(*_):
        raise orlop.UsageError("as planned")

    for manager, name in itertools.product((first, second), ("gather", "scatter")):
        with monkeypatch.context() as patch:
            patch.setattr(manager, name, fails)
            parameters = [*one.parameters(), *other.parameters()]
            with pytest.raises(orlop.UsageError, match="as planned"), orlop.gathered(parameters):
                pass
        rest = second if manager is first else first
        assert not any(block.sections for block in rest.blocks)
        for block in manager.blocks:  # of the one that fails itself
            block.sections = 0


def test_penalty_on_weights():
    """Case M-13: the gradient of a term in gathered weights is part of the step."""

    def forward(model, x, _):
        with orlop.gathered([p for p in model.parameters() if p.ndim == 2]):
            penalty = sum((p**2).sum() for p in model.parameters() if p.ndim == 2)
        return torch.cat([model(x).flatten(), (0.1 * penalty).sqrt()[None]])

    assert_same(forward=forward)


def test_embedding_used_by_the_head():
    """Cases M-11, N-16: a tied weight lies outside of the blocks and stays."""

    class Tied(Model):
        def __init__(self):
            super().__init__()
            self.inp = torch.nn.Linear(24, 24)
            self.out = torch.nn.Linear(24, 24)
            self.out.weight = self.inp.weight
            self.blocks[3].weight = self.blocks[1].weight

        def forward(self, x):
            x = torch.nn.functional.pad(x, (0, 16))
            return super().forward(x) @ self.inp.weight

    model, _ = assert_same(make=Tied)
    assert model.out.weight is model.inp.weight and model.blocks[3].weight is model.blocks[1].weight


def test_state_dicts_are_complete():
    """Cases C-05, M-15, N-22: whole tensors in mid-training, loaded by the plain model, and the other way."""
    model, optimizer = streamed(Model())
    train(model, optimizer, 3)
    state = copy.deepcopy(model.state_dict())
    assert all(value.numel() > 0 and type(value) is torch.Tensor for value in state.values())
    reference = Model()
    reference.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(batch(9)), reference(batch(9)))
    fresh, fresh_optimizer = streamed(Model())
    fresh.load_state_dict(state)
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    assert train(fresh, fresh_optimizer, 3, first=3) == train(model, optimizer, 3, first=3)


def test_to_is_a_no_op_with_one_note(caplog):
    """The engine's weights stay; model.to() and half() say so once."""
    from orlop import streamed_parameter

    streamed_parameter._told.clear()
    model, optimizer = streamed(Model())
    before = weights(model)
    model.to(torch.float32).cpu()
    model.blocks.half()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert len([r for r in caplog.records if "stay where they are" in r.message]) == 1
    train(model, optimizer, 1)


def test_torch_optimizer_is_taken_over():
    """Hyperparameters, groups and state of a torch AdamW that has already trained."""
    torch_model = Model()
    theirs = torch.optim.AdamW(torch_model.parameters(), lr=1e-2, weight_decay=0.2)

    def steps(model, optimizer, first):
        for step in range(first, first + 4):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(torch_model, theirs, 0)
    other = copy.deepcopy(torch_model)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.2)
    other_optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    model, optimizer = orlop.wrap(other, other_optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    steps(torch_model, theirs, 4)
    steps(model, optimizer, 4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, torch_model.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_master_and_gradient_within_reach():
    """Case B-08: for weights that are away and for those that stay."""
    model, optimizer = orlop.wrap(Model(dtype=torch.bfloat16), {"lr": 1e-2}, {"limits": {"gpu": 3 * 2 * 600}})
    model(batch(0, torch.bfloat16)).float().square().mean().backward()
    for p in model.parameters():
        assert optimizer.gradient(p).shape == p.shape
        optimizer.set_master(p, torch.full(p.shape, 0.01))
        assert (optimizer.master(p) == torch.tensor(0.01)).all()
    with torch.no_grad():
        assert torch.equal(model.blocks[4].weight, torch.full((24, 24), 0.01, dtype=torch.bfloat16))
        expected = Model(dtype=torch.bfloat16)
        for p in expected.parameters():
            p.fill_(0.01)
        assert torch.equal(model(batch(1, torch.bfloat16)), expected(batch(1, torch.bfloat16)))


def test_gradients_set_to_zero_while_weights_are_away():
    results = []
    for model, optimizer in (streamed(Model()), plain(Model())):
        for step in range(4):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            grads = [p.grad for p in model.parameters()]
            assert all(g is not None and not g.any() for g in grads)
            assert [g.shape for g in grads] == [p.shape for p in model.parameters()]
        results.append(weights(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


class Containers(torch.nn.Module):
    """Blocks in ModuleLists and ModuleDicts of a ModuleList, and once more under another name."""

    def __init__(self, width=24):
        super().__init__()
        torch.manual_seed(0)

        def linear():
            return torch.nn.Linear(width, width)

        self.layers = torch.nn.ModuleList()
        for _ in range(3):
            self.layers.append(torch.nn.ModuleList([linear(), linear()]))
            self.layers.append(torch.nn.ModuleDict({"a": linear(), "b": linear()}))
        self.same = torch.nn.ModuleDict({"layers": self.layers})
        self.to(DEVICE)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            for part in layer.values() if index % 2 else layer:
                x = torch.tanh(part(x)) + x
        return x


@pytest.mark.parametrize("given", [False, True])
def test_blocks_inside_of_containers(given):
    """Nobody calls the forward of a ModuleList: its members are the blocks, each once."""
    results = []
    for wraps in (True, False):
        model = Containers()
        if wraps:
            parts = [part for layer in model.layers for part in layer.children()]
            model, optimizer = orlop.wrap(model, {"lr": 1e-2}, blocks=parts * 2 if given else None)
            sizes = [block.bytes for block in stream_of(model).blocks]
            assert sizes == [4 * (24 * 24 + 24)] * 12
        else:
            optimizer = plain(model)[1]
        for step in range(4):
            model(torch.full((2, 24), 0.1 * (step + 1), device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_two_wrapped_models_in_turn():
    """Case B-07."""
    expected = train(*plain(Model())), train(*plain(Model(blocks=2)))
    one, two = streamed(Model()), streamed(Model(blocks=2))
    losses = [], []
    for step in range(STEPS):
        losses[0].extend(train(*one, steps=1, first=step))
        losses[1].extend(train(*two, steps=1, first=step))
    assert losses == expected
