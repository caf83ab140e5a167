"""Door 2 on a CUDA device with weights on drives. Run: pytest -m gpu tests/python/test_wrap_nvme_gpu.py"""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")

from test_wrap_gpu import Model, deterministic, train  # noqa: E402, F401
from test_wrap_nvme import adapted, assert_no_files, assert_same_states, end, values  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def config_of(tmp_path, model, resident, share=1.0):
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    nvme = {"paths": [tmp_path / "drive"], "slot": "1MiB", "param_share": share}
    return {"limits": {"gpu": (resident + 2) * block}, "nvme": nvme}


@pytest.mark.parametrize("start", ["cpu", "cuda"])
@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_as_in_host_memory(tmp_path, dtype, share, resident, start):
    def run(share):
        model = Model(dtype=dtype).to(start)
        config = config_of(tmp_path, model, resident, share)
        if not share:
            del config["nvme"]
        model, optimizer = orlop.wrap(model, {"lr": 1e-3}, config, device="cuda")
        return model, optimizer, train(model, optimizer)

    reference, host, expected = run(0)
    model, optimizer, losses = run(share)
    assert losses == expected
    got, wanted = values(model), values(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    if resident == 0:
        assert_same_states(optimizer, host)
    stream = stream_of(model)
    assert len(stream.resident_blocks()) == resident
    assert all(stream.device_link._is_pinned(address) for address, _ in stream.drives.ranges())
    end(model, optimizer, tmp_path)


def test_an_evaluation_is_not_held_by_the_drives(tmp_path):
    """Slots are pinned without an optimizer, used again behind the copy out of them, and given back."""
    expected = Model(blocks=12).cuda()
    model, _ = orlop.wrap(Model(blocks=12), config=config_of(tmp_path, expected, 0), device="cuda")
    stream = stream_of(model)
    pinned = dict(stream.drives.ranges())
    assert pinned.items() <= stream.device_link._pinned.items()
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
            assert torch.equal(model(x), expected(x))
    assert stream.drives.fetches == stream.fetches == 48
    assert stream.peak_blocks == 2
    link = stream.device_link
    end(model, None, tmp_path)
    assert not pinned.keys() & link._pinned.keys()


def test_adapters_over_a_frozen_base(tmp_path):
    def run(nvme):
        model = adapted().bfloat16()
        config = config_of(tmp_path, model, 0)
        if not nvme:
            del config["nvme"]
        model, optimizer = orlop.wrap(model, {"lr": 1e-3}, config, device="cuda", nvme=None)
        return model, optimizer, train(model, optimizer)

    reference, _, expected = run(False)
    model, optimizer, losses = run(True)
    assert losses == expected
    got, wanted = values(model), values(reference)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    end(model, optimizer, tmp_path)


def test_a_read_that_fails_ends_the_pass(tmp_path):
    """No stream waits for ever, and no result of weights that never came is returned."""
    model, _ = orlop.wrap(Model(), config=config_of(tmp_path, Model(), 0), device="cuda")
    for path in tmp_path.rglob("*.swap"):
        os.truncate(path, 8192)
    with torch.no_grad(), pytest.raises(orlop.IoError, match="has 8192 bytes"):
        model(torch.zeros(16, 8, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    del model
    gc.collect()
    assert_no_files(tmp_path)
