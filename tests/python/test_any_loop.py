"""Whatever a loop does between and around its steps, the bits are the same wherever weights and states live: random
loops, run once for every place, with a host link in the place of a CUDA one. On a GPU with ORLOP_TEST_DEVICE=cuda."""

from __future__ import annotations

import contextlib
import copy
import functools
import random

import pytest

torch = pytest.importorskip("torch")

from wrap_model import DEVICE, Model  # noqa: E402

import orlop  # noqa: E402
from host_link import all_away  # noqa: E402

pytestmark = pytest.mark.any_device

SHAPES = [(7, 5), (1,), (), (0, 3), (64, 33), (130,)]
LENGTH = 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Loop:
    """Weights, their optimizer, and what can be seen of them. Every operation draws from generators that are seeded for
    it, so that a script does the same everywhere; `p` is one of the parameters."""

    dtype: torch.dtype
    params: list  # in the same order everywhere
    optimizer: orlop.AdamW

    def __init__(self):
        self.results = []  # of forwards

    def values(self, shape) -> torch.Tensor:
        return torch.randn(shape).to(DEVICE, self.dtype)

    def seen(self) -> dict:
        """Weights, masters and gradients, or the error that says there is none."""
        self.optimizer.synchronize()
        seen = {"results": list(self.results)}
        for i, p in enumerate(self.params):
            seen[f"weights {i}"] = p.data.cpu().clone()
            seen[f"gradient {i}"] = None if p.grad is None else (p.grad + 0).cpu()  # no alias of it
            try:
                seen[f"master {i}"] = self.optimizer.master(p)
            except orlop.UsageError as error:  # frozen since the optimizer was made
                seen[f"master {i}"] = str(error)
        return seen

    def step(self, p):
        self.optimizer.step()

    def clipped_step(self, p):
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self, p):
        self.optimizer.zero_grad(set_to_none=random.random() < 0.5)

    def scale_gradient(self, p):
        if p.grad is not None:
            p.grad.mul_(0.5)

    def write_data(self, p):
        """Not seen by version counters. (Who writes weights waits for them.)"""
        self.optimizer.synchronize()
        if self.dtype != torch.float16:  # of states on the device nobody would see it
            p.data.mul_(random.choice([0.75, 0.0]))

    def replace(self, p):
        self.optimizer.synchronize()
        p.data = self.values(p.shape)

    def freeze_or_thaw(self, p):
        p.requires_grad_(not p.requires_grad)

    def change_rate(self, p):
        for group in self.optimizer.param_groups:
            group["lr"] = random.choice([0.0, 1e-3, 1e-1])

    def load_own_state(self, p):
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))


class ParameterLoop(Loop):
    """Door 1."""

    def __init__(self, dtype, make):
        super().__init__()
        self.dtype, self.make = dtype, make
        self.params = [torch.nn.Parameter(self.values(shape)) for shape in SHAPES]
        self.optimizer = self.new_optimizer()

    def new_optimizer(self):
        first, later = self.params[: len(SHAPES)], self.params[len(SHAPES) :]
        groups = [{"params": first[:3]}, {"params": first[3:], "weight_decay": 0.0}]
        return self.make(groups + [{"params": [p], "lr": 1e-3} for p in later])

    def backward(self, p):
        used = [p for p in self.params if p.requires_grad and random.random() < 0.8]
        if used:
            sum((p * self.values(p.shape)).float().sum() for p in used).backward()

    def clip(self, p):
        self.optimizer.clip_grad_norm_(0.5)

    def add_to_gradient(self, p):
        if p.grad is not None:
            p.grad.add_(torch.ones_like(p))

    def set_gradient(self, p):
        p.grad = self.values(p.shape) if p.requires_grad and random.random() < 0.5 else None

    def write(self, p):
        self.optimizer.synchronize()
        some = p[::2] if p.dim() and random.random() < 0.5 else p
        with torch.no_grad():
            some.mul_(0.5) if random.random() < 0.5 else some.zero_()

    def change_order(self, p):
        """Of the elements in memory."""
        self.optimizer.synchronize()
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t() if p.is_contiguous() else p.data.contiguous()

    def change_dtype_and_back(self, p):
        self.optimizer.synchronize()
        p.data = p.data.float()
        if random.random() < 0.5:
            self.optimizer.master(p)
        p.data = p.data.to(self.dtype)

    def spoil_gradient(self, p):
        """The next step is left out."""
        if p.grad is not None:
            p.grad.fill_(float("nan"))

    def add_group(self, p):
        if len(self.params) < 8:
            self.params.append(torch.nn.Parameter(self.values((9, 4))))
            self.optimizer.add_param_group({"params": self.params[-1:], "lr": 1e-3})

    def set_master(self, p):
        if p.requires_grad:
            self.optimizer.set_master(p, torch.randn(p.shape))

    def edit_moments(self, p):
        self.optimizer.synchronize()
        if "exp_avg" in self.optimizer.state.get(p, {}):
            self.optimizer.state[p]["exp_avg"].mul_(0.5)

    def resume(self, p):
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.zero_grad()
        self.optimizer.close()
        self.optimizer = self.new_optimizer()
        self.optimizer.load_state_dict(state)


