"""Checkpoints of deepspeed_compat: they resume, are whole or not there, and leave alone what is not theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from deepspeed_net import Net, assert_close, data, make, plain, train, usual_log_level, weights  # noqa: E402, F401

import orlop  # noqa: E402
from orlop import deepspeed_compat as deepspeed  # noqa: E402


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_resume_equals_straight_run(precision, tmp_path):
    """Cases C-07, C-08, C-10: new engine, and the one that saved; steps, scale, schedule, client state."""
    options = {precision: {"enabled": True}} if precision else {}
    options["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 30}}
    engine = make(**options)
    train(engine, 10)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "names": ["a"]})
    expected = train(engine, 10, first=10)
    final = weights(engine)
    for other in (make(**options), engine):
        path, client = other.load_checkpoint(tmp_path)
        assert path.endswith("global_step10") and client == {"epoch": 3, "names": ["a"]}
        assert other.global_steps == 10
        other.save_checkpoint(tmp_path / "again", tag="x")
        assert train(other, 10, first=10) == expected
        assert all(torch.equal(a, b) for a, b in zip(weights(other), final, strict=True))
    for name in ("model", "optimizer"):
        first = (tmp_path / "global_step10" / f"{name}.safetensors").read_bytes()
        assert first == (tmp_path / "again" / "x" / f"{name}.safetensors").read_bytes()


SCHEDULERS = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 5, 5, 8], 0.5),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 2),
            torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 6], 0.5),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on(name, tmp_path):
    """Milestones are counted by numbers, which JSON has as text."""

    def build():
        engine, *_ = deepspeed.initialize(
            model=Net(), lr_scheduler=SCHEDULERS[name],
            config={"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
        )  # fmt: skip
        return engine

    def rates(engine):
        found = []
        for step in range(6):
            train(engine, 1, first=4 + step)
            found.append(engine.get_lr())
        return found

    engine = build()
    train(engine, 4)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine)
    assert len({rate for (rate,) in expected}) > 1
    other = build()
    other.load_checkpoint(tmp_path)
    assert rates(other) == expected


def test_client_state_comes_back_as_it_was(tmp_path):
    """Keys that are no text, tuples, counters, and dicts that look like their tags; state.json stays JSON."""
    import json
    from collections import Counter

    client = {
        1: "a", None: True, 2.5: [], ("a", 1): {}, "t": (1, (2.0, "x"), []), "c": Counter({3: 1, "b": 2}), "e": (),
        "nested": [{"k": {0: (None,)}}], "$": "tuple", "tag": {"$": "tuple", "of": [1]}, "plain": {"a": [1, "b"]},
    }  # fmt: skip
    engine = make()
    engine.save_checkpoint(tmp_path, tag="t", client_state=client)
    state = json.loads((tmp_path / "t" / "state.json").read_text())
    assert dict(state["client_state"]["of"][-1:]) == {"plain": {"a": [1, "b"]}}
    back = engine.load_checkpoint(tmp_path)[1]
    assert back == client and [type(key) for key in back] == [type(key) for key in client]
    assert type(back["c"]) is Counter and type(back["t"][1]) is tuple
    endless = {}
    endless["x"] = [endless]
    for bad, place in (
        (endless, "contains itself"),
        ({"x": [{1: {2}}]}, r"client_state\['x'\]\[0\]\[1\] is a set"),
        ({frozenset(): 1}, "client_state, a key is a frozenset"),
    ):
        with pytest.raises(orlop.UsageError, match=place):
            engine.save_checkpoint(tmp_path / "bad", client_state=bad)
    assert not (tmp_path / "bad").exists()


def test_a_checkpoint_without_tags_loads(tmp_path):
    """Format 1, in which a dict that looks like a tag is itself."""
    import json

    engine = make()
    train(engine, 2)
    engine.save_checkpoint(tmp_path, tag="t")
    path = tmp_path / "t" / "state.json"
    state = json.loads(path.read_text())
    state |= {"format": 1, "client_state": {"$": "tuple", "of": [1]}}
    for group in state["optimizer"]["param_groups"]:
        group["betas"] = group["betas"]["of"]
    path.write_text(json.dumps(state))
    other = make()
    assert other.load_checkpoint(tmp_path)[1] == {"$": "tuple", "of": [1]}
    assert train(other, 3, first=2) == train(engine, 3, first=2)


def test_what_the_user_has_there_stays(tmp_path):
    """Files and folders that are called *.tmp, and a checkpoint whose tag ends so."""
    engine = make()
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / "folder.tmp").mkdir()
    (tmp_path / ".orlop-partial-gone").mkdir()
    engine.save_checkpoint(tmp_path, tag="a.tmp", client_state={"a": 1})
    engine.save_checkpoint(tmp_path, tag="a.old.tmp")
    engine.save_checkpoint(tmp_path, tag="a")
    assert (tmp_path / "notes.tmp").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.tmp", "folder.tmp", "a.tmp", "a.old.tmp", "a", "latest",
    }  # fmt: skip
    assert engine.load_checkpoint(tmp_path, tag="a.tmp")[1] == {"a": 1}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data").write_text("mine")
    for tag in ("mine", "notes.tmp"):
        with pytest.raises(orlop.UsageError, match=f"{tag} is there and is no checkpoint"):
            engine.save_checkpoint(tmp_path, tag=tag)
    assert (tmp_path / "mine" / "data").read_text() == "mine"
    engine.save_checkpoint(tmp_path, tag="folder.tmp")  # which was empty


@pytest.mark.parametrize(
    "tag", ["latest", ".orlop-partial-x", ".orlop-old-x", "a/b", "/a", "..", ".", "", " a"]
)
def test_tags_that_are_refused(tag, tmp_path):
    """Before anything is written."""
    with pytest.raises(orlop.UsageError, match=r"tag '.*' is refused"):
        make().save_checkpoint(tmp_path / "new", tag=tag)
    assert not (tmp_path / "new").exists()


def test_the_tag_0(tmp_path):
    engine = make()
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag=0)
    assert (tmp_path / "latest").read_text() == "0"
    assert (
        engine.load_checkpoint(tmp_path, tag=0)[0]
        == engine.load_checkpoint(tmp_path)[0]
        == str(tmp_path / "0")
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", b"[]", "a list, not an object"),
        ("state.json", b"{}", "format None"),
        ("state.json", b'{"format": 1}', "bytes is missing"),
        ("state.json", b'{"format": 2, "bytes": []}', "bytes is a list"),
        ("state.json", b'{"format": 2, "bytes": {"$": "set", "of": []}}', "a bad tag"),
        ("model.safetensors", None, "no safetensors file"),
        ("optimizer.safetensors", None, "no safetensors file"),
        (
            "optimizer.safetensors",
            (b'"inp.weight.exp_avg"', b'"imp.weight.exp_avg"'),
            "states of 'imp.weight'",
        ),
    ],
)
def test_broken_files_are_named(file, content, message, tmp_path):
    """None: a header of the right size that is none; nothing was loaded."""
    engine = make()
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    path = tmp_path / "t" / file
    whole = path.read_bytes()
    if content is None:
        content = whole[:8] + b"#" * 40 + whole[48:]
    elif isinstance(content, tuple):
        content = whole.replace(*content)
    path.write_bytes(content)
    with pytest.raises(orlop.InvalidDataError, match=message) as raised:
        engine.load_checkpoint(tmp_path)
    assert str(tmp_path / "t") in str(raised.value)


def test_an_optimizer_with_other_parameters(tmp_path):
    """A checkpoint goes by the names of the model."""
    model, other = Net(), torch.nn.Linear(5, 3)
    engine = make(model, orlop.AdamW([{"params": [*model.parameters()]}, {"params": [*other.parameters()]}]))
    with pytest.raises(orlop.UsageError, match=r"parameter 0 of group 1 .* \(3, 5\), is not in the model"):
        engine.save_checkpoint(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("phase", range(4))
def test_resume_inside_an_accumulation_window(phase, precision, streams, tmp_path):
    """Case N-04: a checkpoint has the gradients of the window under way, in a new engine and, where others wait, in
    the one that saved."""
    options = {precision: {"enabled": True}} if precision else {}
    options["gradient_accumulation_steps"] = 4
    if streams:
        options["zero_optimization"] = {"stage": 3, "offload_param": {"device": "cpu"}}
    engine = make(**options)
    train(engine, 8 + phase)
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "global_step2" / "gradients.safetensors").exists() == (phase > 0)
    expected = train(engine, 12 - phase, first=8 + phase)
    final = [value.clone() for value in engine.module_state_dict().values()]
    train(engine, 3, first=50)  # gradients that are not the checkpoint's
    tolerance = {None: 1e-6, "bf16": 1e-2, "fp16": 1e-3}[precision] if phase else 0.0
    for other in (make(**options), engine):
        other.load_checkpoint(tmp_path)
        assert other.micro_steps == 8 + phase
        got = train(other, 12 - phase, first=8 + phase)
        assert got == pytest.approx(expected, rel=tolerance)
        for a, b in zip(other.module_state_dict().values(), final, strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
        assert other.global_steps == 5


SCALES = {
    "dynamic": {"fp16": {"enabled": True, "initial_scale_power": 10}},
    "static": {"fp16": {"enabled": True, "loss_scale": 128}},
    "bf16": {"bf16": {"enabled": True}},
    "none": {},
}


@pytest.mark.parametrize(
    ("saved", "here", "scale"),
    [
        ("dynamic", "static", 128),
        ("static", "dynamic", 1024),
        ("bf16", "dynamic", 1024),
        ("none", "static", 128),
        ("static", "bf16", 1),
        ("dynamic", "dynamic", 2048),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["told", "format 1"])
def test_the_loss_scale_goes_on_only_from_dynamic_to_dynamic(saved, here, scale, told, tmp_path):
    """Else the configuration's holds, and the gradients of the window under way are brought to it."""
    import json

    options = {"gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    engine = make(**SCALES[saved], **options)
    engine.loss_scaler.window = 2
    train(engine, 7)
    p = engine.module.out.bias
    expected = engine.optimizer.gradient(p).float() / engine.loss_scaler.scale
    engine.save_checkpoint(tmp_path, tag="t")
    if not told:
        path = tmp_path / "t" / "state.json"
        state = json.loads(path.read_text())
        del state["loss_scaler"]["dynamic"]
        path.write_text(json.dumps(state))
    other = make(**SCALES[here], **options)
    other.load_checkpoint(tmp_path)
    assert other.loss_scaler.scale == scale
    gradient = other.optimizer.gradient(other.module.out.bias).float() / scale
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-2)
    train(other, 1)
    assert other.was_step_applied()


