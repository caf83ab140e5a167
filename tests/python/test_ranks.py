"""The command over several processes that mpirun starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import build_model

orlop = pytest.importorskip("orlop")
STEPS = 12
DEADLINE_SECONDS = 180


def has_mpi() -> bool:
    from pathlib import Path

    library = "liborlop_mpi.so"
    folders = [Path(orlop.__file__).parent, *map(Path, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    # In the build tree the libraries lie beside the package's folder.
    folders.append(Path(orlop.__file__).parents[2] / "lib")
    return shutil.which("mpirun") is not None and any((folder / library).is_file() for folder in folders)


pytestmark = pytest.mark.skipif(not has_mpi(), reason="no mpirun, or a build without MPI")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("rank-inputs")
    build_model(folder / "model", "llama", tied=True)
    for name, lines in (("data", 80), ("held-out", 11)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in range(lines):
                text = f"line {i} of {name}: the heavy stores lie in the lowest deck" * (1 + i % 4)
                file.write(json.dumps({"text": text}) + "\n")
    return folder


def start(inputs, out, ranks: int, accum: int, *extra) -> subprocess.Popen:
    command = [
        *("mpirun", "-n", ranks, "--oversubscribe", "--mca", "btl", "self,vader"),
        *("--mca", "btl_vader_single_copy_mechanism", "none"),
        *(sys.executable, "-m", "orlop", "finetune", "--model", inputs / "model", "--output", out),
        *("--data", inputs / "data.jsonl", "--eval-data", inputs / "held-out.jsonl", "--device", "host"),
        *("--seq-len", "32", "--micro-batch", "2", "--accum", accum, "--precision", "fp32", "--lr", "1e-4"),
        *("--steps", STEPS, "--threads", "1", *extra),
    ]
    if ranks == 1:
        command = command[command.index(sys.executable) :]
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **environment, "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def test_the_limit_of_writes_per_day_is_that_of_all_ranks(inputs, tmp_path):
    drives = ("--nvme", tmp_path / "swap", "--nvme-optimizer-blocks", 3, "--nvme-param-blocks", 2)
    plan = ("plan", "--model", inputs / "model", "--device", "host", "--seq-len", 32, "--precision", "fp32", "--json")
    command = [str(word) for word in (sys.executable, "-m", "orlop", *plan, *drives, "--ranks", 2)]
    per_step = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[
        "nvme_written_bytes"
    ]
    limit = ("--nvme-writes-per-day", 2 * 5 * per_step)
    code, output = finish(start(inputs, tmp_path / "run", 2, 2, *drives, *limit))
    assert code == 3, output
    assert "by 2 ranks on the machine of rank 0" in output and "saved" in output
    (saved,) = (path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-"))
    assert 2 <= int(saved.name.removeprefix("step-")) <= 4
    code, output = finish(start(inputs, tmp_path / "run", 2, 2, *drives, "--nvme-writes-per-day", "1TiB"))
    assert (code, f"resumed from {saved}" in output) == (0, True), output


def records(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(out) if "loss" in r}


@pytest.fixture(scope="module")
def single(inputs):
    out = inputs / "single"
    code, output = finish(start(inputs, out, 1, 6, "--export", "true"))
    assert code == 0, output
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_does(inputs, single, tmp_path, ranks):
    code, output = finish(start(inputs, tmp_path / "run", ranks, 6 // ranks, "--export", "true"))
    assert code == 0, output
    assert output.count("rows of 32; 12 steps") == 1, "one rank tells of the run"
    assert losses(tmp_path / "run") == pytest.approx(losses(single), rel=1e-5)
    evaluations = [r["eval_loss"] for r in records(tmp_path / "run") if "eval_loss" in r]
    expected = [r["eval_loss"] for r in records(single) if "eval_loss" in r]
    assert evaluations == pytest.approx(expected, rel=1e-5)
    tokens = [r["tokens"] for r in records(tmp_path / "run") if "tokens" in r]
    assert tokens == [r["tokens"] for r in records(single) if "tokens" in r]
    exported = (tmp_path / "run" / "hf" / "model.safetensors").stat().st_size
    assert exported == (single / "hf" / "model.safetensors").stat().st_size


def test_a_signal_to_one_rank_stops_all_and_another_number_resumes(inputs, single, tmp_path):
    out = tmp_path / "run"
    process = start(inputs, out, 2, 3, "--steps", "2000", "--export", "false", "--schedule", "constant")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not ((out / "metrics.jsonl").is_file() and len(losses(out)) >= 2):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGTERM)
    _, output = finish(process)
    assert "with its state saved" in output
    saved = max(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))
    assert saved == max(losses(out))
    more = ("--steps", str(saved + 2), "--export", "false", "--schedule", "constant", "--resume", "must")
    code, output = finish(start(inputs, out, 3, 2, *more))
    assert code == 0, output
    assert f"(step {saved})" in output
    assert sorted(losses(out)) == list(range(1, saved + 3))


def test_an_error_of_one_is_an_error_of_all(inputs, tmp_path):
    code, output = finish(start(inputs, tmp_path / "run", 2, 3, "--resume", "must"))
    assert code != 0
    assert "holds no complete checkpoint" in output


def test_gpus_starts_the_processes_itself(inputs, single, tmp_path):
    process = start(inputs, tmp_path / "run", 1, 2, "--gpus", "3", "--export", "false")
    code, output = finish(process)
    assert code == 0, output
    assert "on 3 ranks" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(single), rel=1e-5)


@pytest.mark.parametrize(("gpus", "environment"), [("0", {}), ("2", {"WORLD_SIZE": "2"})])
def test_gpus_refuses_what_cannot_be(inputs, tmp_path, gpus, environment):
    command = [sys.executable, "-m", "orlop", "finetune", "--gpus", gpus, "--device", "host"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"--gpus {'is ' if gpus == '0' else ''}{gpus}" in done.stderr


def command_of(inputs, out) -> list[str]:
    command = ["-m", "orlop", "finetune", "--device", "host", "--model", str(inputs / "model")]
    return [*command, "--data", str(inputs / "data.jsonl"), "--output", str(out)]


def test_half_an_environment_is_refused(inputs, tmp_path):
    command = [sys.executable, *command_of(inputs, tmp_path / "run")]
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "RANK and LOCAL_RANK is not set beside" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_world_of_another_size_than_announced_is_refused(inputs, tmp_path):
    # As srun starts tasks for an MPI that it does not know: each would be a run of its own.
    environment = {**os.environ, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, *command_of(inputs, tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode != 0
    assert "srun says rank 1 of 2, but MPI has made rank 0 of 1" in done.stderr
    assert not (tmp_path / "run").exists()


def test_torchrun_is_told_what_to_use(inputs, tmp_path):
    pytest.importorskip("torch")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, *command_of(inputs, tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode != 0
    assert "torchrun has started this process as rank 1 of 2" in done.stderr
    assert "mpirun -n 2" in done.stderr
    assert "--gpus 2" in done.stderr
    assert not (tmp_path / "run").exists()
