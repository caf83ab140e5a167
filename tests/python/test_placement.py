"""States on the device and in host memory: the same bits wherever they live, with a host link in the place of the
CUDA one (tests/python/test_placement_gpu.py has the real one)."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from host_link import HostLink, all_away  # noqa: E402
from orlop import wrapping  # noqa: E402
from orlop.placement import choose, describe  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32, width=40, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 4)
        self.to(dtype)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.out(x)


def train(model, optimizer, steps, first=0, counts=(1,), clip=1.0, between=None):
    losses = []
    for step in range(first, first + steps):
        for part in range(counts[step % len(counts)]):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + part))
            loss = model(x.to(model.inp.weight.dtype)).float().square().mean()
            loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if between:
            between(step, model, optimizer)
    optimizer.synchronize()
    return losses


def bits(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"]), [optimizer.master(p) for p in optimizer._slots]


def assert_equal(a, b):
    (states, masters), (other_states, other_masters) = a, b
    for x, y in zip(masters, other_masters, strict=True):
        assert torch.equal(x, y)
    for index, state in states.items():
        assert state.keys() == other_states[index].keys()
        for key, value in state.items():
            assert torch.equal(value, other_states[index][key]), (index, key)


def on_device(optimizer):
    return [slot.name for slot in optimizer._slots.values() if slot.home.on_device]


def test_the_first_used_come_first_and_what_does_not_fit_is_passed_over():
    assert choose([], 10) == []
    assert choose([4, 5, 1], 10) == [0, 1, 2]
    assert choose([4, 7, 6], 10) == [0, 2]
    assert choose([4, 7, 6], 0) == []
    assert choose([4, 7, 6], -3) == []
    assert choose([0, 11, 10], 10) == [0, 2]


@pytest.mark.parametrize(
    ("counts", "hidden"), [((1,), True), ((3, 3, 2, 5, 1), False)], ids=["single", "accumulated"]
)
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")],
)
def test_same_bits_for_every_placement(monkeypatch, dtype, moments, counts, hidden):
    """Losses, states and masters, with clipping and with groups of their own hyperparameters."""

    def run(room, **options):
        with all_away(monkeypatch, room):
            model = Model(dtype)
            decay = [p for p in model.parameters() if p.dim() > 1]
            rest = [p for p in model.parameters() if p.dim() == 1]
            groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "maximize": False, "lr": 2e-3}]
            optimizer = orlop.AdamW(
                groups, lr=1e-2, module=model if hidden else None, moments=moments, **options
            )
            result = train(model, optimizer, 11, counts=counts), bits(optimizer)
            weights = [p.detach().clone() for p in model.parameters()]
            placed = on_device(optimizer)
            updated = optimizer._links[torch.device("cpu")].states.updated
            optimizer.close()
            return result, weights, len(placed), updated

    (losses, states), weights, placed, updated = run(0)
    assert placed == updated == 0
    count = len(weights)
    for room, options, expected in [
        (1 << 20, {}, count),
        (1 << 20, {"states": "host"}, 0),
        (1 << 20, {"states": 0}, 0),
        (1 << 20, {"states": 16_000}, None),
        (30_000, {}, None),
    ]:
        (got, got_states), got_weights, placed, updated = run(room, **options)
        if expected is None:
            assert 0 < placed < count
        else:
            assert placed == expected
        assert (updated > 0) == (placed > 0)
        assert updated <= 10 * count  # the first step is the host's
        assert got == losses
        assert_equal(got_states, states)
        assert all(torch.equal(a, b) for a, b in zip(got_weights, weights, strict=True))


def test_states_move_once_after_the_first_step(monkeypatch):
    """In the order of use; torch's state shows them where they are; host memory goes back; repr and report tell."""
    with all_away(monkeypatch, 1 << 30):
        model = Model(torch.bfloat16, width=64)
        optimizer = orlop.AdamW(model.parameters(), module=model, states=3 * 12 * 64 * 64)
        before = optimizer.memory_report()
        assert on_device(optimizer) == []
        train(model, optimizer, 1)
        names = [name for name, _ in model.named_parameters()]
        placed = on_device(optimizer)
        slots = optimizer.in_order_of_use()
        chosen = choose([12 * slot.numel for slot in slots], 3 * 12 * 64 * 64)
        assert sorted(placed) == sorted(slots[i].name for i in chosen)
        weights = [name for name in placed if name.endswith("weight")]
        assert sorted(weights) == ["blocks.0.weight", "blocks.1.weight", "inp.weight", "out.weight"]
        report = optimizer.placement()
        assert sorted(report["cpu"]["parameters"] + report["host"]["parameters"]) == sorted(names)
        assert report["cpu"]["bytes"] + report["host"]["bytes"] == 10 * sum(
            p.numel() for p in model.parameters()
        )
        assert describe(report) in repr(optimizer)
        train(model, optimizer, 20, first=1)
        assert on_device(optimizer) == placed
        for p, slot in optimizer._slots.items():
            for key, plane in slot.planes.items():
                assert optimizer.state[p][key] is plane
        optimizer.close()
        everything = orlop.AdamW(model.parameters(), module=model)
        train(model, everything, 2)
        after = everything.memory_report()
        assert before["moments"] > 0
        assert "moments" not in after
        assert after["states and gradients on cpu"] == 12 * sum(p.numel() for p in model.parameters())
        assert everything.host_bytes() == sum(after.values()) - after["states and gradients on cpu"]
        everything.close()


