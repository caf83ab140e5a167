"""The command: what each verb prints and leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import finetune, losses, run, swapping

import orlop
import orlop._orlop as native
from conftest import VOCAB
from orlop.errors import DoesNotFitError


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


def test_export_finds_the_model_from_any_folder(capsys, own_model, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("output: ~/run\n")
    settings = ("run.yaml", "finetune", "--model", "model", "--data", "~/text.txt", "--device", "host")
    short = ("--seq-len", 16, "--steps", 1, "--save-every", 1)
    assert run(capsys, settings[1], settings[0], *settings[2:], *short)[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(capsys, "export", "--in", "../run", "--out", "a")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "model", "run", "run.yaml", "text.txt"]
    own_model.rename(tmp_path / "moved")
    code, _, err = run(capsys, "export", "--in", "../run", "--out", "b")
    assert (code, f"run/config.json: model {own_model}: no such folder; pass --model" in err) == (4, True), (
        err
    )
    assert run(capsys, "export", "--in", "../run", "--out", "b", "--model", "../moved")[0] == 0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_export_needs_neither_the_machine_of_the_run_nor_its_budgets(
    capsys, model_dir, text_file, tmp_path, monkeypatch, precision
):
    """It holds the weights alone; where they do not fit, states are where the run had them, and nothing is saved."""
    run_dir = tmp_path / "run"
    extra = ("--save-every", 2, "--precision", precision, *swapping(tmp_path))
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra)[0] == 0
    opened, configs = native.Engine.open, []

    def open_and_note(model, config):
        configs.append((config.evaluate_only, config.device, config.nvme.paths, config.checkpoint_dir))
        if config.evaluate_only and len(configs) > 1:
            raise DoesNotFitError("too large")
        return opened(model, config)

    monkeypatch.setattr(native.Engine, "open", staticmethod(open_and_note))
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"device": "cuda:3", "host_mem": 5, "nvme": ["/dev/null/swap"]}))
    assert run(capsys, "export", "--in", run_dir, "--out", tmp_path / "alone")[0] == 0
    path.write_text(json.dumps(config))
    assert run(capsys, "export", "--in", run_dir, "--out", tmp_path / "drives")[0] == 0
    assert configs == 2 * [(True, "host", [], "")] + [(False, "host", [str(tmp_path / "swap")], "")]
    for folder in ("alone", "drives"):
        exported = (tmp_path / folder / "model.safetensors").read_bytes()
        assert exported == (run_dir / "hf" / "model.safetensors").read_bytes()
    path.write_text(json.dumps(config | {"nvme": None}))
    code, _, err = run(capsys, "export", "--in", run_dir, "--out", tmp_path / "none")
    assert (code, err) == (3, "orlop: error: too large\n")


@pytest.mark.parametrize("drives", [False, True])
def test_eval_of_a_checkpoint_needs_its_weights_alone(
    capsys, model_dir, text_file, tmp_path, monkeypatch, drives
):
    """2 bytes per parameter, whichever Adam has trained them, as `orlop plan --evaluate` says; with drives to swap to it
    is an engine that could train."""
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


def test_doctor_measures_once_and_plans_and_runs_use_it(capsys, model_dir, text_file, tmp_path, monkeypatch):
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


def test_rows_with_nothing_to_learn_are_passed_over(capsys, model_dir, tmp_path):
    """In the order of the data, also by a run that resumes between them; what is learned is the same as without."""
    unlabelled = (3, 4, 11)

    def run_on(name, rows, *extra):
        writer = orlop.TokenWriter(str(tmp_path / f"{name}.tok"), VOCAB, loss_mask=True)
        for row in rows:
            writer.append(list(range(row, row + 16)), [row not in unlabelled] * 16)
        writer.finish()
        data, out_dir = tmp_path / f"{name}.tok", tmp_path / f"run-{name}"
        return finetune(
            capsys, model_dir("llama"), data, out_dir, "--seed", 1, "--schedule", "constant", *extra
        ), losses(out_dir)

    (code, out, err), straight = run_on("straight", range(16), "--steps", 20)
    assert code == 0, err
    assert out.count("passed over") == 1
    assert sorted(straight) == list(range(1, 21))
    for steps in (5, 12, 20):
        (code, _, err), halves = run_on("halves", range(16), "--steps", steps)
        assert code == 0, err
    assert halves == straight


def test_data_with_nothing_to_learn_is_refused(capsys, model_dir, tmp_path):
    writer = orlop.TokenWriter(str(tmp_path / "data.tok"), VOCAB, loss_mask=True)
    for row in range(3):
        writer.append(list(range(row, row + 16)), [False] * 16)
    writer.finish()
    model = model_dir("llama")
    code, _, err = finetune(capsys, model, tmp_path / "data.tok", tmp_path / "run", "--steps", 2)
    assert (code, "data.tok: of 3 rows of 16 tokens none holds one to predict" in err) == (4, True), err
