"""The command: exit codes and messages on bad input, and what each verb prints."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import VOCAB, write_tokenizer
from orlop.cli import main


def run(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as exit_request:  # argparse, for --help and --version
        code = exit_request.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the heavy stores lie in the lowest deck of the ship\n" * 40)
    return path


@pytest.fixture
def own_model(model_dir, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(model_dir("llama"), tmp_path / "model")


def finetune(capsys, model, data, out, *extra):
    return run(
        capsys,
        "finetune",
        "--model",
        model,
        "--data",
        data,
        "--output",
        out,
        "--device",
        "host",
        "--seq-len",
        16,
        "--steps",
        2,
        "--save-every",
        0,
        *extra,
    )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "VERB"),
        (["finetun"], "finetun"),
        (["finetune", "--learning-rte", "1"], "did you mean 'learning_rate'"),
        (["finetune", "learning_rte=1"], "did you mean 'learning_rate'"),
        (["finetune", "stray"], "neither a .yaml or .json file nor KEY=VALUE"),
        (["finetune", "missing.yaml"], "missing.yaml"),
        (["finetune"], "--model is missing"),
        (["finetune", "--model", "m"], "--data is missing"),
        (["finetune", "--model", "m", "--data", "d"], "--output is missing"),
        (["finetune", "--lr", "fast"], "lr"),
        (["eval", "--save-every", "3"], "does not belong to this verb"),
        (["plan"], "--model is missing"),
        (["inspect", "nowhere"], "no such file"),
        (["export", "--in", "x"], "--out"),
        (["doctor", "--path", "nowhere"], "no such folder"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, argv, part):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert part in err
    assert err.startswith("orlop: error: ")
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_help_and_version_print_and_succeed(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("finetune", "eval", "plan", "export", "inspect", "bench", "doctor", "plot"):
        assert verb in out
    assert run(capsys, "--version")[1].startswith("orlop ")
    code, out, _ = run(capsys, "finetune", "--help")
    assert code == 0
    assert "--per-device-train-batch-size" in out


def edit_json(path, **changes):
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def rewrite_weights(model, change):
    """change(tensors) edits the name -> array mapping in place."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(model):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def overlapping(model):
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def trailing_byte(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

BAD_MODELS = {
    "no config": (lambda m: (m / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{"), "config.json"),
    "unknown architecture": (
        lambda m: edit_json(m / "config.json", model_type="mamba", architectures=["MambaForCausalLM"]),
        "mamba",
    ),
    "missing field": (lambda m: edit_json(m / "config.json", hidden_size=None), "hidden_size"),
    "wrong field": (lambda m: edit_json(m / "config.json", num_hidden_layers="three"), "num_hidden_layers"),
    "heads do not divide": (
        lambda m: edit_json(m / "config.json", num_key_value_heads=3),
        "num_key_value_heads",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (truncate, "model.safetensors"),
    "oversized header": (huge_header, "model.safetensors"),
    "overlapping tensors": (overlapping, "model.safetensors"),
    "trailing byte": (trailing_byte, "model.safetensors"),
    "missing tensor": (lambda m: rewrite_weights(m, lambda t: t.pop(Q_PROJ)), Q_PROJ),
    "extra tensor": (
        lambda m: rewrite_weights(m, lambda t: t.update(extra=np.zeros(3, np.float32))),
        "extra",
    ),
    "wrong shape": (
        lambda m: rewrite_weights(m, lambda t: t.update({Q_PROJ: np.zeros((48, 47), np.float32)})),
        Q_PROJ,
    ),
    "NaN weights": (lambda m: rewrite_weights(m, lambda t: t[Q_PROJ].__setitem__((1, 2), np.nan)), Q_PROJ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_refused_by_name(capsys, own_model, text_file, tmp_path, name):
    damage, part = BAD_MODELS[name]
    damage(own_model)
    before = {p.name: p.read_bytes() for p in own_model.iterdir()}
    code, _, err = finetune(capsys, own_model, text_file, tmp_path / "run")
    assert code == 4, err
    assert part in err
    assert not list((tmp_path / "run").glob("step-*"))
    assert {p.name: p.read_bytes() for p in own_model.iterdir()} == before


def write(path, data):
    path.write_bytes(data)
    return path


BAD_DATA = {
    "empty": ("d.txt", b"", "no token to learn from"),
    "not text": ("d.txt", b"\xff\xfe", "at byte 0"),
    "bad line": ("d.jsonl", b'{"text": "a"}\n{"text"', "d.jsonl:2"),
    "wrong field": ("d.jsonl", b'{"txt": "a"}', "d.jsonl:1"),
    "no token file": ("d.tok", b"ORLOPTOX" + bytes(100), "d.tok"),
    "truncated token file": ("d.tok", b"ORLOPTOK" + struct.pack("<II6Q", 1, 2, 99, 320, 0, 0, 0, 0), "d.tok"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_file(capsys, model_dir, tmp_path, name):
    file_name, content, part = BAD_DATA[name]
    data = write(tmp_path / file_name, content)
    code, _, err = finetune(capsys, model_dir("llama"), data, tmp_path / "run")
    assert code == 4, err
    assert part in err
    assert data.read_bytes() == content


def test_missing_data_is_wrong_usage(capsys, model_dir, tmp_path):
    code, _, err = finetune(capsys, model_dir("llama"), tmp_path / "none.txt", tmp_path / "run")
    assert (code, "none.txt: no such file" in err) == (2, True)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(capsys, own_model, tmp_path):
    write_tokenizer(own_model, vocab=VOCAB)
    edit_json(own_model / "config.json", vocab_size=VOCAB - 60)
    data = tmp_path / "d.txt"
    data.write_text("the heavy stores lie in the lowest deck of the ship")
    code, _, err = finetune(capsys, own_model, data, tmp_path / "run")
    assert code == 4
    assert str(VOCAB - 60) in err


def test_a_sequence_longer_than_the_model_is_refused(capsys, model_dir, text_file, tmp_path):
    code, _, err = finetune(capsys, model_dir("llama"), text_file, tmp_path / "run", "--seq-len", 129)
    assert code == 2
    assert "129" in err and "128" in err


@pytest.mark.parametrize("verb", ["finetune", "plan"])
def test_a_budget_too_small_is_exit_code_3_with_the_remedy(capsys, model_dir, text_file, tmp_path, verb):
    extra = ["--data", text_file, "--output", tmp_path / "run"] if verb == "finetune" else []
    code, _, err = run(
        capsys,
        verb,
        "--model",
        model_dir("llama"),
        "--device",
        "host",
        "--seq-len",
        16,
        "--device-mem",
        "10KB",
        *extra,
    )
    assert code == 3
    assert "device" in err
    assert not list((tmp_path / "run").glob("step-*"))


def test_an_output_that_cannot_be_a_folder_is_an_error(capsys, model_dir, text_file, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = finetune(capsys, model_dir("llama"), text_file, tmp_path / "file" / "run")
    assert code == 1
    assert "file/run" in err
    assert len(err.strip().splitlines()) == 1


def test_finetune_prints_plan_and_plain_lines_and_writes_the_run_folder(
    capsys, model_dir, text_file, tmp_path
):
    out_dir = tmp_path / "run"
    code, out, err = finetune(
        capsys, model_dir("llama"), text_file, out_dir, "--eval-data", text_file, "--save-every", 2, "--trace"
    )
    assert (code, err) == (0, "")
    assert "step 2/2 | loss " in out
    for part in (
        "norm",
        "tok/s",
        "device",
        "host",
        "eta",
        "held-out loss at step 0",
        "held-out loss at step 2",
    ):
        assert part in out
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2]
    assert {
        "tokens",
        "lr",
        "grad_norm",
        "loss_scale",
        "skipped",
        "tok_per_s",
        "model_flop_per_s",
        "mfu",
        "ms",
        "stall_ms",
        "link_bytes",
        "tier_bytes",
    } <= set(steps[0])
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 2]
    assert (out_dir / "step-2" / "manifest.json").is_file()
    assert (out_dir / "hf" / "model.safetensors").is_file()
    assert (out_dir / "trace.json").is_file()

    code, out, _ = run(capsys, "plot", out_dir)
    assert code == 0
    assert (out_dir / "plot.png").read_bytes().startswith(b"\x89PNG")

    code, out, _ = run(capsys, "export", "--in", out_dir, "--out", tmp_path / "again")
    assert code == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        out_dir / "hf" / "model.safetensors"
    ).read_bytes()
    code, _, err = run(capsys, "export", "--in", out_dir, "--out", tmp_path / "again")
    assert (code, "not an empty folder" in err) == (2, True)

    code, out, _ = run(capsys, "inspect", out_dir / "step-2", "--json")
    assert code == 0
    assert json.loads(out)["kind"] == "checkpoint"


def test_eval_equals_the_loss_that_finetune_reports(capsys, model_dir, text_file, tmp_path):
    out_dir = tmp_path / "run"
    assert (
        finetune(
            capsys, model_dir("llama"), text_file, out_dir, "--eval-data", text_file, "--precision", "fp32"
        )[0]
        == 0
    )
    last = json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])
    code, out, _ = run(
        capsys,
        "eval",
        "--model",
        out_dir / "hf",
        "--data",
        text_file,
        "--seq-len",
        16,
        "--device",
        "host",
        "--precision",
        "fp32",
        "--json",
    )
    assert code == 0
    assert json.loads(out)["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("drives", [False, True])
def test_eval_of_a_checkpoint_needs_its_weights_alone(capsys, model_dir, text_file, tmp_path, monkeypatch, drives):
    """2 bytes per parameter, whichever Adam has trained them, as `orlop plan --evaluate` says; with drives to swap to it
    is an engine that could train."""
    import orlop._orlop as native

    model, out_dir = model_dir("llama"), tmp_path / "run"
    trained = ["--eval-data", text_file, "--save-every", 2, "--optim", "adam"]
    assert finetune(capsys, model, text_file, out_dir, *trained)[0] == 0
    last = json.loads((out_dir / "metrics.jsonl").read_text().splitlines()[-1])
    plans = []
    opened = native.Engine.open

    def open_and_note(*args):
        engine = opened(*args)
        plans.append(engine.plan)
        return engine

    monkeypatch.setattr(native.Engine, "open", staticmethod(open_and_note))
    arguments = ["--model", model, "--data", text_file, "--seq-len", 16, "--device", "host", "--json"]
    checkpoint = max(out_dir.glob("step-*"))
    settings = [f"nvme={tmp_path / 'swap'}", "optim=adam"] if drives else []
    code, out, err = run(capsys, "eval", *settings, *arguments, "--checkpoint", checkpoint)
    assert (code, err) == (0, "")
    assert json.loads(out)["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    (plan,) = plans
    assert plan.evaluates_only != drives
    bytes_per_parameter = plan.state_bytes / plan.parameters  # with some padding
    assert 2 <= bytes_per_parameter < 2.1 if not drives else bytes_per_parameter >= 12
    if not drives:
        code, out, _ = run(capsys, "plan", "--evaluate", "--model", model, *arguments[4:])
        assert (code, json.loads(out)["state_bytes"]) == (0, plan.state_bytes)


def test_evaluation_counts_every_row_once(capsys, model_dir, text_file):
    losses = set()
    for micro_batch in (1, 3, 4):
        code, out, _ = run(
            capsys,
            "eval",
            "--model",
            model_dir("llama"),
            "--data",
            text_file,
            "--seq-len",
            16,
            "--device",
            "host",
            "--precision",
            "fp32",
            "--micro-batch",
            micro_batch,
            "--json",
        )
        assert code == 0
        losses.add(round(json.loads(out)["loss"], 5))
    assert len(losses) == 1


def test_plan_prints_text_and_json(capsys, model_dir):
    arguments = ("plan", "--model", model_dir("llama"), "--device", "host", "--seq-len", 32)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "device" in out and "host" in out
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    json.loads(out)


def test_inspect_lists_tensors_with_checksums(capsys, model_dir):
    from safetensors.numpy import load_file

    code, out, _ = run(capsys, "inspect", model_dir("llama"), "--json", "--checksum")
    assert code == 0
    info = json.loads(out)
    tensors = load_file(model_dir("llama") / "model.safetensors")
    assert {t["name"]: tuple(t["shape"]) for t in info["tensors"]} == {n: v.shape for n, v in tensors.items()}
    import hashlib

    for tensor in info["tensors"]:
        assert tensor["sha256"] == hashlib.sha256(tensors[tensor["name"]].tobytes()).hexdigest()


@pytest.mark.parametrize("damage", [truncate, huge_header])
def test_inspect_refuses_damaged_files(capsys, own_model, damage):
    damage(own_model)
    code, _, err = run(capsys, "inspect", own_model / "model.safetensors")
    assert code == 4
    assert "model.safetensors" in err


def test_doctor_measures_once_and_plans_and_runs_use_it(
    capsys, model_dir, text_file, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = ("--model", model_dir("llama"), "--seq-len", 32, "--device", "host")
    _, before, _ = run(capsys, "plan", *model)
    assert "typical figures; `orlop doctor --measure`" in before

    code, out, _ = run(capsys, "doctor", "--measure", "--device", "host", "--path", tmp_path, "--json")
    profile = json.loads(out)["profile"]
    assert code == 0
    assert Path(profile["path"]).parent == tmp_path / "cache" / "orlop"
    assert set(profile["matmul_flop_per_s"]) == {"BF16", "F16", "F32"}
    rates = [*profile["matmul_flop_per_s"].values(), profile["upload_bytes_per_s"]]
    rates += [profile["host_bytes_per_s"], profile["nvme_write_bytes_per_s"]]
    assert min(rates) > 1e6
    assert not list(tmp_path.glob("*orlop*")), "what the drive was measured with is gone"

    _, text, _ = run(capsys, "plan", *model)
    assert f"predicted from {profile['path']}" in text
    plans = [json.loads(run(capsys, "plan", *model, "--precision", p, "--json")[1]) for p in ("bf16", "fp32")]
    assert all(plan["time_is_measured"] for plan in plans)
    code, out, _ = finetune(
        capsys, model_dir("llama"), text_file, tmp_path / "run", "--device", "host", "--precision", "fp32"
    )
    assert (code, profile["path"] in out, "mfu" in out) == (0, True, True)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record in steps:
        if "loss" in record:
            expected = record["model_flop_per_s"] / profile["matmul_flop_per_s"]["F32"]
            assert record["mfu"] == pytest.approx(expected)

    Path(profile["path"]).write_text("{")
    _, text, _ = run(capsys, "plan", *model)
    assert "typical figures" in text


def test_doctor_reports_this_machine(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--json", "--path", tmp_path)
    assert code == 0
    facts = json.loads(out)
    assert facts["cpu"]["usable_cpus"] >= 1
    assert facts["memory"]["total_bytes"] > 0
    assert facts["io_uring"] in ("allowed", "forbidden", "missing")
    assert facts["free_bytes"][str(tmp_path)] > 0
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for name in ("cpu", "memory", "locked memory", "io_uring", "gpu", "drive "):
        assert name in out
    drive = facts["drives"][0]
    assert Path(drive["directory"]) == tmp_path
    assert 0 < drive["free_bytes"] <= drive["total_bytes"]


def test_bench_io_sweeps_a_drive(capsys, tmp_path):
    code, out, _ = run(capsys, "bench", "io", "--path", tmp_path, "--size", "4MiB", "--json")
    assert code == 0
    result = json.loads(out)
    assert len(result["points"]) == 9
    assert all(point["read_gib_per_s"] > 0 < point["write_gib_per_s"] for point in result["points"])
    assert result["best"] in result["points"]
    assert list(tmp_path.iterdir()) == []
    small = ("--path", tmp_path, "--size", "16MiB", "--pairs", 2)
    code, out, _ = run(capsys, "bench", "io", *small, "--nvme-engine", "threads")
    assert (code, "threads" in out, "best: --nvme-block" in out) == (0, True, True)
    assert list(tmp_path.iterdir()) == []
    if shutil.which("fio") is None:
        assert "fio is not installed" in out
    else:
        assert "beside fio" in out and all(f"  {name} " in out for name in ("read", "write", "mixed"))


def swapping(tmp_path):
    return ("--nvme", tmp_path / "swap", "--nvme-optimizer-blocks", 3, "--nvme-param-blocks", 2)


def test_finetune_with_states_on_a_drive_gives_the_same_model(capsys, model_dir, text_file, tmp_path):
    weights = []
    for name, extra in (("at-home", ()), ("swapped", swapping(tmp_path))):
        code, out, _ = finetune(capsys, model_dir("llama"), text_file, tmp_path / name, *extra)
        assert code == 0
        weights.append((tmp_path / name / "hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    for part in ("  nvme ", "read and", "written per step", "drives: read"):
        assert part in out
    records = [json.loads(line) for line in (tmp_path / "swapped" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert all(record["tier_bytes"]["nvme"] > 0 for record in steps)
    assert sum(record["link_bytes"]["nvme_read"] for record in steps) > 0
    assert steps[-1]["nvme_written"] > 0
    assert list((tmp_path / "swap").iterdir()) == []


def test_the_limit_of_writes_per_day_stops_the_run_with_its_state_saved(
    capsys, model_dir, text_file, tmp_path
):
    model, out_dir = model_dir("llama"), tmp_path / "run"
    plan = ("plan", "--model", model, "--device", "host", "--seq-len", 16, "--json", *swapping(tmp_path))
    per_step = json.loads(run(capsys, *plan)[1])["nvme_written_bytes"]
    limited = (*swapping(tmp_path), "--steps", 9, "--nvme-writes-per-day")
    code, out, err = finetune(capsys, model, text_file, out_dir, *limited, 4 * per_step)
    assert (code, "nvme_writes_per_day" in err) == (3, True)
    assert "saved" in out
    saved = next(path for path in out_dir.iterdir() if path.name.startswith("step-"))
    assert 1 <= int(saved.name.removeprefix("step-")) < 9
    code, out, _ = finetune(capsys, model, text_file, out_dir, *limited, 100 * per_step)
    assert (code, f"resumed from {saved}" in out) == (0, True)


def test_a_file_groups_limits_and_drives(capsys, model_dir, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model: {model_dir('llama')}\ndevice: host\nseq_len: 16\n"
        f"limits: {{nvme: 1GiB, host: 4GiB, nvme_writes_per_day: 2TiB}}\n"
        f"nvme: {{paths: [{tmp_path / 'swap'}], engine: threads, queue_depth: 8, block: 256KiB}}\n"
        f"placement: {{nvme_optimizer_blocks: 2}}\n"
    )
    code, out, err = run(capsys, "plan", tmp_path / "run.yaml", "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["nvme_budget_bytes"], plan["nvme_optimizer_blocks"]) == (2**30, 2)


def test_shares_and_block_inputs_on_drives(capsys, model_dir, tmp_path):
    plan = ("plan", "--model", model_dir("llama"), "--device", "host", "--seq-len", 16, "--json")
    drives = ("--nvme", tmp_path / "swap", "--activations", "nvme", "--nvme-optimizer-share", 1)
    code, out, err = run(capsys, *plan, *drives, "--nvme-param-share", 0.5)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["activations"], result["nvme_optimizer_share"]) == ("nvme", 1)
    lines = {line["purpose"]: line["bytes"] for line in result["lines"] if line["tier"] == "nvme"}
    assert sorted(lines) == ["block inputs", "masters and moments"]
    assert sum(lines.values()) == result["nvme_bytes"]
    code, _, err = run(capsys, *plan, "--activations", "nvme")
    assert (code, "no swap directory is given" in err) == (2, True)
    code, _, err = run(capsys, *plan, *drives, "--nvme-param-share", 1.5)
    assert (code, "is not within 0..1" in err) == (2, True)


def test_finetune_with_block_inputs_on_a_drive_gives_the_same_model(capsys, model_dir, text_file, tmp_path):
    weights = []
    for name, extra in (("at-home", ()), ("swapped", ("--nvme", tmp_path / "swap", "--activations", "nvme"))):
        code, out, _ = finetune(capsys, model_dir("llama"), text_file, tmp_path / name, *extra)
        assert code == 0
        weights.append((tmp_path / name / "hf" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert "block inputs on drives" in out


def test_bench_reports_steps(capsys, model_dir):
    code, out, _ = run(
        capsys,
        "bench",
        "--model",
        model_dir("llama"),
        "--device",
        "host",
        "--seq-len",
        32,
        "--steps",
        2,
        "--json",
    )
    assert code == 0
    result = json.loads(out)
    assert result["tokens_per_second"] > 0
    assert result["scale_bytes_per_second"] > 1e8


def test_import_prints_nothing_and_loads_neither_torch_nor_cuda():
    script = (
        "import sys, orlop; heavy = [m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules]; "
        "maps = open('/proc/self/maps').read(); heavy += [l for l in ('libcuda', 'libnccl', 'libmpi') if l in maps]; "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
