"""orlop.AdamW against torch.optim.AdamW, and against the formula element by element."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from adam_reference import Reference, parameters_of_both_equal_torch, rounded  # noqa: E402

STEPS = 100


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from a team of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(torch.nn.Module):
    """Sizes that are no multiple of a vector, a layer that is used twice, and a block list."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(13, 31)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(31, 31) for _ in range(3))
        self.side = torch.nn.Linear(31, 31)
        self.out = torch.nn.Linear(31, 5)
        self.to(dtype)

    def forward(self, x, side=True):
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        if side:
            x = torch.tanh(self.side(self.side(x)))
        return self.out(x)


def groups(model, count, weight_decay):
    """The parameters in `count` interleaved groups with hyperparameters of their own."""
    params = list(model.parameters())
    if count == 1:
        return [{"params": params, "weight_decay": weight_decay}]
    return [
        {
            "params": params[i::count],
            "lr": 1e-3 * (i + 1),
            "betas": (0.9 - 0.1 * i, 0.999 - 0.01 * i),
            "eps": 1e-8 * 10**i,
            "weight_decay": weight_decay * i,
        }
        for i in range(count)
    ]


def batches(steps, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 13, generator=generator).to(dtype)
        yield x, torch.randn(8, 5, generator=generator).to(dtype)


def clip(model, optimizer, max_norm):
    if max_norm and isinstance(optimizer, orlop.AdamW):
        return float(optimizer.clip_grad_norm_(max_norm))
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)) if max_norm else None


def train(optimizer_class, count=1, weight_decay=0.1, accumulation=1, max_norm=None, schedule=False, frozen=False,
          steps=STEPS, make=None, **options):  # fmt: skip
    """Final weights, losses and norms. `frozen`: one layer starts frozen, another is left out by every third
    batch and a third is frozen in the middle."""
    model = Net()
    if frozen:
        model.blocks[1].requires_grad_(False)
    if make:
        options = {**options, **make(model)}
    optimizer = optimizer_class(groups(model, count, weight_decay), lr=3e-3, **options)
    scheduler = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1) if schedule else None
    )
    losses, norms = [], []
    for step, (x, y) in enumerate(batches(steps)):
        if frozen and step == 30:
            model.blocks[1].requires_grad_(True)
        if frozen and step == 60:
            model.blocks[2].requires_grad_(False)
            model.blocks[2].zero_grad()
        total = 0.0
        for part_x, part_y in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            loss = ((model(part_x, side=not (frozen and step % 3 == 0)) - part_y) ** 2).mean() / accumulation
            (-loss if options.get("maximize") else loss).backward()
            total += loss.item()
        norms.append(clip(model, optimizer, max_norm))
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    if isinstance(optimizer, orlop.AdamW):
        optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()], losses, norms


