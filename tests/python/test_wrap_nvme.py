"""orlop.wrap with the weights of blocks on drives: the bits of weights in host memory, what host memory then holds,
reads and writes by others, errors, and what is left behind."""

from __future__ import annotations

import copy
import gc
import os
import resource
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memory_use import Peak  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from wrap_model import weights as values  # noqa: E402

import orlop  # noqa: E402
from host_link import HostLink  # noqa: E402
from orlop import deepspeed_compat, wrapping  # noqa: E402
from orlop.drive_weights import spread  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Block(torch.nn.Module):
    """A weight of several chunks, one of less than a sector, one of one element, one transposed."""

    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.first.weight = torch.nn.Parameter(self.first.weight.detach().t().contiguous().t())

    def forward(self, x):
        return torch.tanh(self.first(x)) * self.scale + x


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32, width=72, blocks=5):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 4)
        self.to(dtype)

    def forward(self, x, order=None, reentrant=None):
        x = self.inp(x)
        for index in range(len(self.blocks)) if order is None else order:
            block = self.blocks[index]
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.out(x)


def on_drives(tmp_path, share=1.0, **more):
    paths = [tmp_path / "a", tmp_path / "b"]
    return {"nvme": {"paths": paths, "slot": "28KiB", "verify": "full", "param_share": share, **more}}


def batch(step):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps=4, forward=None, first=0):
    losses = []
    for step in range(first, first + steps):
        for part in range(2):
            x = batch(100 * step + part).to(model.inp.weight.dtype)
            loss = (forward(model, x, step) if forward else model(x)).float().square().mean()
            loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


def assert_same_states(a, b):
    states_a, states_b = a.state_dict()["state"], b.state_dict()["state"]
    assert states_a.keys() == states_b.keys()
    for index, state in states_a.items():
        for key, value in state.items():
            assert torch.equal(value.cpu(), states_b[index][key].cpu()), (index, key)


def assert_no_files(tmp_path):
    assert list(tmp_path.rglob("*.swap")) == []


def end(model, optimizer, tmp_path):
    """The model is plain again, with its weights, and nothing is on the drives."""
    before = values(model)
    if optimizer is not None:
        optimizer.close()
        assert_equal(values(model), before)
    orlop.unwrap(model)
    assert_equal(values(model), before)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert_no_files(tmp_path)


def assert_same_run(tmp_path, make=Model, forward=None, share=1.0):
    """Training has the bits of weights and states in host memory."""
    reference, model = make(), make()
    _, host = orlop.wrap(reference, {"lr": 1e-2})
    _, drives = orlop.wrap(model, {"lr": 1e-2}, config=on_drives(tmp_path, share))
    assert stream_of(model).drives.bytes > 0
    assert train(model, drives, forward=forward) == train(reference, host, forward=forward)
    assert_equal(values(model), values(reference))
    assert_same_states(drives, host)
    end(model, drives, tmp_path)


# --- the same bits --------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_full_fine_tuning(tmp_path, dtype, share):
    assert_same_run(tmp_path, lambda: Model(dtype), share=share)