@pytest.mark.parametrize("clip", ["ours", "torch", "none"])
def test_norms_on_the_device_are_summed_in_one_call(monkeypatch, clip):
    """Those of a whole step, by whoever asks first."""
    with all_away(monkeypatch, 1 << 30):
        model = Model(width=16)
        optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model)
        train(model, optimizer, 1)
        (link,) = optimizer._links.values()
        calls, issue = [], link.states.square_sums
        monkeypatch.setattr(
            link.states,
            "square_sums",
            lambda targets, values: (issue(targets, values), calls.append(sorted(t.row for t in targets))),
        )
        rows = list(range(len(optimizer._slots)))
        for counts in (1, 1, 3, 3):
            for part in range(counts):
                (model(torch.full((2, 8), 1.0 + part)) ** 2).mean().backward()
            assert calls == []
            if clip == "ours":
                optimizer.clip_grad_norm_(0.1)
            elif clip == "torch":
                norms = [float(optimizer.gradient(p).double().norm()) for p in model.parameters()]
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert float(norm) == pytest.approx(sum(n**2 for n in norms) ** 0.5, rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            assert calls == [rows]
            calls.clear()
            assert link.states.unmeasured == {}
        optimizer.close()


def test_states_leave_where_their_room_is_needed(monkeypatch):
    """For a sum that has no room, and when a step needs more than any before: the same bits go on."""

    def run(room, squeeze):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model)
            (link,) = optimizer._links.values()
            losses = train(model, optimizer, 3)
            seen = [len(on_device(optimizer))]
            if squeeze:
                link.room.free -= 20_000
            losses += train(model, optimizer, 17, first=3)
            seen.append(len(on_device(optimizer)))
            if squeeze:
                assert link.room.free >= 0
            losses += train(model, optimizer, 3, first=20, counts=(3,))
            seen.append(len(on_device(optimizer)))
            result = losses, bits(optimizer)
            optimizer.close()
            return result, seen

    size = 12 * sum(p.numel() for p in Model().parameters())
    (losses, states), seen = run(0, False)
    assert seen == [0, 0, 0]
    (got, got_states), seen = run(size, True)
    assert got == losses
    assert_equal(got_states, states)
    assert seen[0] == 12 > seen[1] > 0
    (got, got_states), seen = run(size, False)
    assert got == losses
    assert_equal(got_states, states)
    assert seen[:2] == [12, 12]
    assert seen[2] < 12


