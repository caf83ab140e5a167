"""Whatever a loop does between and around its steps, the bits are the same wherever states live: random loops, run
once for every place, with a host link in the place of a CUDA one. On a GPU with ORLOP_TEST_DEVICE=cuda."""

from __future__ import annotations

import contextlib
import copy
import os
import random

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from host_link import all_away  # noqa: E402

pytestmark = pytest.mark.any_device

DEVICE = os.environ.get("ORLOP_TEST_DEVICE", "cpu")
SHAPES = [(7, 5), (1,), (), (64, 33), (130,)]
LENGTH = 40


class Loop:
    """Parameters, their optimizer, and what has been seen of them. Every operation draws from a generator of its own,
    so that the same script does the same everywhere."""

    def __init__(self, dtype: torch.dtype, options: list[dict]):
        torch.manual_seed(0)
        self.dtype, self.options = dtype, iter(options)
        self.params = [torch.nn.Parameter(self.values(shape)) for shape in SHAPES]
        self.optimizer = self.new_optimizer()

    def values(self, shape) -> torch.Tensor:
        return torch.randn(shape).to(DEVICE, self.dtype)

    def new_optimizer(self):
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "weight_decay": 0.0}]
        return orlop.AdamW(groups, lr=1e-2, gradients="leave", **next(self.options))

    def seen(self) -> dict:
        """Weights, masters and gradients, or the error that says there is none."""
        self.optimizer.synchronize()
        seen = {}
        for i, p in enumerate(self.params):
            seen[f"weights {i}"] = p.detach().cpu().clone()
            seen[f"gradient {i}"] = None if p.grad is None else p.grad.cpu().clone()
            try:
                seen[f"master {i}"] = self.optimizer.master(p)
            except orlop.UsageError as error:  # frozen since it was created
                seen[f"master {i}"] = str(error)
        return seen

    # --- what a script consists of: p is one of the parameters ------------------------------------

    def backward(self, p):
        used = [p for p in self.params if p.requires_grad and random.random() < 0.8]
        if used:
            sum((p * self.values(p.shape)).float().sum() for p in used).backward()

    def step(self, p):
        self.optimizer.step()

    def zero_grad(self, p):
        self.optimizer.zero_grad(set_to_none=random.random() < 0.5)

    def clip(self, p):
        self.optimizer.clip_grad_norm_(0.5)

    def change_gradient(self, p):
        if p.grad is not None:
            p.grad.mul_(0.5) if random.random() < 0.5 else p.grad.add_(torch.ones_like(p))

    def set_gradient(self, p):
        p.grad = self.values(p.shape) if p.requires_grad and random.random() < 0.5 else None

    def write(self, p):
        """Seen by version counters. (Who writes weights waits for them.)"""
        self.optimizer.synchronize()
        with torch.no_grad():
            p.mul_(0.5) if random.random() < 0.5 else p.zero_()

    def write_data(self, p):
        self.optimizer.synchronize()
        if self.dtype != torch.float16:  # where states are on the device nobody sees it
            p.data.mul_(random.choice([0.75, 0.0]))

    def replace(self, p):
        self.optimizer.synchronize()
        p.data = self.values(p.shape)

    def freeze_or_thaw(self, p):
        p.requires_grad_(not p.requires_grad)

    def change_rate(self, p):
        for group in self.optimizer.param_groups:
            group["lr"] = random.choice([0.0, 1e-3, 1e-1])

    def set_master(self, p):
        if p.requires_grad:
            self.optimizer.set_master(p, torch.randn(p.shape))

    def edit_moments(self, p):
        self.optimizer.synchronize()
        if "exp_avg" in self.optimizer.state.get(p, {}):
            self.optimizer.state[p]["exp_avg"].mul_(0.5)

    def load_own_state(self, p):
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def resume(self, p):
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.zero_grad()
        self.optimizer.close()
        self.optimizer = self.new_optimizer()
        self.optimizer.load_state_dict(state)


COMMON = [Loop.backward, Loop.step, Loop.zero_grad, Loop.write]
OPERATIONS = 3 * COMMON + [
    value
    for value in vars(Loop).values()
    if callable(value) and value.__code__.co_varnames[:2] == ("self", "p")
]


def run(seed: int, dtype: torch.dtype, options: list[dict]) -> list:
    """(operation, what was seen after it) of each."""
    script = random.Random(seed)
    loop = Loop(dtype, options)
    trace = []
    for _ in range(LENGTH):
        operation, which, own = (
            script.choice(OPERATIONS),
            script.randrange(len(SHAPES)),
            script.randrange(1 << 30),
        )
        random.seed(own)
        torch.manual_seed(own)
        try:
            operation(loop, loop.params[which])
        except orlop.UsageError as error:
            trace.append((operation.__name__, {"error": str(error)}))
        trace.append((f"{operation.__name__} {which}", loop.seen()))
    states = loop.optimizer.state_dict()["state"]
    trace.append(
        ("state_dict", {f"{key} {i}": copy.deepcopy(v) for i, s in states.items() for key, v in s.items()})
    )
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
            same = torch.equal(value, other[name]) if is_tensor else value == other[name]
            assert same, f"{name} after {done}: {value} != {other[name]}"


@pytest.fixture
def drives(tmp_path):
    """Options with a directory of its own for each optimizer."""
    folders = [tmp_path / str(i) for i in range(LENGTH)]
    for folder in folders:
        folder.mkdir()
    return [{"nvme": [str(folder)], "states": "host"} for folder in folders]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_where_states_live(monkeypatch, drives, dtype, seed):
    def away(room):
        return all_away(monkeypatch, room) if DEVICE == "cpu" else contextlib.nullcontext()

    with away(0):
        expected = run(seed, dtype, [{"states": "host"}] * LENGTH)
        assert_same(run(seed, dtype, drives), expected)
    for room in (1 << 20, 9000):  # all of them, and some
        with away(room):
            assert_same(run(seed, dtype, [{"states": room}] * LENGTH), expected)
    if (
        DEVICE == "cpu" and dtype == torch.float32
    ):  # 16-bit gradients that stay are scaled where they are, and rounded
        assert_same(run(seed, dtype, [{}] * LENGTH), expected)