def assert_equal_training(ours, theirs):
    for index, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=lambda m, i=index: f"parameter {i}: {m}")
    torch.testing.assert_close(torch.tensor(ours[1]), torch.tensor(theirs[1]), atol=1e-6, rtol=1e-5)
    if ours[2][0] is not None:
        torch.testing.assert_close(torch.tensor(ours[2]), torch.tensor(theirs[2]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gradients", ["stay", "leave"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fp32_equals_torch(count, accumulation, max_norm, gradients):
    """Cases B-06, N-03, N-21: groups x accumulation x clipping x where gradients are."""
    options = {"count": count, "accumulation": accumulation, "max_norm": max_norm}
    ours = train(orlop.AdamW, gradients=gradients, **options)
    assert_equal_training(ours, train(torch.optim.AdamW, **options))


@pytest.mark.parametrize("gradients", ["stay", "leave"])
@pytest.mark.parametrize(
    ("maximize", "weight_decay", "schedule", "frozen"),
    list(itertools.product([False, True], [0.0, 0.1], [False, True], [False, True])),
)
def test_options_equal_torch(maximize, weight_decay, schedule, frozen, gradients):
    """maximize x weight decay x scheduler x frozen, late-unfrozen and unused parameters."""
    options = {"weight_decay": weight_decay, "schedule": schedule, "frozen": frozen, "maximize": maximize}
    ours = train(orlop.AdamW, gradients=gradients, **options)
    assert_equal_training(ours, train(torch.optim.AdamW, **options))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_both_flavours_of_weight_decay(weight_decay):
    """Case N-02: AdamW is decoupled, Adam has the decay in the gradient; neither stands for the other."""
    adam = train(orlop.Adam, weight_decay=weight_decay, steps=200)
    assert_equal_training(adam, train(torch.optim.Adam, weight_decay=weight_decay, steps=200))
    decoupled = train(orlop.AdamW, weight_decay=weight_decay, steps=200)
    assert_equal_training(decoupled, train(torch.optim.AdamW, weight_decay=weight_decay, steps=200))
    same = all(torch.equal(a, b) for a, b in zip(adam[0], decoupled[0], strict=True))
    assert same == (weight_decay == 0.0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_update_hidden_under_the_next_forward_equals_torch(accumulation, frozen):
    """module=: each block waits for its own weights."""
    options = {"accumulation": accumulation, "max_norm": 0.05, "frozen": frozen, "schedule": True}
    ours = train(orlop.AdamW, make=lambda model: {"module": model}, **options)
    assert_equal_training(ours, train(torch.optim.AdamW, **options))


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_same_gradients_give_the_same_weights_as_torch(accumulation, hidden):
    parameters_of_both_equal_torch("cpu", accumulation, hidden)


def test_everywhere_the_same_bits():
    """Hidden or not, away or not: equal bits where torch itself sums the same gradients."""
    runs = [
        train(orlop.AdamW, max_norm=1e9),
        train(orlop.AdamW, max_norm=1e9, gradients="leave"),
        train(orlop.AdamW, max_norm=1e9, make=lambda model: {"module": model}),
        train(orlop.AdamW, max_norm=1e9, threads=1),
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0][0], other[0], strict=True))
        assert runs[0][1:] == other[1:]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("gradients", ["stay", "leave"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_equal_the_formula_bit_for_bit(dtype, gradients, maximize):
    """Cases N-01, N-15: the recorded gradients, fed to the formula element by element."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 5), (1,), (129,), (0, 4))]
    references = [Reference(p) for p in params]
    optimizer = orlop.AdamW(params, lr=1e-2, weight_decay=0.1, maximize=maximize, gradients=gradients)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for p, reference in zip(params, references, strict=True):
            target = torch.randn(p.shape).to(dtype)
            (p * target).sum().backward()
            reference.step(optimizer.gradient(p), 1e-2 / (1 + step), weight_decay=0.1, maximize=maximize)
        optimizer.step()
        optimizer.zero_grad()
        for p, reference in zip(params, references, strict=True):
            master = optimizer.master(p).flatten()
            assert torch.equal(master, torch.from_numpy(reference.p)), f"step {step}, {tuple(p.shape)}"
            assert torch.equal(optimizer.state[p]["exp_avg"].flatten(), torch.from_numpy(reference.m))
            assert torch.equal(optimizer.state[p]["exp_avg_sq"].flatten(), torch.from_numpy(reference.v))
            assert torch.equal(p.detach().flatten(), rounded(reference.p, dtype))


@pytest.mark.parametrize("gradients", ["stay", "leave"])
def test_bf16_losses_within_one_percent(gradients):
    """Against fp32 masters trained by torch on the same bf16 forward."""
    torch.manual_seed(0)
    ours, theirs = Net(torch.bfloat16), Net(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in theirs.parameters()]
    optimizer = orlop.AdamW(ours.parameters(), lr=1e-3, gradients=gradients)
    reference = torch.optim.AdamW(masters, lr=1e-3)
    for x, y in batches(50, torch.bfloat16):
        loss = ((ours(x) - y).float() ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = ((theirs(x) - y).float() ** 2).mean()
        expected.backward()
        for master, p in zip(masters, theirs.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        reference.step()
        with torch.no_grad():
            for master, p in zip(masters, theirs.parameters(), strict=True):
                p.copy_(master)
        assert abs(loss.item() - expected.item()) <= 0.01 * expected.item()


def test_sum_of_many_micro_batches_in_fp32():
    """Case N-20: 64 micro-batches of 1e-3 in bf16 sum to 0.064 where gradients leave."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = orlop.AdamW([p], gradients="leave")
    part = torch.tensor(1e-3, dtype=torch.bfloat16)
    for _ in range(64):
        (p * part).sum().backward()
    norm = float(optimizer.clip_grad_norm_(1e9))
    assert norm == pytest.approx(3**0.5 * 64 * part.item(), rel=1e-6)


def test_bf16_moments_follow_fp32_ones():
    """moments="bf16": half the memory, the same training within a few per cent."""
    full, half = train(orlop.AdamW, steps=50), train(orlop.AdamW, steps=50, moments="bf16")
    for a, b in zip(full[1], half[1], strict=True):
        assert abs(a - b) <= 0.05 * a
    again = train(orlop.AdamW, steps=50, moments="bf16", threads=1)
    assert all(torch.equal(a, b) for a, b in zip(half[0], again[0], strict=True))


@pytest.mark.parametrize("gradients", ["stay", "leave"])
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "slice_of_flat"])
def test_layouts_other_than_contiguous(layout, gradients):
    """Elements are matched by position, not by their order in memory."""

    def build():
        torch.manual_seed(5)
        if layout == "transposed":
            return torch.nn.Parameter(torch.randn(6, 4).t())
        if layout == "channels_last":
            return torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        return torch.nn.Parameter(torch.randn(50)[7:31].view(4, 6))

    ours, theirs = build(), build()
    optimizers = [orlop.AdamW([ours], gradients=gradients), torch.optim.AdamW([theirs])]
    weight = torch.randn(ours.shape)
    for _ in range(5):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            (p.exp() * weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    state = optimizers[1].state[theirs]["exp_avg"]
    torch.testing.assert_close(optimizers[0].state[ours]["exp_avg"], state, atol=1e-6, rtol=1e-5)