@pytest.mark.parametrize(
    "order",
    [
        lambda step: range(5) if step % 2 else (0, 2, 4),
        lambda step: (0, 1, 1, 2, 1, 3, 4),
        lambda step: reversed(range(5)) if step % 2 else range(5),
        lambda step: (step,),
    ],
    ids=["skipped", "repeated", "reordered", "one"],
)
def test_blocks_in_any_order(tmp_path, order):
    assert_same_run(tmp_path, forward=lambda model, x, step: model(x, order(step)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(tmp_path, reentrant):
    def forward(model, x, step):
        return model(x.requires_grad_(), reentrant=reentrant)

    assert_same_run(tmp_path, lambda: Model(torch.bfloat16), forward)


def test_tied_weights(tmp_path):
    """Those that two blocks share stay on the device."""

    def make():
        model = Model()
        model.blocks[3].first.weight = model.blocks[1].first.weight
        return model

    assert_same_run(tmp_path, make)


@DTYPES
@pytest.mark.parametrize("room", [0, 1 << 20])
def test_beside_a_device(tmp_path, monkeypatch, dtype, room):
    """Copies that run late, and states, with the weights of resident blocks, that move to the device and back."""
    reference, model = Model(dtype), Model(dtype)
    _, host = orlop.wrap(reference, {"lr": 1e-2})
    link = HostLink(torch.device("cpu"), room)
    monkeypatch.setattr(wrapping, "_device_link", lambda device, limit: link)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    config = {"limits": {"gpu": 4 * block}, **on_drives(tmp_path)}
    _, drives = orlop.wrap(model, {"lr": 1e-2}, config=config)
    assert train(model, drives) == train(reference, host)
    assert set(stream_of(model).drives.ranges()) <= set(link.ranges)
    assert len(stream_of(model).resident_blocks()) == 2
    moved = {slot.name for slot in drives._placement.on_device()}
    assert ("blocks.4.first.weight" in moved) == (room > 0)
    assert_equal(values(model), values(reference))
    for slot in drives._placement.on_device():
        drives._placement._leave(slot)
    assert train(model, drives, 2, first=4) == train(reference, host, 2, first=4)
    assert_equal(values(model), values(reference))
    assert_same_states(drives, host)
    end(model, drives, tmp_path)


class Adapter(torch.nn.Module):
    def __init__(self, base, rank=3):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapted():
    model = Model().requires_grad_(False)
    for block in model.blocks:
        block.first = Adapter(block.first)
    return model


@pytest.mark.parametrize("states", ["host", "nvme"])
def test_a_frozen_base_with_adapters(tmp_path, states):
    """With states in host memory adapters are there, too; else they are where the base is."""
    reference, model = adapted(), adapted()
    _, host = orlop.wrap(reference, {"lr": 1e-2})
    more = {"nvme": None} if states == "host" else {}
    _, optimizer = orlop.wrap(model, {"lr": 1e-2}, config=on_drives(tmp_path), **more)
    assert train(model, optimizer) == train(reference, host)
    assert_equal(values(model), values(reference))
    frozen = sum(p.nbytes for p in model.blocks.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.blocks.parameters() if p.requires_grad)
    place = optimizer.placement()["nvme"]
    assert place["weight_bytes"] == frozen + (0 if states == "host" else trained)
    assert (place["bytes"] == 0) == (states == "host")
    assert "on drives, with" in repr(optimizer)
    assert optimizer.memory_report()["slots of weights"] == stream_of(model).drives.slot_bytes
    end(model, optimizer, tmp_path)


def test_evaluation_reads_ahead(tmp_path):
    expected = Model(torch.bfloat16)
    model, nothing = orlop.wrap(Model(torch.bfloat16), config=on_drives(tmp_path))
    assert nothing is None
    with torch.no_grad():
        for step in range(3):
            x = batch(step).bfloat16()
            assert torch.equal(model(x), expected(x))
    stream = stream_of(model)
    assert stream.drives.fetches == stream.fetches == 15  # each block once per pass, none in vain
    assert stream.peak_blocks <= 2
    end(model, None, tmp_path)


# --- what others do with the weights ----------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "evaluated"])
def test_weights_are_read_and_written(tmp_path, dtype, trained):
    """Masters follow, as they do in host memory."""

    def work(config):
        model, optimizer = orlop.wrap(Model(dtype), {"lr": 1e-2} if trained else None, config=config)
        losses = train(model, optimizer, 1) if trained else []
        model.load_state_dict({name: value * 1.5 for name, value in values(model).items()})
        with torch.no_grad():
            model.blocks[0].first.weight.copy_(torch.full((72, 72), 0.01))
        model.blocks[1].first.bias.data.mul_(2.0)
        model.blocks[2].scale.data = torch.full((1,), 0.75, dtype=dtype)
        model.blocks[3].first.bias.data.zero_()
        model.blocks[3].first.weight.data[1].fill_(0.25)
        for row in model.blocks[2].first.weight.data:
            row[2:4] *= 2.0
        with orlop.gathered(model.blocks[4], write=True), torch.no_grad():
            model.blocks[4].first.weight.add_(0.125)
        losses += train(model, optimizer, 2, first=1) if trained else [model(batch(7).to(dtype)).sum().item()]
        return model, optimizer, losses

    reference, host, expected = work("auto")
    model, optimizer, losses = work(on_drives(tmp_path))
    assert losses == expected
    assert_equal(values(model), values(reference))
    with torch.no_grad(), orlop.gathered(model):
        copied = copy.deepcopy(model.blocks)
    assert_equal(values(copied), values(reference.blocks))
    assert "weights on drives" in repr(model.blocks[0].first.weight)
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\.first\.weight"):
        model.blocks[0].first.weight + 1
    if trained:
        assert_same_states(optimizer, host)
        p, q = model.blocks[1].first.weight, reference.blocks[1].first.weight
        assert torch.equal(optimizer.master(p), host.master(q))
        for which, owner in ((p, optimizer), (q, host)):
            owner.set_master(which, owner.master(which) * 1.25)
        assert train(model, optimizer, 2, first=3) == train(reference, host, 2, first=3)
    assert_equal(values(model), values(reference))
    end(model, optimizer, tmp_path)


def test_states_and_weights_go_on_elsewhere(tmp_path):
    model, optimizer = orlop.wrap(Model(torch.bfloat16), {"lr": 1e-2}, config=on_drives(tmp_path))
    train(model, optimizer)
    saved, states = values(model), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, 2, first=4)
    for config in (on_drives(tmp_path), "auto"):
        again, other = orlop.wrap(Model(torch.bfloat16), {"lr": 1.0}, config=config)
        other.load_state_dict(states)
        again.load_state_dict(saved)
        assert train(again, other, 2, first=4) == expected
        assert_equal(values(again), values(model))
        other.close()
        orlop.unwrap(again)
    end(model, optimizer, tmp_path)


# --- memory ---------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
def test_host_memory_does_not_hold_the_weights(tmp_path, trained):
    """64 MiB of weights, of which no more than a few blocks of 2 MiB are there at once, also when they are wrapped."""
    with torch.no_grad():
        model = torch.nn.Sequential()
        model.blocks = torch.nn.ModuleList(torch.nn.Linear(724, 724, bias=False) for _ in range(32))
    size = sum(p.nbytes for p in model.parameters())
    assert size > 63 * MIB
    config = on_drives(tmp_path, verify="sample", slot="1MiB")
    with Peak() as wrapped:
        orlop.wrap(model, {"lr": 1e-3} if trained else None, config=config)
    gradients = size if trained else 0  # which wait in host memory
    assert wrapped.left < gradients - size + 20 * MIB
    x = torch.randn(4, 724)
    with Peak() as used, torch.no_grad():
        for block in model.blocks:
            x = torch.tanh(block(x))
        stream_of(model).end_pass()
    assert used.bytes < 16 * MIB
    assert stream_of(model).drives.bytes == size


# --- errors and ends --------------------------------------------------------------------------------


def assert_refused(tmp_path, config, error, text, optimizer=None):
    """The model stays the plain one that it was."""
    model, reference = Model(), Model()
    with pytest.raises(error, match=text):
        orlop.wrap(model, optimizer, config=config)
    assert_equal(values(model), values(reference))
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert torch.equal(model(batch(1)), reference(batch(1)))
    assert_no_files(tmp_path)


def test_what_cannot_work_is_refused(tmp_path):
    (tmp_path / "a").write_text("no directory")
    assert_refused(tmp_path, on_drives(tmp_path), orlop.UsageError, "a.*directory")
    os.unlink(tmp_path / "a")
    small = {"nvme": {"paths": [tmp_path / "a"], "slot": "24KiB", "param_share": 1}}
    assert_refused(tmp_path, small, orlop.UsageError, "24576 bytes is too small .* at least 28672")
    assert_refused(tmp_path, {"nvme": {"param_share": 0.5}}, orlop.UsageError, "paths names no directory")
    assert_refused(tmp_path, {"nvme": {"paths": [], "param_share": 2}}, orlop.UsageError, r"within 0\.\.1")
    with pytest.raises(orlop.UsageError, match="param_share"):
        orlop.AdamW(Model().parameters(), nvme=on_drives(tmp_path)["nvme"])
    model = Model()
    with pytest.raises(orlop.UsageError, match=r"blocks\.0\..* train with optimizer states in host memory"):
        orlop.wrap(model, {"lr": 1e-2}, config=on_drives(tmp_path), nvme=None)
    assert_equal(values(model), values(Model()))


def test_a_full_drive(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limit[1]))
    try:
        assert_refused(tmp_path, on_drives(tmp_path), (orlop.IoError, orlop.DoesNotFitError), "bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
def test_a_damaged_file_is_one_error_that_names_the_weight(tmp_path, trained):
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2} if trained else None, config=on_drives(tmp_path))
    if trained:
        train(model, optimizer, 1)
        optimizer.synchronize()
    with torch.no_grad():
        for path in tmp_path.rglob("*.swap"):
            os.truncate(path, 8192)
        with pytest.raises(orlop.IoError, match=r"'blocks\.\d\..* has 8192 bytes"):
            model(batch(1))
        with pytest.raises(orlop.IoError, match=r"blocks\."):
            model(batch(1))
    if trained:
        with pytest.raises(orlop.IoError):
            optimizer.step()
        with pytest.raises(orlop.IoError):
            optimizer.close()
    with pytest.raises(orlop.IoError):
        orlop.unwrap(model)
    del model, optimizer
    gc.collect()
    assert_no_files(tmp_path)