def test_gradients_on_the_device_read_as_those_in_host_memory(monkeypatch):
    """Reading, norms, scaling and torch's own clipping; what is not finite is named and left out."""

    def run(room):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2)
            seen = []
            for step in range(6):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
                loss = model(x).float().square().mean() * (float("nan") if step == 3 else 1.0)
                loss.backward()
                seen.append(optimizer.gradient(model.inp.weight))
                if step == 2:
                    optimizer.scale_gradients_(0.25)
                if step == 4:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if step == 5:
                    model.inp.weight.grad.add_(1.0)  # back as a plain tensor
                seen.append(model.blocks[1].weight.grad.float())
                optimizer.step()
                assert optimizer.step_was_skipped == (step == 3)
                seen.append(torch.tensor(optimizer.grad_norm))
                optimizer.zero_grad()
            optimizer.synchronize()
            assert bool(on_device(optimizer)) == (room > 0)
            result = seen, bits(optimizer), optimizer.first_bad
            optimizer.close()
            return result

    expected, got = run(0), run(1 << 20)
    assert all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(expected[0], got[0], strict=True)
    )
    assert_equal(expected[1], got[1])
    assert expected[2] == got[2] != ""


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_stay(monkeypatch, set_to_none):
    """Plain p.grad, which the user may write as soon as step() has returned."""

    def run(room):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2, gradients="stay", module=model)
            for step in range(5):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
                model(x).float().square().mean().backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            optimizer.synchronize()
            result = bits(optimizer)
            optimizer.close()
            return result

    assert_equal(run(0), run(1 << 20))


def test_closure_maximize_and_accumulation_without_zero_grad(monkeypatch):
    """Gradients that nobody dropped grow on, also across the move of the states."""

    def run(room):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-3, maximize=True)

            def closure():
                for part in range(2):
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(part)).bfloat16()
                    model(x).float().square().mean().backward()
                return model.inp.weight.grad.float().sum().item()

            losses = [optimizer.step(closure) for _ in range(4)]
            optimizer.synchronize()
            result = bits(optimizer)
            optimizer.close()
            return losses, result

    expected, got = run(0), run(1 << 20)
    assert expected[0] == got[0]
    assert_equal(expected[1], got[1])


def test_parameters_that_come_late_move_too(monkeypatch):
    """Unfrozen after some steps, and added in a group."""

    def run(room):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            model.blocks[1].requires_grad_(False)
            late = list(model.out.parameters())
            early = [p for p in model.parameters() if all(p is not q for q in late)]
            optimizer = orlop.AdamW(early, lr=1e-2)

            def between(step, model, optimizer):
                if step == 3:
                    model.blocks[1].requires_grad_(True)
                    optimizer.add_param_group({"params": late, "lr": 1e-3})

            losses = train(model, optimizer, 8, between=between)
            result = losses, bits(optimizer), len(on_device(optimizer))
            optimizer.close()
            return result

    expected, got = run(0), run(1 << 20)
    assert (expected[2], got[2]) == (0, 12)
    assert expected[0] == got[0]
    assert_equal(expected[1], got[1])


@pytest.mark.parametrize("rooms", [(0, 1 << 20), (1 << 20, 0), (1 << 20, 1 << 20), (30_000, 1 << 20)])
@DTYPES
def test_resume_is_exact_across_placements(monkeypatch, dtype, rooms):
    def begin(room, state=None):
        with all_away(monkeypatch, room):
            model = Model(dtype)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2)
            if state:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            train(model, optimizer, 5, first=5 if state else 0)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if not state:
                train(model, optimizer, 5, first=5)
            result = bits(optimizer)
            if state:  # into states that are where they are
                optimizer.load_state_dict(state[1])
                model.load_state_dict(state[0])
                train(model, optimizer, 5, first=5)
                assert_equal(bits(optimizer), result)
            optimizer.close()
            return saved, result

    saved, straight = begin(rooms[0])
    assert_equal(begin(rooms[1], saved)[1], straight)