class ModelLoop(Loop):
    """Door 2: blocks in the order of the model or another, some of them not at all."""

    def __init__(self, dtype, make):
        super().__init__()
        self.dtype, self.make = dtype, make
        self.new_model()

    def new_model(self):
        self.model, self.optimizer, self.is_wrapped = self.make(Model(dtype=self.dtype))
        self.params = list(self.model.parameters())

    def forward(self):
        order = (
            [random.randrange(5) for _ in range(random.randrange(1, 7))] if random.random() < 0.3 else None
        )
        return self.model(self.values((3, 8)), order).float()

    def backward(self, p):
        self.forward().square().mean().backward()

    def evaluate(self, p):
        with torch.no_grad() if random.random() < 0.5 else torch.inference_mode():
            self.results.append(self.forward().sum().item())

    def drop_a_graph(self, p):
        self.results.append(self.forward().sum().item())

    def gradient_beside_the_backward(self, p):
        if self.model.inp.bias.requires_grad:
            (gradient,) = torch.autograd.grad(self.forward().sum(), [self.model.inp.bias])
            self.results.append(gradient.float().sum().item())

    def write_gathered(self, p):
        self.optimizer.synchronize()
        section = orlop.gathered([p], write=True) if self.is_wrapped else contextlib.nullcontext()
        with section, torch.no_grad():
            p.mul_(0.5)

    def write_a_row(self, p):
        self.optimizer.synchronize()
        if self.dtype != torch.float16:
            p.data[0].zero_()

    def load_weights(self, p):
        self.model.load_state_dict({name: 0.5 * value for name, value in self.model.state_dict().items()})

    def resume(self, p):
        weights, states = (copy.deepcopy(x.state_dict()) for x in (self.model, self.optimizer))
        self.optimizer.zero_grad()
        self.optimizer.close()
        self.new_model()
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)


def operations_of(kind: type) -> list:
    """Those with a `p`; what a loop mostly does counts more."""
    names = [name for name in dir(kind) if not name.startswith("_")]
    found = [getattr(kind, name) for name in names if callable(getattr(kind, name))]
    found = [function for function in found if function.__code__.co_varnames[:2] == ("self", "p")]
    return found + 4 * [kind.backward, kind.clipped_step]


def run(kind: type, seed: int, dtype: torch.dtype, make) -> list:
    """(operation, what was seen after it) of each."""
    torch.manual_seed(seed)
    script, operations = random.Random(seed), operations_of(kind)
    loop, trace = kind(dtype, make), []
    for _ in range(LENGTH):
        operation, which, own = script.choice(operations), script.random(), script.randrange(1 << 30)
        random.seed(own)
        torch.manual_seed(own)
        which = int(which * len(loop.params))
        try:
            operation(loop, loop.params[which])
        except orlop.UsageError as error:
            trace.append((operation.__name__, {"error": str(error)}))
        trace.append((f"{operation.__name__} {which}", loop.seen()))
    states = loop.optimizer.state_dict()["state"]
    kept = {f"{key} {i}": v.cpu().clone() for i, state in states.items() for key, v in state.items()}
    trace.append(("state_dict", kept))
    loop.optimizer.close()
    return trace


def assert_same(got: list, expected: list) -> None:
    done = []
    for (operation, seen), (wanted, other) in zip(got, expected, strict=True):
        done.append(operation)
        assert operation == wanted
        assert seen.keys() == other.keys()
        for name, value in seen.items():
            is_tensor = isinstance(value, torch.Tensor) and isinstance(other[name], torch.Tensor)
            same = equal(value, other[name]) if is_tensor else str(value) == str(other[name])
            assert same, f"{name} after {done}: {value} != {other[name]}"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN equals a NaN."""
    if not a.is_floating_point() or not torch.equal(a.isnan(), b.isnan()):
        return torch.equal(a, b)
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and a.dtype == b.dtype


@pytest.fixture
def new_drive(tmp_path):
    """Makes a directory for each optimizer."""

    def new():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return [str(folder)]

    return new


@DTYPES
@pytest.mark.parametrize("seed", range(12))
def test_bits_do_not_depend_on_where_states_live(monkeypatch, new_drive, dtype, seed):
    def trace(room=0, **options):
        def make(groups):
            nvme = new_drive() if options.get("nvme") else None
            return orlop.AdamW(groups, lr=1e-2, gradients="leave", **{**options, "nvme": nvme})

        is_plain = DEVICE != "cpu" or room is None
        with contextlib.nullcontext() if is_plain else all_away(monkeypatch, room):
            return run(ParameterLoop, seed, dtype, make)

    expected = trace(states="host")
    assert_same(trace(states="host", nvme=True), expected)
    for room in (1 << 20, 9000):  # all of them, and some
        assert_same(trace(room, states=room), expected)
    # 16-bit gradients that stay are scaled where they are, and rounded.
    if DEVICE == "cpu" and dtype == torch.float32:
        assert_same(trace(None), expected)


@DTYPES
@pytest.mark.parametrize("seed", range(5))
def test_bits_do_not_depend_on_where_weights_live(new_drive, dtype, seed):
    def plain(model):
        return model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave"), False

    def wrapped(model, blocks, nvme=False, **options):
        block = sum(p.nbytes for p in model.blocks[0].parameters())
        config = {"limits": {"gpu": blocks * block}, **({"nvme": new_drive()} if nvme else {})}
        return *orlop.wrap(model, {"lr": 1e-2, **options}, config), True

    expected = run(ModelLoop, seed, dtype, plain)
    for where in (
        {"blocks": 2},
        {"blocks": 4, "states": "host"},
        {"blocks": 1 << 10},
        {"blocks": 2, "nvme": True},
    ):
        assert_same(run(ModelLoop, seed, dtype, functools.partial(wrapped, **where)), expected)
