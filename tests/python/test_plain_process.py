"""`python train.py`, as one process that nobody launched: no variable, no network, no port, no library of ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys

sockets = []
sys.addaudithook(lambda event, arguments: sockets.append(event) if event.startswith("socket.") else None)

def open_sockets():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass
    return [name for name in found if name.startswith("socket:")]

import orlop
%s
assert not open_sockets() and not sockets, (open_sockets(), sockets)
assert "libmpi" not in open("/proc/self/maps").read()
"""

ENGINE = """
config = orlop.EngineConfig(
    device="host", batch=orlop.BatchConfig(micro_batch_size=2, sequence_length=32, accumulation_steps=1)
)
loader = orlop.DataLoader(sys.argv[2], config.batch, seed=1, shuffle=True)
with orlop.Engine.open(sys.argv[1], config) as engine:
    for _ in range(2):
        assert engine.step([loader.next()]).loss > 0
    assert (engine.rank, engine.world_size) == (0, 1)
    assert not open_sockets(), "while it runs"
"""

DOORS = """
import torch
from orlop import deepspeed_compat

for door in ("optimizer", "streamed", "deepspeed"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if door == "deepspeed":
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"},
                  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
        engine, *_ = deepspeed_compat.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        continue
    if door == "streamed":
        model, optimizer = orlop.wrap(model, {"lr": 1e-3}, blocks=list(model))
    else:
        optimizer = orlop.AdamW(model.parameters(), module=model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert not open_sockets(), door
"""


@pytest.mark.parametrize("program", [ENGINE, DOORS], ids=["engine", "doors"])
def test_one_process_needs_no_launcher(model_dir, token_file, tmp_path, program):
    """Case U-07."""
    if program is DOORS:
        pytest.importorskip("torch")
    environment = {
        key: os.environ[key] for key in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH") if key in os.environ
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT % program, str(model_dir("llama")), str(token_file)],
        env=environment | {"OMP_WAIT_POLICY": "passive"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
