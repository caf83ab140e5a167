"""Optimizer states on drives behind the PyTorch doors: the bits of states in host memory, checkpoints, errors."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import orlop  # noqa: E402
from host_link import all_away  # noqa: E402
from orlop import deepspeed_compat  # noqa: E402
from orlop.drive_home import DriveHome  # noqa: E402
from orlop.home_tensor import HomeTensor  # noqa: E402

LAYOUTS = pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "bf16"),
    ],
)
SLOT = "20KiB"  # a few chunks for the larger weights, one for the others


class Model(torch.nn.Module):
    """With weights of one element, of a part of a sector and of several chunks, one of them transposed."""

    def __init__(self, dtype=torch.float32, width=72, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 4)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.out.weight = torch.nn.Parameter(self.out.weight.detach().t().contiguous().t())
        self.to(dtype)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.out(x) * self.scale


def drives(tmp_path, count=2, **more):
    return {"paths": [tmp_path / f"drive-{i}" for i in range(count)], "slot": SLOT, "verify": "full", **more}


def train(model, optimizer, steps=4, first=0, micro_batches=2):
    losses = []
    for step in range(first, first + steps):
        for part in range(micro_batches):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + part))
            loss = model(x.to(model.inp.weight.dtype)).float().square().mean()
            loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def assert_same_run(make, tmp_path, dtype=torch.float32):
    """`make(model, nvme)` trains with the bits of states in host memory; nothing is left behind."""
    reference, model = Model(dtype), Model(dtype)
    host, on_drives = make(reference, None), make(model, drives(tmp_path))
    assert train(model, on_drives) == train(reference, host)
    assert_equal(weights(model), weights(reference))
    assert_equal(on_drives.state_dict(), host.state_dict())
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(host.master(p), on_drives.master(q))
    assert set(host.placement()) == {"host"} and set(on_drives.placement()) == {"nvme"}
    assert "on drives" in repr(on_drives)
    kept, left = host.memory_report(), on_drives.memory_report()
    assert kept["moments"] > 0 and "moments" not in left
    assert left["slots of drives"] == 5 * 20 * 1024
    for purpose in kept.keys() - {"moments", "masters", "alignment"}:
        assert left[purpose] == kept[purpose]
    assert ("masters" in left) == (dtype == torch.float32 and "masters" in kept)
    on_drives.close()
    assert_no_files(tmp_path)


def assert_no_files(tmp_path):
    assert [path for path in tmp_path.rglob("*.swap")] == []


# --- the doors ------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("gradients", ["stay", "leave"])
def test_the_optimizer_door(tmp_path, dtype, moments, gradients):
    def make(model, nvme):
        return orlop.AdamW(model.parameters(), lr=1e-2, moments=moments, gradients=gradients, nvme=nvme)

    assert_same_run(make, tmp_path, dtype)


def test_the_update_hides_under_the_next_forward(tmp_path):
    def make(model, nvme):
        return orlop.AdamW(model.parameters(), lr=1e-2, module=model, nvme=nvme)

    assert_same_run(make, tmp_path, torch.bfloat16)


@LAYOUTS
def test_the_streaming_door(tmp_path, dtype, moments):
    reference, model = Model(dtype), Model(dtype)
    _, host = orlop.wrap(reference, {"lr": 1e-2, "moments": moments})
    config = {"limits": {"gpu": "1GiB"}, "nvme": drives(tmp_path)}
    _, on_drives = orlop.wrap(model, {"lr": 1e-2, "moments": moments}, config=config)
    assert train(model, on_drives) == train(reference, host)
    assert_equal(weights(model), weights(reference))
    assert_equal(on_drives.state_dict(), host.state_dict())
    assert set(on_drives.placement()) == {"nvme"}
    # Weights that somebody loads are what the master is from then on, also on the drives.
    for wrapped, optimizer in ((reference, host), (model, on_drives)):
        wrapped.load_state_dict({name: value * 1.5 for name, value in weights(wrapped).items()})
        train(wrapped, optimizer, 2, first=4)
    assert_equal(weights(model), weights(reference))
    assert_equal(on_drives.state_dict(), host.state_dict())
    on_drives.close()
    assert_no_files(tmp_path)


@LAYOUTS
def test_weights_that_are_loaded_after_the_states_meet_their_masters(tmp_path, dtype, moments):
    model = Model(dtype)
    _, optimizer = orlop.wrap(model, {"lr": 1e-2, "moments": moments})
    train(model, optimizer)
    states, saved = copy.deepcopy(optimizer.state_dict()), weights(model)
    expected = train(model, optimizer, 2, first=4)
    again = Model(dtype)
    config = {"limits": {"gpu": "1GiB"}, "nvme": drives(tmp_path)}
    _, other = orlop.wrap(again, {"lr": 1.0, "moments": moments}, config=config)
    other.load_state_dict(states)
    again.load_state_dict(saved)
    assert train(again, other, 2, first=4) == expected
    assert_equal(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert_equal(weights(again), weights(model))


def test_the_streaming_door_reads_drives_from_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"limits: {{gpu: 1GiB}}\nnvme: {{paths: [{tmp_path}/a], queue_depth: 4, engine: threads}}\n"
    )
    model = Model()
    _, optimizer = orlop.wrap(model, {"lr": 1e-2}, config=file)
    train(model, optimizer, 1)
    assert set(optimizer.placement()) == {"nvme"} and list((tmp_path / "a").glob("*.swap"))
    optimizer.close()


def deepspeed(model, offload, dtype="bf16"):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        dtype: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu"}},
        "aio": {"block_size": 8192, "queue_depth": 4},
    }
    return deepspeed_compat.initialize(model=model, config=config)[0]


def run_engine(engine, steps=4, first=0):
    losses = []
    for step in range(2 * first, 2 * (first + steps)):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(x.to(engine.device, torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.optimizer.synchronize()
    return losses


def test_the_deepspeed_door_and_its_checkpoints(tmp_path):
    on_nvme = {
        "device": "nvme",
        "nvme_path": str(tmp_path / "nvme"),
        "pipeline_read": True,
        "buffer_count": 4,
    }
    host, nvme = deepspeed(Model(), {"device": "cpu"}), deepspeed(Model(), on_nvme)
    assert run_engine(nvme) == run_engine(host)
    assert set(nvme.optimizer.placement()) == {"nvme"}
    assert_equal(nvme.optimizer.state_dict(), host.optimizer.state_dict())
    p = nvme.module.blocks[0].weight
    moment = deepspeed_compat.utils.safe_get_full_optimizer_state(p, "exp_avg")
    assert type(moment) is torch.Tensor
    assert torch.equal(moment, nvme.optimizer.state[p]["exp_avg"].float())
    for engine, folder in ((host, "of-host"), (nvme, "of-nvme")):
        engine.save_checkpoint(tmp_path / folder)
    expected = run_engine(host, 2, first=4)
    nvme.destroy()
    # Each goes on from the other's.
    for offload, folder in ((on_nvme, "of-host"), ({"device": "cpu"}, "of-nvme"), (on_nvme, "of-nvme")):
        engine = deepspeed(Model(), offload)
        engine.load_checkpoint(tmp_path / folder)
        assert run_engine(engine, 2, first=4) == expected
        assert_equal(engine.optimizer.state_dict(), host.optimizer.state_dict())
        engine.destroy()
    assert_no_files(tmp_path)


def test_a_checkpoint_reads_one_state_at_a_time(tmp_path, monkeypatch):
    engine = deepspeed(Model(), {"device": "nvme", "nvme_path": [str(tmp_path / "nvme")]})
    run_engine(engine, 1)
    read, here, most = DriveHome.read_plane, [], 0

    def observed(home, key):
        nonlocal most
        value = read(home, key)
        here.append(weakref.ref(value))
        most = max(most, sum(reference() is not None for reference in here))
        return value

    monkeypatch.setattr(DriveHome, "read_plane", observed)
    engine.save_checkpoint(tmp_path / "saved")
    assert len(here) == 3 * len(list(engine.module.parameters())) and most == 1
    saved = load_file(next((tmp_path / "saved").rglob("optimizer.safetensors")))
    for name, p in engine.module.named_parameters():
        for key, value in engine.optimizer.state[p].items():
            assert key == "step" or torch.equal(saved[f"{name}.{key}"], value)
    engine.destroy()


def test_a_deepspeed_configuration_without_a_path(tmp_path):
    with pytest.raises(orlop.UsageError, match="nvme_path"):
        deepspeed(Model(), {"device": "nvme"})
    model = Model()
    config = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with pytest.raises(orlop.UsageError, match="nvme="):
        deepspeed_compat.initialize(model=model, optimizer=orlop.AdamW(model.parameters()), config=config)


# --- states ---------------------------------------------------------------------------------------


@LAYOUTS
def test_state_dicts_go_both_ways(tmp_path, dtype, moments):
    model = Model(dtype)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-2, moments=moments, nvme=drives(tmp_path))
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, 3, first=4)
    for nvme in (drives(tmp_path), None):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = Model(dtype)
        other = orlop.AdamW(again.parameters(), moments=moments, nvme=nvme)
        again.load_state_dict(saved["weights"])
        other.load_state_dict(saved["optimizer"])
        assert train(again, other, 3, first=4) == expected
        assert_equal(weights(again), weights(model))
        assert_equal(other.state_dict(), optimizer.state_dict())


def test_states_of_torch_are_taken_over_and_given_back(tmp_path):
    model, reference = Model(), Model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(2):
        reference(torch.full((4, 8), step + 1.0)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    model.load_state_dict(reference.state_dict())
    ours = orlop.AdamW.from_torch(torch.optim.AdamW(model.parameters(), lr=1e-2), nvme=drives(tmp_path))
    ours.load_state_dict(theirs.state_dict())
    assert_equal(ours.state_dict()["state"], theirs.state_dict()["state"])
    train(model, ours)
    theirs.load_state_dict(ours.state_dict())
    assert all(type(state["exp_avg"]) is torch.Tensor for state in theirs.state.values())
    assert_equal(theirs.state_dict()["state"], ours.state_dict()["state"])


def test_a_state_on_drives_is_used_as_a_tensor(tmp_path):
    model, reference = Model(torch.bfloat16), Model(torch.bfloat16)
    on_drives = orlop.AdamW(model.parameters(), lr=1e-2, nvme=drives(tmp_path))
    host = orlop.AdamW(reference.parameters(), lr=1e-2)
    for which, optimizer in ((model, on_drives), (reference, host)):
        train(which, optimizer, 2)
        for p in which.parameters():
            state = optimizer.state[p]
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"][...] = state["exp_avg_sq"] * 2
            optimizer.set_master(p, optimizer.master(p) * 1.25)
        some = [optimizer.state[p]["exp_avg"] for p in which.blocks.parameters()]
        torch._foreach_mul_(some, 2.0)
        torch.add(some[0], some[0], out=some[0])
        some[0].t()[1].fill_(0.25)
        some[1][1:3].add_(some[1][0])
        some[2].view(-1)[::2] *= 2.0
        state = optimizer.state[which.out.weight]
        state["exp_avg"].zero_()
        state["exp_avg_sq"].copy_(torch.ones(1))
        del optimizer.state[which.inp.weight]  # starts anew
        train(which, optimizer, 2, first=2)
    assert_equal(on_drives.state_dict(), host.state_dict())
    assert_equal(weights(model), weights(reference))
    state = on_drives.state[model.out.weight]["exp_avg"]
    assert isinstance(state, HomeTensor) and "HomeTensor" in repr(state)
    assert state.shape == model.out.weight.shape and state.nbytes == 4 * state.numel()
    expected = host.state[reference.out.weight]["exp_avg"]
    for copied in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        state.clone(),
        state + 0,
        state.cpu(),
    ):
        assert type(copied) is torch.Tensor and torch.equal(copied, expected)
    assert torch.equal(torch.maximum(expected, state), expected)
    with pytest.raises(orlop.UsageError, match="copy_"):
        state.data = expected


@pytest.mark.parametrize("on_nvme", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_master_follows_weights_that_are_written_in_place(tmp_path, dtype, on_nvme):
    model = Model(dtype)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-2, nvme=drives(tmp_path) if on_nvme else None)
    weight = model.blocks[0].weight
    assert torch.equal(optimizer.master(weight), weight.float())
    train(model, optimizer, 1)
    with torch.no_grad():
        weight[1, 2:5] = 7.5
    assert torch.equal(optimizer.master(weight)[1, 2:5].to(dtype), weight[1, 2:5])
    assert torch.equal(optimizer.master(weight)[0].to(dtype), weight[0])


def test_a_parameter_without_elements_and_an_end(tmp_path):
    empty, some = torch.nn.Parameter(torch.empty(0, 3)), torch.nn.Parameter(torch.ones(3, 5))
    optimizer = orlop.AdamW([empty, some], nvme=drives(tmp_path))
    for p in (empty, some):
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert state[0]["exp_avg"].shape == (0, 3) and float(state[1]["exp_avg"].sum()) > 0
    optimizer.close()
    with pytest.raises(orlop.UsageError, match="closed"):
        state[1]["exp_avg"].sum()


def test_more_parameters_come_later(tmp_path):
    def run(nvme):
        model = Model()
        optimizer = orlop.AdamW(model.blocks.parameters(), lr=1e-2, nvme=nvme)
        rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
        losses = train(model, optimizer, 2)
        optimizer.add_param_group({"params": rest, "lr": 1e-3})
        return losses + train(model, optimizer, 2, first=2), weights(model), optimizer

    expected, reference, _ = run(None)
    losses, got, optimizer = run(drives(tmp_path))
    assert losses == expected
    assert_equal(got, reference)
    assert set(optimizer.placement()) == {"nvme"}


@pytest.mark.parametrize("room", [0, 60000, 1 << 30])
def test_beside_a_device_that_takes_what_fits(tmp_path, monkeypatch, room):
    def run(nvme):
        with all_away(monkeypatch, room):
            model = Model(torch.bfloat16)
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model, nvme=nvme)
            losses = train(model, optimizer)
            states = copy.deepcopy(optimizer.state_dict()["state"])
            places = set(optimizer.placement())
            optimizer.close()
            return (losses, weights(model), states), places

    expected, _ = run(None)
    got, places = run(drives(tmp_path))
    assert_equal(got, expected)
    assert places == ({"nvme"} if room == 0 else {"cpu"} if room > 1e6 else {"nvme", "cpu"})
    assert_no_files(tmp_path)


# --- files and errors -----------------------------------------------------------------------------


def test_optimizers_of_one_process_share_a_directory(tmp_path):
    """Case S-15: each has a file of its own, and the losses of a run alone."""
    models = [Model(), Model()]
    optimizers = [orlop.AdamW(m.parameters(), nvme=[str(tmp_path)]) for m in models]
    assert len(list(tmp_path.glob("*.swap"))) == 2
    alone = Model()
    expected = train(alone, orlop.AdamW(alone.parameters()), 20)
    losses = [[], []]
    for step in range(20):
        for own, model, optimizer in zip(losses, models, optimizers, strict=True):
            own += train(model, optimizer, 1, first=step)
    assert losses == [expected, expected]
    for optimizer in optimizers:
        optimizer.close()
    assert_no_files(tmp_path)


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(orlop.UsageError, match="file"):
        orlop.AdamW(Model().parameters(), nvme=tmp_path / "file")


@pytest.mark.parametrize(
    ("nvme", "text"),
    [
        ({"paths": []}, "no directory"),
        ({"path": "x"}, "'path' is not known"),
        ({"paths": ["x"], "engine": "spdk"}, "engine"),
        ({"paths": ["x"], "slot": "much"}, "slot"),
        ({"paths": ["x"], "slot": 5000}, "5000"),
    ],
)
def test_options_that_cannot_work(tmp_path, monkeypatch, nvme, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(orlop.UsageError, match=text):
        orlop.AdamW(Model().parameters(), nvme=nvme)


def test_a_damaged_file_is_one_error_that_names_it(tmp_path):
    model = Model()
    optimizer = orlop.AdamW(model.parameters(), lr=1e-2, module=model, nvme=drives(tmp_path, 1))
    train(model, optimizer, 1)
    (path,) = tmp_path.rglob("*.swap")
    os.truncate(path, 8192)
    with pytest.raises(orlop.IoError, match=f"of 'scale'.*{path.name} has 8192 bytes") as first:
        train(model, optimizer, 1)
    with pytest.raises(orlop.IoError) as second:
        optimizer.synchronize()
    assert str(second.value) == str(first.value)
    optimizer.close()
    assert_no_files(tmp_path)


def test_nothing_is_left_without_close(tmp_path):
    model = Model()
    optimizer = orlop.AdamW(model.parameters(), nvme=tmp_path)
    train(model, optimizer, 1)
    assert list(Path(tmp_path).glob("*.swap"))
    del optimizer
    gc.collect()
    assert_no_files(tmp_path)