def test_frozen_buffers_shared_and_views(tmp_path):
    """Cases C-02, C-03, C-13, C-17: frozen weights, buffers, tied and transposed tensors; plain readers read it."""
    import json

    import safetensors.torch

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4)
            self.b = torch.nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.c = torch.nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
            self.register_buffer("d", torch.arange(100.0)[10:20])

        def forward(self, x):
            return self.b(self.a(x))

    torch.manual_seed(1)
    engine = make(Tied())
    with torch.no_grad():
        engine.module.c.mul_(2)
        engine.module.d.add_(1)
    x = torch.ones(2, 4)
    engine.backward(engine(x).sum())
    engine.step()
    engine.save_checkpoint(tmp_path, tag="t")
    torch.manual_seed(2)
    other = make(Tied())
    other.load_checkpoint(tmp_path, tag="t")
    for (name, value), (_, back) in zip(
        engine.module.state_dict().items(), other.module.state_dict().items(), strict=True
    ):
        assert torch.equal(value, back), name
    assert other.module.a.weight is other.module.b.weight
    tensors = safetensors.torch.load_file(tmp_path / "t" / "model.safetensors")
    state = json.loads((tmp_path / "t" / "state.json").read_text())
    assert state["shared"] == {"b.weight": "a.weight"} and "b.weight" not in tensors
    assert (tmp_path / "t" / "model.safetensors").stat().st_size < 2000
    engine.save_checkpoint(tmp_path, tag="small", exclude_frozen_parameters=True)
    assert "c" not in safetensors.torch.load_file(tmp_path / "small" / "model.safetensors")
    assert other.load_checkpoint(tmp_path, load_module_strict=False)[0].endswith("small")


