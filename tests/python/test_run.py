"""Runs that are killed, interrupted and resumed, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import orlop
from conftest import build_model

STEPS = 60
DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("run-inputs")
    build_model(folder / "model", "llama", tied=True)
    with open(folder / "data.jsonl", "w") as file:
        for i in range(80):
            file.write(
                json.dumps({"text": f"line {i}: the heavy stores lie in the lowest deck" * (1 + i % 4)})
                + "\n"
            )
    return folder


def command(inputs, out, *extra):
    return [
        sys.executable,
        "-m",
        "orlop",
        "finetune",
        "--model",
        inputs / "model",
        "--data",
        inputs / "data.jsonl",
        "--output",
        out,
        "--device",
        "host",
        "--seq-len",
        "32",
        "--micro-batch",
        "4",
        "--accum",
        "2",
        "--steps",
        STEPS,
        "--lr",
        "1e-3",
        "--save-every",
        "10",
        "--export",
        "false",
        *extra,
    ]


def start(inputs, out, *extra) -> subprocess.Popen:
    return subprocess.Popen(
        [str(a) for a in command(inputs, out, *extra)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def steps(out) -> dict[int, tuple[float, float]]:
    """step -> (loss, norm), from complete lines."""
    path = out / "metrics.jsonl"
    if not path.is_file():
        return {}
    lines = path.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}


def wait_until(condition, process) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert process.poll() is None, f"the run ended first: {process.stdout.read()}"
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def uninterrupted(inputs):
    out = inputs / "straight"
    code, output = finish(start(inputs, out))
    assert code == 0, output
    assert sorted(steps(out)) == list(range(1, STEPS + 1))
    return steps(out)


@pytest.mark.parametrize("at_step", [13, 27])
def test_after_kill_9_the_remaining_losses_are_the_same_bits(inputs, uninterrupted, tmp_path, at_step):
    """From the checkpoint that is complete by then; it is written beside the steps and may take longer than some."""
    out = tmp_path / "run"
    process = start(inputs, out)
    wait_until(lambda: len(steps(out)) >= at_step and orlop.Engine.latest_checkpoint(str(out)), process)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    code, output = finish(start(inputs, out, "--resume", "must"))
    assert code == 0, output
    assert "resumed from" in output
    assert steps(out) == uninterrupted


def test_kill_9_while_saving_leaves_the_checkpoint_before(inputs, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = start(inputs, out)
    wait_until(lambda: (out / "step-10" / "manifest.json").is_file(), process)
    known = {p.name for p in out.iterdir()}

    def saving():
        return any(name.startswith("step-") and name not in known for name in os.listdir(out))

    wait_until(saving, process)
    process.kill()
    finish(process)
    code, output = finish(start(inputs, out, "--resume", "must"))
    assert code == 0, output
    assert steps(out) == uninterrupted
    assert not [p.name for p in out.iterdir() if p.name.endswith(".tmp")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_exits_130(inputs, uninterrupted, tmp_path, number):
    out = tmp_path / "run"
    process = start(inputs, out, "--save-every", "0")
    wait_until(lambda: len(steps(out)) >= 5, process)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 130, output
    last = max(steps(out))
    assert last < STEPS
    assert (out / f"step-{last}" / "manifest.json").is_file()
    assert number.name in output
    code, output = finish(start(inputs, out, "--save-every", "0"))
    assert code == 0, output
    assert steps(out) == uninterrupted


def test_resume_choices(inputs, tmp_path):
    out = tmp_path / "run"
    code, output = finish(start(inputs, out, "--resume", "must", "--steps", "2"))
    assert (code, "holds no complete checkpoint" in output) == (2, True)
    code, output = finish(start(inputs, out, "--resume", "never", "--steps", "2", "--save-every", "1"))
    assert code == 0, output
    code, output = finish(start(inputs, out, "--resume", "never", "--steps", "2"))
    assert (code, "holds step-2 already" in output) == (2, True)

    partial = out / "step-9"  # what a save that was cut short leaves behind
    shutil.copytree(out / "step-2", partial)
    (partial / "manifest.json").unlink()
    code, output = finish(start(inputs, out, "--resume", "auto", "--steps", "3"))
    assert code == 0, output
    assert "step-2 (step 2)" in output
    code, output = finish(start(inputs, out, "--resume", partial, "--steps", "3"))
    assert (code, "manifest" in output) == (4, True)


@pytest.mark.parametrize(("option", "value"), [("--seq-len", "16"), ("--seed", "5")])
def test_resume_with_other_data_is_refused(inputs, tmp_path, option, value):
    out = tmp_path / "run"
    assert finish(start(inputs, out, "--steps", "1", "--save-every", "1"))[0] == 0
    code, output = finish(start(inputs, out, "--steps", "2", option, value))
    assert code == 2
    assert "written with" in output


def test_two_runs_in_one_folder_are_refused(inputs, tmp_path):
    out = tmp_path / "run"
    first = start(inputs, out)
    wait_until(lambda: len(steps(out)) >= 1, first)
    code, output = finish(start(inputs, out))
    assert (code, "another run" in output) == (2, True)
    first.kill()
    finish(first)


def test_data_order_spans_epochs_and_resumes_inside_one(inputs, tmp_path):
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    assert finish(start(inputs, straight, "--steps", "40"))[0] == 0
    process = start(inputs, halves, "--steps", "40", "--save-every", "7")
    wait_until(lambda: (halves / "step-21" / "manifest.json").is_file(), process)
    process.kill()
    finish(process)
    code, output = finish(start(inputs, halves, "--steps", "40", "--save-every", "7"))
    assert code == 0, output
    assert steps(halves) == steps(straight)


def test_the_end_of_its_terminal_stops_the_run_with_its_state_saved(inputs, uninterrupted, tmp_path):
    """The shell sends SIGHUP, the kernel another one, and writing to the terminal is an error from then on."""
    out = tmp_path / "run"
    leader, terminal = os.openpty()
    process = subprocess.Popen(
        [str(a) for a in command(inputs, out, "--save-every", "0")],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    wait_until(lambda: len(steps(out)) >= 5, process)
    os.close(leader)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE_SECONDS) == 130
    assert (out / f"step-{max(steps(out))}" / "manifest.json").is_file()
    code, output = finish(start(inputs, out, "--save-every", "0"))
    assert code == 0, output
    assert steps(out) == uninterrupted


def test_a_run_under_nohup_goes_on_without_its_terminal(inputs, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [str(a) for a in ("nohup", *command(inputs, out))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_until(lambda: len(steps(out)) >= 5, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(DEADLINE_SECONDS) == 0
    assert steps(out) == uninterrupted


@pytest.mark.parametrize("reader", ["gone", "full disk"])
def test_a_run_goes_on_when_nobody_takes_what_it_prints(inputs, uninterrupted, tmp_path, reader):
    out = tmp_path / "run"
    if reader == "gone":
        read_end, write_end = os.pipe()
        os.close(read_end)
    else:
        write_end = os.open("/dev/full", os.O_WRONLY)
    result = subprocess.run(
        [str(a) for a in command(inputs, out)],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    os.close(write_end)
    assert (result.returncode, len(result.stderr.splitlines())) == (0, 1), result.stderr
    assert "the run goes on" in result.stderr
    assert steps(out) == uninterrupted