@DTYPES
def test_weights_that_somebody_writes(monkeypatch, dtype):
    """Case B-09: a write in place, a master that is set, a plane that is replaced: where the next step starts."""
    with all_away(monkeypatch, 1 << 20):
        p = torch.nn.Parameter(torch.linspace(1, 2, 50).to(dtype))
        optimizer = orlop.AdamW([p], lr=1e-2, weight_decay=0.0)
        for _ in range(3):
            (p * torch.linspace(-1, 1, 50).to(dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert on_device(optimizer) == [optimizer._names[p]]
        with torch.no_grad():
            p[:25].mul_(0.5)
            p[30:40].zero_()
        changed = p.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        p.sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(p, changed)
        half_unit = torch.finfo(dtype).eps / 2
        least = 1e-37 if dtype == torch.bfloat16 else 0  # a rest beside a zero
        assert torch.allclose(optimizer.master(p), changed.float(), rtol=half_unit, atol=least)
        value = torch.linspace(-3, 3, 50)
        value[7] = float("nan")
        optimizer.set_master(p, value)
        assert torch.equal(optimizer.master(p).nan_to_num(9), value.nan_to_num(9))
        host = orlop.AdamW([q := torch.nn.Parameter(torch.zeros(50, dtype=dtype))], states="host")
        host.set_master(q, value)
        assert torch.equal(p.nan_to_num(9), q.nan_to_num(9))
        optimizer.state[p]["exp_avg"] = torch.full((50,), 0.25)
        optimizer.step()
        expected = torch.full((50,), 0.9 * 0.25 + 0.1 * 1.0)  # the gradient is still that of the sum
        torch.testing.assert_close(optimizer._slots[p].planes["exp_avg"], expected)
        p.data = p.data.clone()
        kept = p.detach().clone()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(p.nan_to_num(9), kept.nan_to_num(9))
        optimizer.close()


def test_fp16_with_a_scaler(monkeypatch):
    """Overflows are found where the gradients are, and leave steps out alike."""

    def run(room):
        with all_away(monkeypatch, room):
            model = Model(torch.float16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-3)
            scaler = orlop.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
            for step in range(20):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).half()
                scaler.scale(model(x).float().square().mean()).backward()
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            optimizer.synchronize()
            result = scaler.get_scale(), optimizer.steps, bits(optimizer), len(on_device(optimizer))
            optimizer.close()
            return result

    expected, got = run(0), run(1 << 20)
    assert expected[:2] == got[:2]
    assert 0 < got[1] < 20
    assert (expected[3], got[3]) == (0, 12)
    assert_equal(expected[2], got[2])


def test_one_message_for_a_wrong_choice():
    with pytest.raises(orlop.UsageError, match=r"states = 'gpu' is not known; use one of 'auto', 'host'"):
        orlop.AdamW([torch.nn.Parameter(torch.ones(1))], states="gpu")


@pytest.mark.parametrize("limit", ["24GiB", -1, True])
def test_a_limit_is_bytes(limit):
    with pytest.raises(orlop.UsageError, match=r"device_limit = .* is neither None nor a number of bytes"):
        orlop.AdamW([torch.nn.Parameter(torch.ones(1))], device_limit=limit)


@pytest.mark.parametrize("resident", [0, 2, 6])
@DTYPES
def test_door2_keeps_states_of_resident_blocks_on_the_device(monkeypatch, dtype, resident):
    """Blocks that come and go have theirs in host memory; the bits are those of plain training either way."""
    block = (40 * 40 + 40) * torch.empty((), dtype=dtype).element_size()
    expected_model = Model(dtype, blocks=6)
    expected_optimizer = orlop.AdamW(expected_model.parameters(), lr=1e-2, gradients="leave")
    counts = (1, 1, 2, 3)
    expected = train(expected_model, expected_optimizer, 12, counts=counts)
    for room in (0, 14_000, 1 << 20):
        link = HostLink(torch.device("cpu"), room)
        monkeypatch.setattr(wrapping, "_device_link", lambda device, limit, link=link: link)
        model, optimizer = orlop.wrap(
            Model(dtype, blocks=6),
            {"lr": 1e-2},
            {"limits": {"gpu": block * (6 if resident == 6 else resident + 2)}},
        )
        assert train(model, optimizer, 12, counts=counts) == expected
        placed = on_device(optimizer)
        streamed = [f"blocks.{i}.weight" for i in range(6 - resident)]
        assert not set(placed) & set(streamed)
        if room == 1 << 20:
            assert {f"blocks.{i}.weight" for i in range(6 - resident, 6)} <= set(placed)
        assert_equal(bits(optimizer), bits(expected_optimizer))
        for (name, a), b in zip(
            model.state_dict().items(), expected_model.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), name
        with orlop.gathered(model, write=True), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, 1)
        optimizer.close()
        orlop.unwrap(model)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