def test_what_does_not_fit_is_named(tmp_path, caplog):
    """Cases C-06, C-12, C-19, U-11: nothing there, a partial one, another format, other parameters."""
    engine = make()
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert "no checkpoint" in caplog.text
    with pytest.raises(orlop.InvalidDataError, match="missing"):
        engine.load_checkpoint(tmp_path, tag="missing")
    engine.save_checkpoint(tmp_path, tag="good")
    with pytest.raises(orlop.UsageError, match="client_state"):
        engine.save_checkpoint(tmp_path, tag="bad", client_state={"x": object()})
    assert (tmp_path / "latest").read_text() == "good" and not (tmp_path / "bad").exists()

    class Longer(Net):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Parameter(torch.ones(2))

    longer = make(Longer())
    with pytest.raises(orlop.InvalidDataError, match="more"):
        longer.load_checkpoint(tmp_path, load_module_strict=False)
    state = tmp_path / "good" / "state.json"
    text = state.read_text()
    state.write_text(text.replace('"format": 2', '"format": 7'))
    with pytest.raises(orlop.InvalidDataError, match="format 7"):
        engine.load_checkpoint(tmp_path)
    state.write_text(text)
    with (tmp_path / "good" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(orlop.InvalidDataError, match=r"model\.safetensors"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tags", [1, 3])
def test_killed_while_saving(tmp_path, tags):
    """Case C-06: signal 9 at many moments, tags new and written again; the newest complete one loads."""
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from deepspeed_net import make, train
        engine = make()
        print("ready", flush=True)
        for step in range(10000):
            train(engine, 1, first=step)
            engine.save_checkpoint({str(tmp_path)!r}, tag=f"tag{{step % {tags}}}", client_state={{"step": step}})
        """
    )
    seen = -1
    for attempt in range(4):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(0.05 + 0.037 * attempt)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if (tmp_path / "latest").exists():
            engine = make()
            path, client = engine.load_checkpoint(tmp_path)
            assert client["step"] == engine.global_steps - 1, path
            assert not list(tmp_path.glob(".orlop-old-*"))
            seen = max(seen, client["step"])
    assert seen >= 0


@pytest.mark.parametrize("replaced", [True, False], ids=["after", "before"])
def test_killed_while_a_tag_is_replaced(tmp_path, replaced):
    """The old one is set aside: it goes where the new one is in place already, and comes back where not."""
    engine = make()
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="tag", client_state={"step": 0})
    (tmp_path / "tag").rename(tmp_path / ".orlop-old-tag")
    if replaced:
        train(engine, 1, first=1)
        partial = tmp_path / "elsewhere"
        engine.save_checkpoint(partial, tag="tag", client_state={"step": 1})
        (partial / "tag").rename(tmp_path / "tag")
    _, client = make().load_checkpoint(tmp_path)
    assert client["step"] == (1 if replaced else 0)
    assert not list(tmp_path.glob(".orlop-old-*"))


def test_save_16bit_model(tmp_path):
    engine = make(bf16={"enabled": True})
    train(engine, 1)
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert engine.save_16bit_model(tmp_path, name)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["inp.weight"], engine.module.inp.weight)
    assert loaded.keys() == engine._zero3_consolidated_16bit_state_dict().keys()
    engine.destroy()
    engine.destroy()
