"""The copies between a device and the optimizer's memory, with a host link in the place of the CUDA one."""

from __future__ import annotations

import collections
import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from adam_reference import Reference, masters_of_written, rounded  # noqa: E402
from host_link import HostLink  # noqa: E402
from orlop import adam_slots, device_link  # noqa: E402
from orlop.device_link import DeviceLink  # noqa: E402


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
@pytest.mark.parametrize(
    ("gradients", "counts", "room"),
    [
        ("stay", [1, 3, 2], 0),
        ("auto", [1] * 4, 0),
        ("auto", [3, 3, 5, 2, 1, 1, 4], 0),
        ("auto", [3, 3, 5, 2, 1, 1, 4], 1 << 20),
        ("auto", [3, 3, 5, 2, 1, 1, 4], 4 * (9 * 7 + 100)),
    ],
    ids=["stay", "single", "host-sums", "device-sums", "both-sums"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_and_weights_equal_the_formula(away, monkeypatch, dtype, gradients, counts, room, hidden):
    """Case N-09: after each step the weights are the rounded masters, all elements. Micro-batches are summed in
    fp32 and rounded once, wherever that happens and however their number changes from step to step."""
    monkeypatch.setattr(HostLink, "room_bytes", room)
    torch.manual_seed(3)
    model = torch.nn.ModuleList([torch.nn.Linear(9, 7), torch.nn.Linear(130, 3)]).to(dtype)
    params = list(model.parameters())
    references = [Reference(p) for p in params]
    optimizer = orlop.AdamW(params, lr=1e-2, gradients=gradients, module=model if hidden else None)
    for count in counts:
        sums = [torch.zeros(p.shape) for p in params]
        for _ in range(count):
            targets = [torch.randn(p.shape).to(dtype) for p in params]
            sum((p * t).sum() for p, t in zip(params, targets, strict=True)).backward()
            for i, t in enumerate(targets):
                sums[i] += t.float()
        if gradients == "auto":
            assert all(type(p.grad).__name__ == "OffloadedGradient" for p in params)
        else:
            sums = [p.grad.clone() for p in params]
        for gradient, reference in zip(sums, references, strict=True):
            reference.step(gradient.to(dtype), 1e-2)
        optimizer.step()
        optimizer.synchronize()
        if gradients == "stay":
            assert all(type(p.grad) is torch.Tensor for p in params)
        optimizer.zero_grad()
        for p, reference in zip(params, references, strict=True):
            assert torch.equal(optimizer.master(p).flatten(), torch.from_numpy(reference.p))
            assert torch.equal(p.detach().flatten(), rounded(reference.p, dtype))
    optimizer.close()


@pytest.mark.parametrize("room", [0, 1 << 20], ids=["host", "device"])
def test_sums_on_the_device_leave_once(away, monkeypatch, room):
    """From the second step on one copy of each gradient leaves, inside the backward that was the last one before."""
    monkeypatch.setattr(HostLink, "room_bytes", room)
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in [(7,), (130, 3)]]
    optimizer = orlop.AdamW(params, lr=0.1, states="host")
    (link,) = optimizer._links.values()
    offloads = []
    for count in [3, 3, 3, 5, 2, 2, 1]:
        before = link.offloads
        for _ in range(count):
            sum(p.sum() for p in params).backward()
        in_backward = link.offloads - before
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        offloads.append((in_backward, link.offloads - before - in_backward))
    optimizer.synchronize()
    expected = [(2, 2), (2, 0), (2, 0), (2, 2), (0, 2), (2, 0), (0, 2)] if room else [
        (2 * count, 0) for count in [3, 3, 3, 5, 2, 2, 1]
    ]  # fmt: skip
    assert offloads == expected
    size = 4 * (7 + 130 * 3)
    report = optimizer.memory_report()
    assert (report.get("gradient sums on cpu"), report.get("gradient sums")) == (
        (size, None) if room else (None, size)
    )
    optimizer.close()


@pytest.mark.parametrize("room", [0, 1 << 20], ids=["host", "device"])
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 3, 2, 4]], ids=["single", "accumulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_weights_and_gradients(away, monkeypatch, dtype, counts, room):
    """Gradients, sums and states keep the order of the weights' memory: the same bits as a contiguous run, for weights
    in other layouts and gradients that come in another one than theirs."""
    monkeypatch.setattr(HostLink, "room_bytes", room)

    def run(layout):
        torch.manual_seed(2)
        params = [torch.nn.Parameter(layout(torch.randn(2, 3, 4, 5).to(dtype))) for _ in range(2)]
        optimizer = orlop.AdamW(params, lr=1e-2)
        for count in counts:
            for _ in range(count):
                targets = [torch.randn(2, 3, 4, 5).to(dtype) for _ in params]
                sum((p * t).sum() for p, t in zip(params, targets, strict=True)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            read = [p.grad.clone() for p in params]
            optimizer.zero_grad()
        optimizer.synchronize()
        weights = [p.detach().clone() for p in params]
        masters = [optimizer.master(p) for p in params]
        optimizer.close()
        return weights, masters, read

    def channels_last(x):
        return x.to(memory_format=torch.channels_last)

    def permuted(x):
        return x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)

    expected = run(torch.Tensor.contiguous)
    for layout in (channels_last, permuted):
        for got, wanted in zip(run(layout), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("gradients", ["auto", "stay"])
def test_memory_of_gradients_is_let_go(away, gradients):
    """With the end of a backward, and of the call that copies those that stay."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in [(7,), (130, 3)]]
    optimizer = orlop.AdamW(params, lr=0.1, gradients=gradients)
    (link,) = optimizer._links.values()
    for step in range(1, 3):
        sum(p.sum() for p in params).backward()
        left = 2 * step if gradients == "auto" else 2 * (step - 1)
        assert (link.offloads, link.let_go_at) == (left, left)
        optimizer.step()
        assert (link.offloads, link.let_go_at) == (2 * step, 2 * step)
        optimizer.zero_grad()
    optimizer.close()


def test_gradients_without_hooks_leave(away):
    """Of a parameter that was frozen when its states were loaded: the first gradient is taken by whoever asks for the
    norm, what the next backward adds to it by that backward."""
    p = torch.nn.Parameter(torch.ones(7))
    before = orlop.AdamW([p], lr=0.1)
    p.sum().backward()
    before.step()
    saved = before.state_dict()
    before.close()
    optimizer = orlop.AdamW([p.requires_grad_(False)], lr=0.1)
    optimizer.load_state_dict(saved)
    (link,) = optimizer._links.values()
    p.requires_grad_().sum().backward()
    assert link.offloads == 0
    optimizer.clip_grad_norm_(1e9)
    assert link.offloads == 1
    p.sum().backward()
    assert link.offloads == 2
    optimizer.close()


def test_a_stand_in_that_nobody_kept_serves_again(away):
    """One that somebody has kept never becomes the next gradient: reading it says that its own is gone."""
    p = torch.nn.Parameter(torch.ones(50))
    optimizer = orlop.AdamW([p], lr=0.1)

    def backward(value):
        (p * value).sum().backward()
        return p.grad

    made = id(backward(1.0))
    optimizer.step()
    p.grad = None
    reuses = hasattr(torch.Tensor, "_use_count")
    kept = backward(2.0)
    assert (id(kept) == made) == reuses
    optimizer.step()
    optimizer.zero_grad()
    hidden = [backward(3.0)]
    assert hidden[0] is not kept
    with pytest.raises(orlop.UsageError, match="earlier backward"):
        kept.clone()
    assert torch.equal(hidden[0].clone(), torch.full((50,), 3.0))
    assert backward(1.0) is not hidden[0]  # accumulated
    with pytest.raises(orlop.UsageError, match="earlier backward"):
        hidden[0].clone()
    assert torch.equal(optimizer.gradient(p), torch.full((50,), 4.0))
    optimizer.close()


def test_streams_wait_for_gates_that_are_closed_alone():
    """A wait of a stream is a call of the driver, which most blocks can do without."""
    word = ctypes.c_uint32(4)
    home = SimpleNamespace(version_address=ctypes.addressof(word))
    link = DeviceLink.__new__(DeviceLink)
    link._gates = {home.version_address: 1234}  # its address on the device
    assert [link._gate(home, version) for version in (0, 4, 5)] == [(0, 0), (0, 0), (1234, 5)]
    word.value = 0x7FFFFFFF  # the update has failed: whoever waits goes on and is told elsewhere
    assert link._gate(home, 5) == (0, 0)


@pytest.mark.parametrize(
    ("leaving", "asks", "left", "waits"),
    [
        ([(True, 1), (True, 1)], False, (2, 2), 0),  # few: nobody asks
        ([(True, 1), (False, 1)], True, (1, 1), 0),  # the end of a backward
        ([(True, 60), (False, 60)], False, (1, 60), 0),  # many: those that have left are free
        ([(False, 600), (False, 400), (False, 100)], False, (2, 500), 1),  # too many: the first is waited for
        ([(False, 600), (False, 500), (False, 2000)], False, (1, 2000), 2),  # the last is not
    ],
)
@pytest.mark.parametrize("of_earlier", [False, True])
def test_gradients_on_their_way_are_bounded(monkeypatch, leaving, asks, left, waits, of_earlier):
    """MiB on the device, and whether they have left. The stream that has written gradients waits, with no thread of the
    host; a thread waits where torch has to see itself that the memory is free, after the end of their backward."""
    waited = []

    def event(done):
        return SimpleNamespace(query=lambda: done, synchronize=lambda: waited.append("thread"))

    stream = SimpleNamespace(wait_event=lambda _: waited.append("stream"))
    monkeypatch.setattr(device_link, "stream_at", lambda address, _: stream if address == 7 else None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    link = DeviceLink.__new__(DeviceLink)
    link.device, link._index = torch.device("cuda", 0), 0
    link._leaving, link._leaving_bytes = collections.deque(), 0
    for done, mib in leaving:
        link._leaves(event(done), mib << 20, [] if of_earlier else [torch.ones(1)])
    link._bound_leaving(asks)
    assert (len(link._leaving), link._leaving_bytes / (1 << 20)) == left
    assert waited == ["thread" if of_earlier else "stream"] * waits


def test_room_on_a_device_is_what_the_highest_use_leaves(monkeypatch):
    """Asked with a limit and without; what was taken counts once, whether it was in use at the peak or not."""
    from orlop.device_room import DeviceRoom

    gib = 1 << 30
    highest = 10 * gib
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: highest)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 12 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * gib, 40 * gib))
    room = DeviceRoom(torch.device("cuda"), 24 * gib)
    assert not room.take(13 * gib + 1)  # 24 less the peak of 10 less a reserve of 1
    assert room.take(8 * gib)
    assert room.take(3 * gib)
    highest = 21 * gib  # the peak and what was taken
    assert not room.take(2 * gib + 1)
    highest = 22 * gib
    assert not room.take(gib + 1)
    assert room.take(gib)
    room.give(4 * gib)  # the highest use had them beside it
    assert not room.take(4 * gib + 1)
    assert room.take(4 * gib)
    room.clear()
    highest = 22 * gib
    assert not DeviceRoom(torch.device("cuda"), 1 << 50).take(32 * gib - 2 * gib - gib - 22 * gib + 1)
    assert DeviceRoom(torch.device("cuda")).take(32 * gib - 2 * gib - gib - 22 * gib)
    assert not DeviceRoom(torch.device("cuda"), 0).take(1)


@pytest.mark.parametrize("nonfinite", ["skip", "apply"])
@pytest.mark.parametrize("gradients", ["auto", "stay"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_norms_are_of_gradients_that_have_arrived(away, accumulation, gradients, nonfinite):
    """Summed while they arrive, or, where no step checks them, when clipping asks; one NaN is noticed."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in [(7,), (130, 3), (70001,)]]
    optimizer = orlop.AdamW(params, lr=0.0, gradients=gradients, nonfinite=nonfinite)
    for step in range(4):
        total = [torch.zeros(p.shape) for p in params]
        for _ in range(accumulation):
            targets = [torch.randn(p.shape) for p in params]
            if step == 3:
                targets[2][69999] = float("nan")
            sum((p * t).sum() for p, t in zip(params, targets, strict=True)).backward()
            total = [a + b for a, b in zip(total, targets, strict=True)]
        norm = float(optimizer.clip_grad_norm_(1e9))
        expected = sum(float(t.double().square().sum()) for t in total) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-6, nan_ok=True)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 3 and nonfinite == "skip")
        optimizer.zero_grad()
    optimizer.synchronize()
    assert all(bool(p.isnan().all()) == (nonfinite == "apply") for p in params)  # as torch's clipping does
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_written_through_data_are_noticed(away, dtype):
    """Case B-09 on a device: no version counter tells of it."""
    p, other = (torch.nn.Parameter(torch.linspace(1, 2, 50).to(dtype)) for _ in range(2))
    optimizer = orlop.AdamW([p, other], lr=1e-2)
    p.data[3].fill_(0.25)
    for lr in (1e-2, 1e-2, 0.0):
        for group in optimizer.param_groups:
            group["lr"] = lr
        (p.sum() + other.sum()).backward()
        if lr == 0.0:
            before = optimizer.master(p)
        p.data[7:9].mul_(0.5)
        expected, master = p.detach().clone(), optimizer.master(other)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert p[3].item() < 0.26 and (p[7:9] <= expected[7:9]).all()
    assert torch.equal(p, expected)
    assert torch.equal(optimizer.master(p), masters_of_written(expected, before))
    assert torch.equal(optimizer.master(other), master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_changed_weights_are_noticed(away, dtype):
    """Case B-09 on a device: an in-place write is where master and next step start."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 50).to(dtype))
    optimizer = orlop.AdamW([p], lr=1e-2)
    p.sum().backward()
    optimizer.step()
    before = optimizer.master(p)
    with torch.no_grad():
        p[:25].mul_(0.5)
    changed = p.detach().clone()
    master = optimizer.master(p)
    assert torch.equal(master, masters_of_written(changed, before))
    assert torch.equal(master[25:], before[25:])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_zero_written_into_host_weights_stays_a_zero(away, dtype):
    """Unwritten weights are not looked at before an update; written ones are, once."""
    torch.manual_seed(5)
    p = torch.nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = orlop.AdamW([p], lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        (p * torch.randn(5000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    slot = optimizer._slots[p]
    assert not slot.home.is_written()
    if dtype == torch.bfloat16:
        assert (slot.planes["master_lo"] < 0).any()  # rests that would turn a zero into a NaN
    slot.home.weights[::2] = 0
    optimizer.param_groups[0]["lr"] = 0.0
    kept = slot.home.weights.clone()
    p.sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(slot.home.weights, kept)
    assert optimizer.master(p).isfinite().all()
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_first", [False, True])
def test_resume_is_exact(away, dtype, weights_first):
    """Cases C-10, C-24, R-08: states go to where the optimizer keeps them, whichever is loaded first."""
    import copy

    def steps(p, optimizer, first, count):
        for step in range(first, first + count):
            (p * torch.randn(40, generator=torch.Generator().manual_seed(step)).to(dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    p = torch.nn.Parameter(torch.linspace(1, 2, 40).to(dtype))
    optimizer = orlop.AdamW([p], lr=1e-2)
    steps(p, optimizer, 0, 5)
    saved, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    steps(p, optimizer, 5, 5)
    fresh = torch.nn.Parameter(torch.zeros(40, dtype=dtype))
    resumed = orlop.AdamW([fresh], lr=1e-2)
    for weights_now in (weights_first, not weights_first):
        if weights_now:
            with torch.no_grad():
                fresh.copy_(weights)
        else:
            resumed.load_state_dict(saved)
    steps(fresh, resumed, 5, 5)
    assert torch.equal(fresh, p)
    assert torch.equal(resumed.master(fresh), optimizer.master(p))


def test_set_master_writes_the_weights(away):
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = orlop.AdamW([p])
    optimizer.set_master(p, torch.linspace(0, 1, 5))
    assert torch.equal(p, torch.linspace(0, 1, 5).to(torch.bfloat16))
    assert torch.equal(optimizer.master(p), torch.linspace(0, 1, 5))


def test_model_that_moves_to_the_device_after_the_optimizer(monkeypatch):
    """States made on the host follow their parameter."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 40))
    q = torch.nn.Parameter(p.detach().clone())
    optimizer, straight = orlop.AdamW([p]), orlop.AdamW([q])
    for step in range(4):
        for x, o in ((p, optimizer), (q, straight)):
            (x * (step + 1)).sum().backward()
            o.step()
            o.zero_grad()
        if step == 1:
            monkeypatch.setattr(adam_slots, "DeviceLink", HostLink)
            monkeypatch.setattr(orlop.AdamW, "_is_away", staticmethod(lambda x: x is p))
            optimizer._slots[p].device = torch.device("meta")  # anything but where it is
    assert torch.equal(p, q)
    assert optimizer._links