@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
def test_nothing_is_left_of_a_model_that_is_dropped(tmp_path, trained):
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2} if trained else None, config=on_drives(tmp_path))
    with torch.no_grad():
        model(batch(0))
    assert list(tmp_path.rglob("*.swap"))
    del model, optimizer
    gc.collect()
    assert_no_files(tmp_path)


def test_a_file_configures_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"limits: {{gpu: 1GiB}}\nnvme: {{paths: [{tmp_path}/a], param_share: 0.5}}\n")
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2}, config=Path(file))
    blocks = [block for block in stream_of(model).blocks if block.is_on_drives]
    assert len(blocks) == 3
    train(model, optimizer, 1)
    end(model, optimizer, tmp_path)


def test_blocks_on_drives_are_spread():
    assert spread([10] * 8, 0.5) == [0, 2, 4, 6]
    assert spread([10] * 8, 0.25) == [1, 5]
    assert spread([10] * 4, 1.0) == [0, 1, 2, 3]
    assert spread([10] * 4, 0.0) == []
    assert spread([0, 10, 0], 1.0) == [1]


def test_the_deepspeed_door(tmp_path):
    def engine(optimizer, param):
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_param": param},
            "aio": {"block_size": 8192, "queue_depth": 4},
        }
        return deepspeed_compat.initialize(model=Model(), config=config)[0]

    def run(made, steps=3):
        losses = []
        for step in range(steps):
            loss = made(batch(step).bfloat16()).float().square().mean()
            made.backward(loss)
            made.step()
            losses.append(loss.item())
        return losses

    host, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    expected, model = engine(host, host), engine(nvme, nvme)
    assert run(model) == run(expected)
    assert_equal(values(model.module), values(expected.module))
    size = sum(p.nbytes for p in model.module.blocks.parameters())
    assert model.optimizer.placement()["nvme"]["weight_bytes"] == size
    model.save_checkpoint(tmp_path / "saved")
    again = engine(host, host)
    again.load_checkpoint(tmp_path / "saved")
    assert_equal(values(again.module), values(expected.module))
    with pytest.raises(orlop.UsageError, match=r"offload_optimizer\.device"):
        engine(host, nvme)
    with pytest.raises(orlop.UsageError, match=r"offload_param\.nvme_path"):
        engine(nvme, {"device": "nvme"})
    model.destroy()
    orlop.unwrap(model.module)
    assert_no_files(tmp_path)
