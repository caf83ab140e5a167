"""The command over several processes: by mpirun, by torchrun, and by itself (--gpus)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import build_model

orlop = pytest.importorskip("orlop")
STEPS = 12
DEADLINE_SECONDS = 180


def has_mpi() -> bool:
    library = "liborlop_mpi.so"
    folders = [Path(orlop.__file__).parent, *map(Path, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    # In the build tree the libraries lie beside the package's folder.
    folders.append(Path(orlop.__file__).parents[2] / "lib")
    return shutil.which("mpirun") is not None and any((folder / library).is_file() for folder in folders)


needs_mpi = pytest.mark.skipif(not has_mpi(), reason="no mpirun, or a build without MPI")
# What starts the ranks; the same command behind each.
LAUNCHERS = [pytest.param("mpirun", marks=needs_mpi), "torchrun", "gpus"]


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


def launch(launcher: str, ranks: int) -> list:
    """The words before `-m orlop`."""
    if launcher == "mpirun":
        quiet = ("--mca", "btl", "self,vader", "--mca", "btl_vader_single_copy_mechanism", "none")
        return ["mpirun", "-n", ranks, "--oversubscribe", *quiet, sys.executable]
    if launcher == "torchrun":
        pytest.importorskip("torch")
        run = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        return [*run, "--nproc-per-node", ranks]
    return [sys.executable]


def start(inputs, out, launcher: str, ranks: int, accum: int, *extra) -> subprocess.Popen:
    command = [
        *([sys.executable] if ranks == 1 else launch(launcher, ranks)),
        *("-m", "orlop", "finetune", "--model", inputs / "model", "--output", out),
        *("--data", inputs / "data.jsonl", "--eval-data", inputs / "held-out.jsonl", "--device", "host"),
        *("--seq-len", "32", "--micro-batch", "2", "--accum", accum, "--precision", "fp32", "--lr", "1e-4"),
        *("--steps", STEPS, "--threads", "1", *extra),
    ]
    if launcher == "gpus" and ranks > 1:
        command += ["--gpus", ranks]
    return run(command)


def run(command: list, **environment: str) -> subprocess.Popen:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **as_root, "OMP_WAIT_POLICY": "passive", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def ranks_below(process: subprocess.Popen) -> list[int]:
    """The process ids of the ranks that a launcher has started, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == process.pid:
            continue
        try:
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        told = dict(variable.partition("=")[::2] for variable in variables)
        rank = told.get("RANK", told.get("OMPI_COMM_WORLD_RANK"))
        if parent == process.pid and rank is not None and "orlop" in words:
            found[int(rank)] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def wait_for_steps(process: subprocess.Popen, out, steps: int = 2) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not ((out / "metrics.jsonl").is_file() and len(losses(out)) >= steps):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def test_the_limit_of_writes_per_day_is_that_of_all_ranks(inputs, tmp_path):
    drives = ("--nvme", tmp_path / "swap", "--nvme-optimizer-blocks", 3, "--nvme-param-blocks", 2)
    plan = ["plan", "--model", inputs / "model", "--device", "host", "--seq-len", 32]
    plan += ["--precision", "fp32", "--json"]
    command = [str(word) for word in (sys.executable, "-m", "orlop", *plan, *drives, "--ranks", 2)]
    per_step = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[
        "nvme_written_bytes"
    ]
    limit = ("--nvme-writes-per-day", 2 * 5 * per_step)
    code, output = finish(start(inputs, tmp_path / "run", "gpus", 2, 2, *drives, *limit))
    assert code == 3, output
    assert "by 2 ranks on the machine of rank 0" in output and "saved" in output
    (saved,) = (path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-"))
    assert 2 <= int(saved.name.removeprefix("step-")) <= 4
    code, output = finish(
        start(inputs, tmp_path / "run", "gpus", 2, 2, *drives, "--nvme-writes-per-day", "1TiB")
    )
    assert (code, f"resumed from {saved}" in output) == (0, True), output


def records(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(out) if "loss" in r}


@pytest.fixture(scope="module")
def single(inputs):
    out = inputs / "single"
    code, output = finish(start(inputs, out, "none", 1, 6, "--export", "true"))
    assert code == 0, output
    return out


@pytest.fixture(scope="module")
def two_ranks(inputs):
    """The losses of two ranks by sockets."""
    out = inputs / "two-ranks"
    code, output = finish(start(inputs, out, "gpus", 2, 3, "--export", "false"))
    assert code == 0, output
    return losses(out)


def test_gradients_travel_in_sixteen_bits_when_told(inputs, two_ranks, tmp_path):
    wire = ("--grad-wire", "bf16")
    code, output = finish(start(inputs, tmp_path / "run", "gpus", 2, 3, "--export", "false", *wire))
    assert code == 0, output
    assert "which send each other gradients in BF16" in output
    assert losses(tmp_path / "run") == pytest.approx(two_ranks, rel=1e-4)
    assert losses(tmp_path / "run") != two_ranks
    plan = ["-m", "orlop", "plan", "--device", "host", "--seq-len", "32", "--json", "--ranks", "2"]
    command = [sys.executable, *plan, *wire, "--model", str(inputs / "model")]
    report = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(report.stdout)["gradient_wire"] == "BF16"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_train_as_one_process_does(inputs, single, two_ranks, tmp_path, launcher, ranks):
    out = tmp_path / "run"
    code, output = finish(start(inputs, out, launcher, ranks, 6 // ranks, "--export", "true"))
    assert code == 0, output
    assert output.count(f"rows of 32; 12 steps on {ranks} ranks") == 1, "one rank tells of the run"
    assert losses(out) == pytest.approx(losses(single), rel=1e-5)
    if ranks == 2:
        assert losses(out) == two_ranks, "the same bits, whatever carries them"
    evaluations = [r["eval_loss"] for r in records(out) if "eval_loss" in r]
    expected = [r["eval_loss"] for r in records(single) if "eval_loss" in r]
    assert evaluations == pytest.approx(expected, rel=1e-5)
    tokens = [r["tokens"] for r in records(out) if "tokens" in r]
    assert tokens == [r["tokens"] for r in records(single) if "tokens" in r]
    exported = (out / "hf" / "model.safetensors").stat().st_size
    assert exported == (single / "hf" / "model.safetensors").stat().st_size


ENDLESS = ("--steps", "5000", "--export", "false", "--schedule", "constant")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_to_one_rank_stops_all_and_another_number_resumes(inputs, tmp_path, launcher):
    out = tmp_path / "run"
    process = start(inputs, out, launcher, 2, 3, *ENDLESS)
    wait_for_steps(process, out)
    os.kill(ranks_below(process)[1], signal.SIGTERM)
    _, output = finish(process)
    assert "with its state saved" in output
    saved = max(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))
    assert saved == max(losses(out))
    more = ("--steps", str(saved + 2), "--export", "false", "--schedule", "constant", "--resume", "must")
    code, output = finish(start(inputs, out, launcher, 3, 2, *more))
    assert code == 0, output
    assert f"(step {saved})" in output
    assert sorted(losses(out)) == list(range(1, saved + 3))


@pytest.mark.parametrize("launcher", ["torchrun", "gpus"])
def test_a_killed_rank_ends_the_others_with_its_name(inputs, tmp_path, launcher):
    """Case D-10."""
    out = tmp_path / "run"
    process = start(inputs, out, launcher, 3, 2, *ENDLESS)
    wait_for_steps(process, out)
    os.kill(ranks_below(process)[1], signal.SIGKILL)
    killed = time.monotonic()
    code, output = finish(process)
    # torchrun ends the others itself as soon as it sees one end: they may not get to say why.
    assert time.monotonic() - killed < 30 + (30 if launcher == "torchrun" else 0)
    if launcher == "gpus":
        assert code == 128 + signal.SIGKILL
        assert "orlop: rank 1 was ended by SIGKILL" in output
        assert output.count("rank 1 has ended without a word") == 2
    else:
        assert code != 0


def test_an_error_of_one_is_an_error_of_all(inputs, tmp_path):
    code, output = finish(start(inputs, tmp_path / "run", "gpus", 2, 3, "--resume", "must"))
    assert code == 2, "that of the rank that went wrong, not of those that it left"
    assert "holds no complete checkpoint" in output


def test_gpus_passes_on_what_asks_it_to_stop(inputs, tmp_path):
    out = tmp_path / "run"
    process = start(inputs, out, "gpus", 2, 3, *ENDLESS)
    wait_for_steps(process, out)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "SIGINT: stopped after step" in output


def test_no_rank_outlives_gpus(inputs, tmp_path):
    out = tmp_path / "run"
    process = start(inputs, out, "gpus", 2, 3, *ENDLESS)
    wait_for_steps(process, out)
    ranks = ranks_below(process)
    assert len(ranks) == 2
    process.kill()
    finish(process)
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


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


@needs_mpi
def test_a_world_of_another_size_than_announced_is_refused(inputs, tmp_path):
    # As srun starts tasks for an MPI that it does not know: each would be a run of its own.
    environment = {**os.environ, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, *command_of(inputs, tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode != 0
    assert "srun says rank 1 of 2, but MPI has made rank 0 of 1" in done.stderr
    assert not (tmp_path / "run").exists()


MEET = """
import os
import sys

import orlop

if sys.argv[1:] == ["torch"]:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
ranks = orlop.Ranks()
told = ranks.from_first(f"from {ranks.rank}")
print(f"heard {ranks.rank} {ranks.world_size} {told}")  # in one piece, beside the other rank's
if sys.argv[1:] == ["torch"]:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def environment_of_torchrun(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {**{name: str(value) for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("group", ["none", "torch"])
def test_a_script_under_torchrun_meets_beside_its_process_group(tmp_path, group):
    script = tmp_path / "script.py"
    script.write_text(MEET)
    code, output = finish(run([*launch("torchrun", 2), script, group]))
    assert code == 0, output
    assert "heard 0 2 from 0" in output
    assert "heard 1 2 from 0" in output


def test_ranks_meet_without_an_agent_of_torchrun():
    """As launchers that set torch's variables only: rank 0 holds the store."""
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [run([sys.executable, "-c", MEET], **environment_of_torchrun(rank, port)) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        code, output = finish(process)
        assert code == 0, output
        assert f"heard {rank} 2 from 0" in output


def test_ranks_meet_where_they_are_told():
    """No launcher knows of the others but by this variable, and neither MPI nor torch is asked."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    script = "import sys; sys.modules['torch'] = None\n" + MEET
    tasks = [
        {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": rank, "ORLOP_RENDEZVOUS": place}
        for rank in ("0", "1")
    ]
    ranks = [run([sys.executable, "-c", script], **task) for task in tasks]
    for rank, process in enumerate(ranks):
        code, output = finish(process)
        assert code == 0, output
        assert f"heard {rank} 2 from 0" in output


def test_torchrun_without_torch_is_told_what_to_do():
    script = "import sys; sys.modules['torch'] = None\n" + MEET
    code, output = finish(run([sys.executable, "-c", script], **environment_of_torchrun(0, 1)))
    assert code != 0
    assert "UsageError" in output
    assert "pip install torch, or set ORLOP_RENDEZVOUS=host:port" in output
