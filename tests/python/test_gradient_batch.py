"""Which gradients leave together, and when, with a host link in the place of the CUDA one."""

from __future__ import annotations

import collections
import ctypes
import itertools
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import orlop  # noqa: E402
from host_link import WAIT, HostLink, HostStates  # noqa: E402
from orlop import device_link, gradient_batch  # noqa: E402
from orlop.device_link import DeviceLink, LeavingBatch  # noqa: E402
from orlop.optimizer_slot import Slot  # noqa: E402
from orlop.state_home import last_at_work  # noqa: E402

WIDTH = 40
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
STATES_BYTES = 3 * BLOCK_BYTES  # moments and gradient of a block
ALL = 1 << 30  # bytes that no backward here has


class Stack(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def open_optimizer(model, states="auto"):
    """With the only link of its parameters."""
    optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model, states=states)
    (link,) = optimizer._links.values()
    return optimizer, link


def count_first(monkeypatch, owner, name):
    """The length of the first argument of every call of a method, in a list that grows."""
    lengths, method = [], getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda first, *rest: (lengths.append(len(first)), method(first, *rest))[1]
    )
    return lengths


def train(model, optimizer, counts):
    """Norms of steps of so many micro-batches each, and the weights after them."""
    norms = []
    for count in counts:
        for _ in range(count):
            model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    optimizer.close()
    return norms, [p.detach().clone() for p in model.parameters()]


def equal(results, others):
    (norms, weights), (other_norms, other_weights) = results, others
    return norms == other_norms and all(
        torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)
    )


def test_squares_are_summed_with_what_leaves(away, monkeypatch):
    """On the device; where that has no part of Orlop, by the optimizer's thread: the same norm."""

    def run(available, least):
        monkeypatch.setattr(HostStates, "is_available", available)
        monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", least)
        model = Stack(3)
        optimizer, link = open_optimizer(model)
        calls = count_first(monkeypatch, link.states, "square_sums")
        return train(model, optimizer, (1, 1, 2)), calls

    expected, calls = run(True, ALL)
    assert calls == [6] * 3  # the second of two micro-batches is added on the host
    for available, least, wanted in ((True, 1, [2, 2, 2] * 3), (False, 1, [])):
        results, calls = run(available, least)
        assert calls == wanted
        assert equal(results, expected)


def test_small_blocks_leave_together(away, monkeypatch):
    """Until they are enough, the last ones when the backward ends; a block of which some parameters got no gradient
    too. The bits do not depend on it."""

    def run(least):
        monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", least)
        model = Stack(5)
        for layer in list(model.layers)[:2]:
            layer.unused = torch.nn.Parameter(torch.ones(1))
        optimizer, link = open_optimizer(model)
        left = count_first(monkeypatch, link, "offload")
        return train(model, optimizer, (1, 3, 3, 2)), left

    expected, left = run(1)
    assert left[:5] == [2] * 5
    for least, wanted in ((BLOCK_BYTES + 1, [4, 4, 2]), (ALL, [10])):
        results, left = run(least)
        assert left[: len(wanted)] == wanted
        assert equal(results, expected)


def test_gradients_that_stay_are_taken_at_the_end(away, monkeypatch):
    """With their states on the device, in steps of one micro-batch as far as the step before tells, they wait for the
    end of the backward. Sums are begun and added to while it runs, and gradients that leave do not wait for others."""
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", 1)
    counts = (1, 1, 2, 2, 1, 1)
    sum_bytes = 2 * BLOCK_BYTES  # more than enough for the sums of a block

    def run(blocks):
        monkeypatch.setattr(HostLink, "room_bytes", blocks * (STATES_BYTES + sum_bytes))
        model = Stack(4)
        optimizer, _ = open_optimizer(model, blocks * STATES_BYTES)
        taken = count_first(monkeypatch, gradient_batch, "take")
        return train(model, optimizer, counts), taken

    expected, each = run(0)
    assert each == [2] * 4 * sum(counts)
    results, taken = run(4)
    assert equal(results, expected)
    assert taken == [2] * 4 + [8] + ([8] + [2] * 4) + [2] * 12 + [8]
    results, taken = run(2)  # those of the first blocks, whose gradients come last
    assert equal(results, expected)
    assert taken == [2] * 4 + [2, 2, 4] + ([2, 2, 4] + [2] * 4) + [2] * 12 + [2, 2, 4]


