"""orlop.AdamW(params, module=model): the update runs under the next forward, and nobody reads half of it."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402


class Model(torch.nn.Module):
    """Blocks large enough that their update takes longer than the call of step()."""

    def __init__(self, width=700, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 8)

    def forward(self, x, skip=()):
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = torch.tanh(block(x))
        return self.out(x)


def losses(step_fn, make, steps=9, between=None):
    model = Model()
    optimizer = make(model)
    result = []
    for step in range(steps):
        x = torch.full((2, 8), 0.1 * (step + 1))
        loss = step_fn(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
        if between and step % 3 == 2:
            between(model, optimizer)
    return result, model, optimizer


def gated(model):
    return orlop.AdamW(model.parameters(), lr=1e-3, module=model)


def plain(model):
    return orlop.AdamW(model.parameters(), lr=1e-3)


def simple(model, x):
    return (model(x) ** 2).mean()


def test_hidden_update_has_the_bits_of_the_plain_one():
    expected, plain_model, _ = losses(simple, plain)
    got, model, optimizer = losses(simple, gated)
    assert got == expected
    optimizer.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: pickle.loads(pickle.dumps(copy.deepcopy(module))),
    ],
    ids=["deepcopy", "pickle", "both"],
)
def test_a_copy_of_the_module_has_whole_weights_and_no_gate(copied):
    _, plain_model, _ = losses(simple, plain, steps=1)
    whole = torch.nn.ModuleList([Model()])
    optimizer = orlop.AdamW(whole.parameters(), lr=1e-3, module=whole[0])
    simple(whole[0], torch.full((2, 8), 0.1)).backward()
    optimizer.step()
    assert optimizer._gate._pending
    model = copied(whole)[0]
    for name, value in plain_model.blocks.state_dict().items():
        assert torch.equal(model.blocks.state_dict()[name], value), name
    simple(whole[0], torch.ones(2, 8)).backward()
    optimizer.step()
    assert optimizer._gate._pending
    model(torch.ones(2, 8))
    model.load_state_dict(model.state_dict())
    assert optimizer._gate._pending, "nobody has waited"
    optimizer.close()


def test_reads_of_the_whole_model_wait():
    """state_dict() of the model, of a block and of the optimizer never mix two versions."""
    _, plain_model, _ = losses(simple, plain, steps=1)
    expected = plain_model.state_dict()
    for read in (
        lambda m, o: m.state_dict(),
        lambda m, o: {f"blocks.3.{k}": v for k, v in m.blocks[3].state_dict().items()},
        lambda m, o: o.state_dict() and dict(m.named_parameters()),
        lambda m, o: o.synchronize() or dict(m.named_parameters()),
    ):
        _, model, optimizer = losses(simple, gated, steps=1)
        for name, value in read(model, optimizer).items():
            assert torch.equal(value, expected[name]), name


def test_evaluation_between_steps():
    """Case M-03: whole, and stopped in the middle by an exception that the user catches."""

    def evaluate(model, _):
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 8))
        handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(torch.ones(1, 8))
        handle.remove()
        model.train()

    assert losses(simple, gated, between=evaluate)[0] == losses(simple, plain)[0]


def test_blocks_that_only_some_batches_use():
    """Case M-02: a skipped block is waited for when it is used again."""

    def some(model, x):
        return (model(x, skip=(1, 3) if int(x[0, 0] * 10) % 3 else ()) ** 2).mean()

    expected, plain_model, _ = losses(some, plain)
    got, model, optimizer = losses(some, gated)
    optimizer.synchronize()
    assert got == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant):
    """Case M-05: recomputation inside backward, both kinds; hooks may fire more than once."""

    def checkpointed(model, x):
        x = model.inp(x)
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        return (model.out(x) ** 2).mean()

    assert losses(checkpointed, gated)[0] == losses(checkpointed, plain)[0]


def test_dropped_gradients_are_free_when_the_next_forward_begins():
    """Their memory is for its activations. What accumulates stays, also where a backward calls forwards of blocks."""
    model = Model(width=16)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-3, module=model)
    slots = list(optimizer._slots.values())

    def backward(step):
        def twice(x):  # the last block again, whose gradients then are sums of two
            x = model(x) @ model.out.weight
            return torch.utils.checkpoint.checkpoint(model.blocks[-1], x, use_reentrant=False)

        (twice(torch.full((2, 8), 0.1 * (step + 1))) ** 2).mean().backward()

    backward(0)
    assert all(slot.stand_in is not None for slot in slots)
    expected = [p.grad.clone() for p in model.parameters()]
    model(torch.ones(2, 8))
    assert all(slot.is_away for slot in slots)  # nobody has dropped them
    model.zero_grad()
    backward(1)
    more = [p.grad.clone() for p in model.parameters()]
    backward(0)
    for p, first, second in zip(model.parameters(), expected, more, strict=True):
        torch.testing.assert_close(p.grad.clone(), first + second)
    model.zero_grad()
    model(torch.ones(2, 8))
    assert all(slot.stand_in is None for slot in slots)


def test_weight_used_outside_of_its_module():
    """Case M-11: a head that multiplies with the embedding's weight."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(50, 300)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(3))

        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = x + block(x)
            return x @ self.embedding.weight.t()

    def run(module):
        model = Tied()
        optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model if module else None)
        result = []
        for step in range(8):
            ids = torch.arange(10) + step
            loss = torch.nn.functional.cross_entropy(model(ids), ids + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    assert run(True) == run(False)


def test_module_called_three_times_per_forward():
    """Case M-16: the gradient of a weight that is used three times."""

    def thrice(model, x):
        x = model.inp(x)
        for _ in range(3):
            x = torch.tanh(model.blocks[0](x))
        return (model.out(x) ** 2).mean()

    def run(make):
        model = Model(blocks=1)
        optimizer = make(model)
        model(torch.ones(1, 8))
        thrice(model, torch.ones(2, 8)).backward()
        return optimizer.gradient(model.blocks[0].weight)

    reference = Model(blocks=1)
    thrice(reference, torch.ones(2, 8)).backward()
    assert torch.equal(run(gated), reference.blocks[0].weight.grad)


class Part(torch.nn.Module):
    """A block whose forward nobody calls."""

    def __init__(self, width, shared):
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(width, width), torch.nn.LayerNorm(width), shared


class Parts(torch.nn.Module):
    """Blocks of several parts, one of which they share."""

    def __init__(self, width=400):
        super().__init__()
        torch.manual_seed(0)
        shared = torch.nn.Linear(width, width)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Part(width, shared) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            for part in (block.a, block.norm, block.b):
                x = torch.tanh(part(x))
        return x


def test_parts_of_blocks_wait_when_they_are_called_alone():
    """No forward of a block tells that its weights are used. Once they are there, parts have no hooks."""

    def hooks(model):
        return [name for name, m in model.named_modules() if m._forward_pre_hooks]

    def run(module):
        model = Parts()
        optimizer = orlop.AdamW(model.parameters(), lr=1e-3, module=model if module else None)
        whole = hooks(model)
        result = []
        for step in range(6):
            loss = (model(torch.full((2, 8), 0.1 * (step + 1))) ** 2).mean()
            assert hooks(model) == whole
            loss.backward()
            optimizer.step()
            if module:
                assert set(hooks(model)) == {name for name, _ in model.named_modules()} - {"blocks"}
            optimizer.zero_grad()
            result.append(loss.item())
        if module:
            optimizer.synchronize()
            assert hooks(model) == whole
        optimizer.close()
        assert hooks(model) == []
        return result

    assert run(True) == run(False)


def test_failed_update_reaches_the_next_forward():
    """The optimizer's thread fails; the forward that needs its weights raises and names the step."""
    import ctypes

    model = Model(width=8)
    optimizer = gated(model)
    simple(model, torch.ones(2, 8)).backward()
    never = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 999)
    slot = optimizer._slots[model.blocks[1].weight]
    address = ctypes.cast(never, ctypes.c_void_p).value
    view, owner = slot.view()
    update = orlop._orlop.TensorUpdate(slot.home.index, view, orlop._orlop.AdamHyper(), address, 0)
    optimizer._native.update([update], 1.0, 7, [owner])
    optimizer._gate.close([slot])
    with pytest.raises(orlop.DeviceError, match=r"step 7.*blocks\.1\.weight.*999"):
        model(torch.ones(1, 8))
    with pytest.raises(orlop.DeviceError, match="step 7"):
        optimizer.step()
