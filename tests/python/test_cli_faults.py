"""What goes wrong while the command orlop runs: the run goes on, or ends with its state saved."""

from __future__ import annotations

import errno
import io
import json
import shutil
import signal

import pytest
from cli_run import finetune, losses, run, swapping

import orlop._orlop as native
from orlop import metrics
from orlop.errors import InvalidDataError, IoError


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


FAILURES = {
    "input of a step": ("step", 3, InvalidDataError),
    "input of an evaluation": ("evaluate", 2, InvalidDataError),
    "a drive": ("step", 3, IoError),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_before_a_step_has_begun_is_raised_with_the_state_saved(
    capsys, model_dir, text_file, tmp_path, monkeypatch, name
):
    method, after_step, error = FAILURES[name]
    saved = after_step if error is InvalidDataError else None
    model = model_dir("llama")
    extra = ("--steps", 6, "--eval-every", 2, "--eval-data", text_file)
    assert finetune(capsys, model, text_file, tmp_path / "straight", *extra)[0] == 0
    original = getattr(native.Engine, method)

    def fail_there(engine, *args):
        if engine.steps_done == after_step:
            raise error("broken")
        return original(engine, *args)

    monkeypatch.setattr(native.Engine, method, fail_there)
    out_dir = tmp_path / "run"
    code, _, err = finetune(capsys, model, text_file, out_dir, *extra)
    assert (code, err) == (error.exit_code, "orlop: error: broken\n")
    assert [path.name for path in out_dir.glob("step-*")] == ([f"step-{saved}"] if saved else [])
    if saved:
        monkeypatch.undo()
        code, out, err = finetune(capsys, model, text_file, out_dir, *extra)
        assert (code, err, f"(step {saved})" in out) == (0, "", True)
        assert losses(out_dir) == losses(tmp_path / "straight")


def test_an_export_that_fails_is_raised_with_the_state_saved(capsys, model_dir, text_file, tmp_path):
    """Also of a run that saves when it is interrupted alone."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "hf").write_text("in the way")
    code, out, err = finetune(capsys, model_dir("llama"), text_file, run_dir)
    assert (code, str(run_dir / "hf") in err, len(err.splitlines())) == (1, True, 1)
    assert f"saved {run_dir / 'step-2'}" in out
    (run_dir / "hf").unlink()
    code, out, err = finetune(capsys, model_dir("llama"), text_file, run_dir)
    assert (code, err, "(step 2)" in out) == (0, "", True)
    assert (run_dir / "hf" / "model.safetensors").is_file()


def test_a_model_folder_that_is_gone_in_the_end_is_an_error_with_the_state_saved(
    capsys, own_model, text_file, tmp_path, monkeypatch
):
    exported = native.Engine.export_hf

    def export_without_it(engine, *args):
        shutil.rmtree(own_model)
        return exported(engine, *args)

    monkeypatch.setattr(native.Engine, "export_hf", export_without_it)
    code, out, err = finetune(capsys, own_model, text_file, tmp_path / "run")
    assert (code, str(own_model) in err, len(err.splitlines())) == (1, True, 1)
    assert f"saved {tmp_path / 'run' / 'step-2'}" in out


@pytest.mark.parametrize(
    "rest", [b"\0\0\0\n", b"[1]\n", b'{"loss": 1}\n', b"\xff\n", b"[" * 9999 + b"\n", b'{"step": 9']
)
def test_a_damaged_line_of_the_log_ends_neither_a_resume_nor_a_plot(
    capsys, model_dir, text_file, tmp_path, rest
):
    run_dir = tmp_path / "run"
    extra = ("--eval-data", text_file, "--save-every", 1, "--export", "false")
    assert finetune(capsys, model_dir("llama"), text_file, run_dir, *extra)[0] == 0
    before = losses(run_dir)
    path = run_dir / "metrics.jsonl"
    path.write_bytes((rest if rest.endswith(b"\n") else b"") + path.read_bytes() + rest)
    assert run(capsys, "plot", run_dir)[0] == 0
    code, _, err = finetune(capsys, model_dir("llama"), text_file, run_dir, *extra, "--steps", 3)
    assert (code, err) == (0, "")
    after = losses(run_dir)
    assert (sorted(after), {step: after[step] for step in before}) == ([1, 2, 3], before)


def test_a_log_on_a_full_disk_does_not_end_the_run(capsys, model_dir, text_file, tmp_path, monkeypatch):
    """Lines are whole or left out, and that is said once."""
    run_dir = tmp_path / "run"
    writes = []

    class FillingFile(io.FileIO):
        def write(self, data):
            writes.append(len(data))
            if len(writes) in (2, 3):
                super().write(data[:7])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(metrics, "open", lambda path, mode, buffering: FillingFile(path, "ab"), raising=False)
    code, out, err = finetune(capsys, model_dir("llama"), text_file, run_dir, "--steps", 5)
    assert (code, err) == (0, "")
    assert out.count("metrics.jsonl: step 2 is left out: No space left on device; the run goes on") == 1
    assert sorted(losses(run_dir)) == [1, 4, 5]


@pytest.mark.parametrize("after_step", [0, 2, 4])
def test_a_signal_ends_a_held_out_evaluation_between_its_parts(
    capsys, model_dir, text_file, tmp_path, monkeypatch, after_step
):
    model, out_dir = model_dir("llama"), tmp_path / "run"
    extra = ("--steps", 4, "--eval-every", 2, "--eval-data", text_file)
    original, parts = native.Engine.evaluate, []

    def interrupt(engine, *args):
        parts.append(engine.steps_done)
        if engine.steps_done == after_step:
            signal.raise_signal(signal.SIGINT)
        return original(engine, *args)

    monkeypatch.setattr(native.Engine, "evaluate", interrupt)
    code, out, err = finetune(capsys, model, text_file, out_dir, *extra)
    assert (code, err) == (130, "")
    assert parts.count(after_step) == 1
    assert f"held-out loss at step {after_step}:" not in out
    folders = [path.name for path in out_dir.glob("step-*")]
    if after_step == 0:
        assert "SIGINT: stopped before step 1 was done; there was no state to save" in out
        assert folders == []
    else:
        assert f"SIGINT: stopped after step {after_step} with its state saved" in out
        assert folders == [f"step-{after_step}"]
    monkeypatch.undo()
    code, out, err = finetune(capsys, model, text_file, out_dir, *extra)
    assert (code, err) == (0, "")
    assert "held-out loss at step 4:" in out
    assert sorted(losses(out_dir)) == [1, 2, 3, 4]