class Between(Stack):
    """Blocks between two layers that are outside of them."""

    def __init__(self):
        super().__init__(2)
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (False, True))

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


def test_units_leave_when_they_are_complete(away, monkeypatch):
    """In the first backward, which tells their order, and in all others: the last layer before any block."""
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", 1)
    model = Between()
    optimizer, link = open_optimizer(model)
    names = {optimizer._slots[p].home: name for name, p in model.named_parameters()}
    left, offload = [], link.offload
    monkeypatch.setattr(
        link, "offload", lambda grads, homes, sums: (left.append(homes), offload(grads, homes, sums))[1]
    )
    for _ in range(3):
        left.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        assert [{names[home].rpartition(".")[0] for home in homes} for homes in left] == [
            {"last"}, {"layers.1"}, {"layers.0"}, {"first"}
        ]  # fmt: skip
        assert [len(homes) for homes in left] == [2, 2, 2, 1]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


class Shared(Stack):
    """Weights of which autograd writes the gradient several times in one backward: inside of checkpoints, of the blocks
    in this order, and outside; after some forwards with each block once."""

    def __init__(self, order=(1, 0), checkpointed=True, complete=True, once=0):
        super().__init__(2)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        if not complete:
            self.layers[0].unused = torch.nn.Parameter(torch.ones(1))
        self.order, self.checkpointed, self.once = order, checkpointed, once

    def forward(self, x):
        x.requires_grad_()
        self.once -= 1
        for index in (1, 0) if self.once >= 0 else self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpointed else layer(x)
        return self.last(x if self.once >= 0 else self.layers[0](x))


