"""Optimizer states on drives with weights on a CUDA device. Run: pytest -m gpu tests/python/test_adamw_nvme_gpu.py"""

from __future__ import annotations

import functools
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")

from test_adamw_nvme import assert_equal, assert_no_files, weights  # noqa: E402
from test_placement import Model as PlainModel  # noqa: E402
from test_wrap_gpu import train  # noqa: E402

import orlop  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Model = functools.partial(PlainModel, width=1024, blocks=6)
LAYOUTS = pytest.mark.parametrize(
    ("dtype", "moments"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")]
)


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drives(tmp_path):
    return {"paths": [tmp_path], "slot": "2MiB", "verify": "full"}


def finish(optimizer, model):
    states = {
        key: {
            name: value.cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        for key, state in optimizer.state_dict()["state"].items()
    }
    places = set(optimizer.placement())
    kept = weights(model)
    optimizer.close()
    return (states, {name: value.cpu() for name, value in kept.items()}), places


@LAYOUTS
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
@pytest.mark.parametrize("states", ["host", 20 << 20, "auto"])
def test_door_1_has_the_bits_of_states_in_host_memory(tmp_path, dtype, moments, hidden, states):
    def run(nvme, where):
        model = Model(dtype).cuda()
        options = {"module": model if hidden else None, "moments": moments, "states": where, "nvme": nvme}
        optimizer = orlop.AdamW(model.parameters(), lr=1e-3, **options)
        losses = train(model, optimizer, 6)
        result, places = finish(optimizer, model)
        return (losses, *result), places

    expected, _ = run(None, "host")
    got, places = run(drives(tmp_path), states)
    assert_equal(got, expected)
    device = str(torch.device("cuda", torch.cuda.current_device()))
    assert places == {"host": {"nvme"}, "auto": {device}}.get(states, {"nvme", device})
    assert_no_files(tmp_path)


@LAYOUTS
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_door_2_has_the_bits_of_states_in_host_memory(tmp_path, dtype, moments, start):
    def run(section):
        model = Model(dtype).to(start)
        limit = 3 * (1024 * 1024 + 1024) * dtype.itemsize
        config = {"limits": {"gpu": limit}, **section}
        arguments = {"lr": 1e-3, "moments": moments, "states": "host"}
        model, optimizer = orlop.wrap(model, arguments, config, device="cuda")
        losses = train(model, optimizer, 6)
        result, places = finish(optimizer, model)
        return (losses, *result), places

    expected, _ = run({})
    got, places = run({"nvme": drives(tmp_path)})
    assert_equal(got, expected)
    assert places == {"nvme"}
    assert_no_files(tmp_path)
