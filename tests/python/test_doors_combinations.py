"""Every class and every door with every place of states: built, trained, and the same bits."""

from __future__ import annotations

import gc
import itertools
import logging
import re

import pytest

torch = pytest.importorskip("torch")

from memory_use import arena_bytes  # noqa: E402

import orlop  # noqa: E402
from host_link import all_away  # noqa: E402
from orlop import deepspeed_compat  # noqa: E402
from orlop.config import OPTIONS, OneOf, RunConfig  # noqa: E402
from orlop.deepspeed_compat.ops.adam import DeepSpeedCPUAdam, FusedAdam  # noqa: E402
from orlop.deepspeed_keys import OPTIMIZERS, SCHEDULERS  # noqa: E402
from orlop.engine_config import engine_config  # noqa: E402

SLOT = "20KiB"


class Model(torch.nn.Module):
    """With one weight of a single element."""

    def __init__(self, dtype=torch.float32, width=24, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x * self.scale


def batch(step, dtype):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model, optimizer, steps):
    losses = []
    for step in range(steps):
        loss = model(batch(step, model.scale.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def drives(tmp_path):
    return {"paths": [tmp_path / "drive"], "slot": SLOT}


# --- every class ----------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, 4000])
@pytest.mark.parametrize("kind", [orlop.Adam, orlop.AdamW, DeepSpeedCPUAdam, FusedAdam])
def test_every_optimizer_with_every_placement(monkeypatch, tmp_path, kind, room):
    """Case B-10: on the CPU, and beside a device with some room; the same losses."""
    expected = {}
    for hidden, gradients, moments, states, on_drives in itertools.product(
        (False, True), ("leave", "stay"), ("fp32", "bf16"), ("auto", "host", 3000), (False, True)
    ):
        model = Model(torch.bfloat16)
        options = {"nvme": drives(tmp_path)} if on_drives else {}
        options |= {"gradients": gradients, "moments": moments, "states": states}
        options |= {"module": model} if hidden else {}
        away = all_away(monkeypatch, room) if room is not None else monkeypatch.context()
        with away:
            optimizer = kind(model.parameters(), lr=1e-2, **options)
            losses = train(model, optimizer, 2)
            optimizer.close()
        assert losses == expected.setdefault(moments, losses), options


@pytest.mark.parametrize("blocks", [None, "given"])
@pytest.mark.parametrize("given", ["none", "mapping", "torch"])
def test_every_wrapped_model(tmp_path, given, blocks):
    """Case B-10: with every form of its arguments."""
    expected = None
    for limit, on_drives, states in itertools.product(
        ("1GiB", 2 * 2 * 600), (False, True), ("auto", "host", 3000)
    ):
        model = Model(torch.bfloat16)
        optimizer = {
            "none": None,
            "mapping": {"lr": 1e-2},
            "torch": torch.optim.AdamW(model.parameters(), lr=1e-2),
        }[given]
        config = {"limits": {"gpu": limit}} | ({"nvme": drives(tmp_path)} if on_drives else {})
        chosen = {} if blocks is None else {"blocks": list(model.blocks)}
        model, optimizer = orlop.wrap(model, optimizer, config=config, **chosen, states=states)
        if optimizer is None:
            with torch.no_grad():
                losses = [model(batch(0, torch.bfloat16)).float().sum().item()]
        else:
            losses = train(model, optimizer, 3)
            optimizer.close()
        expected = expected or losses
        assert losses == expected


# --- weights and states, each where it can be -----------------------------------------------------


def groups_of(model, count):
    """The last of more than one group has a single small weight."""
    small, rest = [model.scale], [p for p in model.parameters() if p is not model.scale]
    cut = {1: [rest + small], 2: [rest, small], 3: [rest[:3], rest[3:], small]}[count]
    return [{"params": params, "weight_decay": 0.1 * i} for i, params in enumerate(cut)]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_weights_and_states_in_every_memory(monkeypatch, tmp_path, groups):
    """Cases S-17, S-18: five steps in the bits of host memory, or one sentence that says what is refused and what to
    do: weights that train on drives, without their states."""

    def run(weights, states):
        model = Model(torch.bfloat16)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": weights, "nvme_path": str(tmp_path)},
                "offload_optimizer": {"device": states, "nvme_path": str(tmp_path)},
            },
        }
        engine, *_ = deepspeed_compat.initialize(
            model=model, model_parameters=groups_of(model, groups), config=config
        )
        losses = []
        for step in range(5):
            loss = engine(batch(step, torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.optimizer.synchronize()
        bits = [value.clone() for value in engine.module.state_dict().values()]
        engine.destroy()
        return losses, bits

    losses, bits = run("cpu", "cpu")
    for weights, states in itertools.product(("none", "cpu", "nvme"), repeat=2):
        if weights == "nvme" != states:
            with pytest.raises(
                orlop.UsageError, match=r"give the states drives too .*offload_optimizer\.device"
            ):
                run(weights, states)
            continue
        with all_away(monkeypatch, 1 << 20) if weights == states == "none" else monkeypatch.context():
            got, got_bits = run(weights, states)
        assert got == losses, (weights, states)
        assert all(torch.equal(a, b) for a, b in zip(got_bits, bits, strict=True)), (weights, states)


def test_a_torch_optimizer_whose_states_go_to_drives(tmp_path, caplog):
    """Case S-22: its update is the host's; one line says where states and update are."""
    model = Model()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with caplog.at_level(logging.INFO, logger="orlop"):
        optimizer = orlop.AdamW.from_torch(theirs, nvme=drives(tmp_path))
        train(model, optimizer, 3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "drive" in line and "the update runs on the CPU" in line
    assert type(optimizer) is orlop.AdamW and set(optimizer.placement()) == {"nvme"}
    optimizer.close()


def test_names_that_no_file_could_have(tmp_path):
    """Case S-14: 400 characters, with slashes and letters beyond ASCII; files are named after ranks."""

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = [prefix + "ключ/длинный" * 33 for prefix in "ab"]
            for name in self.names:
                self.register_parameter(name, torch.nn.Parameter(torch.linspace(-1, 1, 9000)))
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return sum((self.get_parameter(name) * x[0, 0]).square() for name in self.names) * self.scale

    models = [Named(), Named()]
    assert len(models[0].names[0]) >= 397
    host = orlop.AdamW(models[0].parameters(), lr=1e-2, module=models[0])
    on_drives = orlop.AdamW(models[1].parameters(), lr=1e-2, module=models[1], nvme=drives(tmp_path))
    assert train(models[1], on_drives, 3) == train(models[0], host, 3)
    (path,) = (tmp_path / "drive").iterdir()
    assert re.fullmatch(r"orlop-r\d+\.swap", path.name)
    assert models[0].names[0] in on_drives.placement()["nvme"]["parameters"]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(host.state[p]["exp_avg"], on_drives.state[q]["exp_avg"] + 0)
    on_drives.close()


# --- bytes ----------------------------------------------------------------------------------------


def test_the_report_of_memory_is_what_is_held():
    """Case R-12: by purpose, together what was mapped, and 12 bytes per bf16 weight with gradients that leave."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    gc.collect()  # what earlier tests have left goes now, not in between
    before = arena_bytes()
    optimizer = orlop.AdamW(model.parameters(), gradients="leave")
    report = optimizer.memory_report()
    assert sum(report.values()) == pytest.approx(arena_bytes() - before, rel=0.01)
    assert sum(report.values()) == pytest.approx(12 * count, rel=0.03)
    assert {"masters", "moments", "gradients"} <= report.keys()
    optimizer.close()


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1])
def test_a_share_of_the_states_on_the_device(monkeypatch, share):
    """Case U-03: bytes on the device follow the share within 5 % of all of them."""
    with all_away(monkeypatch, 1 << 24):
        everything = placed_bytes(None)["cpu"]
        placed = placed_bytes(int(1.2 * share * everything))  # with 2 bytes of gradient for 10 of states
    assert placed.get("cpu", 0) == pytest.approx(share * everything, abs=0.05 * everything)
    assert placed.get("cpu", 0) <= share * everything


def placed_bytes(limit):
    model = Model(torch.bfloat16, blocks=40)
    optimizer = orlop.AdamW(model.parameters(), module=model, states="auto" if limit is None else limit)
    train(model, optimizer, 2)
    report = {where: place["bytes"] for where, place in optimizer.placement().items()}
    optimizer.close()
    return report


# --- what is listed works -------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_deepspeed_configuration_may_name_trains(name, scheduler):
    """Case U-10: every optimizer with every scheduler, three steps."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": name, "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    if scheduler is not None:
        needed = {"total_num_steps": 6} if "total_num_steps" in SCHEDULERS[scheduler] else {}
        config["scheduler"] = {"type": scheduler, "params": {"warmup_num_steps": 2, **needed}}
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    engine, *_ = deepspeed_compat.initialize(model=model, config=config)
    for step in range(3):
        engine.backward(engine(batch(step, torch.float32)).square().mean())
        engine.step()
    engine.optimizer.synchronize()
    assert engine.global_steps == 3
    assert not any(torch.equal(p, q) for p, q in zip(engine.module.parameters(), before, strict=True))
    engine.destroy()


def listed_values():
    """Options of a run that a list of names belongs to, and that the engine sees."""
    values = [
        (name, value)
        for name, option in OPTIONS.items()
        if isinstance(option.parse, OneOf) and name != "train_on"
        for value in option.parse.names
    ]
    values.remove(("nvme_engine", "io_uring"))  # not every machine has it; auto takes it where it is there
    return values


@pytest.mark.parametrize(("option", "value"), listed_values())
def test_what_a_run_may_name_trains(model_dir, token_file, tmp_path, option, value):
    """Case U-10: each value of each list, three steps."""
    values = {"device": "host", "seq_len": 32, "micro_batch": 2, "accum": 1, "lr": 1e-3, option: value}
    if option.startswith("nvme") or value == "nvme":
        values["nvme"] = [str(tmp_path / "swap")]
    config = engine_config(RunConfig(values), 3)
    loader = orlop.DataLoader(str(token_file), config.batch, seed=1, shuffle=True)
    with orlop.Engine.open(str(model_dir("llama")), config) as engine:
        losses = [engine.step([loader.next()]).loss for _ in range(3)]
    assert all(loss == loss for loss in losses)