def train_shared(monkeypatch, least, dtype, room=0, **kwargs):
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", least)
    monkeypatch.setattr(HostLink, "room_bytes", room)
    model = Shared(**kwargs).to(dtype)
    optimizer, _ = open_optimizer(model)
    torch.set_default_dtype(dtype)
    try:
        return train(model, optimizer, (1, 1, 1))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_second_gradient_in_one_backward(away, monkeypatch):
    """Whether the first has left or waits for the rest of its block, their sum is rounded once."""

    def run(least, dtype, checkpointed=True):
        return train_shared(monkeypatch, least, dtype, complete=False, checkpointed=checkpointed)

    pairs = zip(run(ALL, torch.float32)[1], run(ALL, torch.float32, False)[1], strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert equal(run(1, torch.bfloat16), run(ALL, torch.bfloat16))


@pytest.mark.parametrize("once", [0, 2])
def test_a_third_gradient_in_one_backward(away, monkeypatch, once):
    """Their sum has the same roundings wherever states live; also where there are three for the first time when the
    states are on the device."""
    on_host, on_device = (
        train_shared(monkeypatch, 1, torch.bfloat16, room, order=(0, 1, 0), once=once) for room in (0, ALL)
    )
    assert equal(on_host, on_device)


def test_autograd_adds_to_what_stands(away, monkeypatch):
    """The gradient of a micro-batch after the first. The first finds nothing, and no hook is called before it."""
    calls, accumulate = [], Slot.accumulate
    monkeypatch.setattr(Slot, "accumulate", lambda self, *args: (calls.append(1), accumulate(self, *args))[1])
    model = Stack(3)
    optimizer, _ = open_optimizer(model)
    assert not any(p._backward_hooks for p in model.parameters())

    def backward():
        calls.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        return len(calls)

    assert [backward(), backward(), backward()] == [0, 6, 6]
    optimizer.step()
    optimizer.zero_grad()
    assert [backward(), backward()] == [0, 6]
    optimizer.step()
    model.zero_grad()  # seen when the forward of a block begins
    assert [backward(), backward()] == [0, 6]
    optimizer.close()


def test_what_leaves_waits_for_the_last_update_that_reads_it(away, monkeypatch):
    """Of all gradients that leave together, in whatever order: here no forward has waited for the updates."""
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", ALL)
    params = [torch.nn.Parameter(torch.ones(size)) for size in (1 << 20, 8, 1 << 20)]
    model = torch.nn.ParameterList(params)
    optimizer, link = open_optimizer(model)
    left = count_first(monkeypatch, link, "offload")
    for _ in range(4):
        sum(p.sum() for p in params).backward()
        optimizer.step()
        jobs = [optimizer._slots[p].home for p in params]
        for homes in itertools.permutations(jobs):
            assert last_at_work(list(homes)) is jobs[2]
        optimizer.zero_grad()
    assert left == [3] * 4
    optimizer.close()


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.data.mul_(0.5),
        lambda g: setattr(g, "data", g * min(1.0, 1.0 / float(g.norm()))),
        lambda g: (g.add_(1.0), g.clamp_(-0.5, 0.5)),
    ],
    ids=["clamp", "data", "set_data", "twice"],
)
def test_a_gradient_is_edited_while_others_of_its_unit_come(away, monkeypatch, edit):
    """By a hook, in each micro-batch: what it finds is the sum so far, and what it leaves counts."""
    monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", ALL)
    results = []
    for make in (torch.optim.AdamW, orlop.AdamW):
        model = Stack(2)
        optimizer = make(model.parameters(), lr=1e-2)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: [edit(p.grad)].clear())
        torch.manual_seed(2)
        for count in (1, 3, 2):
            for _ in range(count):
                model(torch.randn(4, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    optimizer.close()


class Stamps:
    """torch.cuda.Event as far as LeavingBatch goes."""

    def __init__(self, blocking):
        self.cuda_event = id(self)
        self.records = 0

    def record(self, _stream):
        self.records += 1


@pytest.fixture
def recorded(monkeypatch):
    """What DeviceLink has been told to record again, call by call, where nothing is issued."""
    events = []
    native = SimpleNamespace(bytes=8, offload=lambda *args: events.append(args[8] if len(args) > 8 else None))
    monkeypatch.setattr(device_link._orlop, "GradientBatch", lambda targets: native)
    monkeypatch.setattr(device_link, "has_cuda_part", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Stamps)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    return events


def test_an_event_is_recorded_again_only_behind_an_open_gate(recorded):
    """Behind a closed one the optimizer's thread may still have to wait for it, and the copies for that thread."""
    link = SimpleNamespace(device=torch.device("cuda", 0), down=None, down_address=9)
    batch = LeavingBatch([object()])
    opened, closed = device_link._OPEN, (1234, 5)
    gates = (opened, opened, closed, closed, opened)
    arrivals = [batch.offload(link, [torch.ones(2)], gate, None) for gate in gates]
    first, second, third = arrivals[0], arrivals[2], arrivals[3]
    assert arrivals == [first, first, second, third, third]
    assert len({id(arrival) for arrival in arrivals}) == 3
    assert recorded == [None, first.cuda_event, None, None, third.cuda_event]
    assert [event.records for event in (first, second, third)] == [1, 1, 1]


def test_an_update_that_is_half_done_may_still_wait_for_the_event(away, monkeypatch, recorded):
    """The next gradients of two tensors leave while the first is written, and the second's turn has not come."""
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    model = torch.nn.ParameterList(params)
    optimizer, host_link = open_optimizer(model)
    sum(p.sum() for p in params).backward()
    turns, go_on = [], threading.Event()

    @WAIT
    def wait(_):
        turns.append(1)
        return 0 if len(turns) == 1 or go_on.wait(30) else 1

    fence = ctypes.cast(wait, ctypes.c_void_p).value, 0
    monkeypatch.setattr(host_link, "fence", lambda _: fence)
    optimizer.step()
    homes = [optimizer._slots[p].home for p in params]
    homes[0].native.wait([homes[0].index])

    link = DeviceLink.__new__(DeviceLink)
    link.device, link._index, link.down, link.down_address = torch.device("cuda", 0), 0, None, 9
    link._leaving, link._leaving_bytes, link._batches = collections.deque(), 0, {}
    link._gates = {home.version_address: 1234 for home in homes}
    grads = [torch.ones(8) for _ in params]
    first, second = (link.offload(grads, homes) for _ in range(2))
    assert first is not second
    go_on.set()
    optimizer.synchronize()
    assert link.offload(grads, homes) is second
    assert recorded == [None, None, second.cuda_event]
    optimizer.close()
