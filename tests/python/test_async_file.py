"""orlop.AsyncFile: the verbs, every kind of buffer, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import orlop


@pytest.fixture(params=["auto", "threads"])
def file(request: pytest.FixtureRequest) -> orlop.AsyncFile:
    return orlop.AsyncFile(block_size=65536, queue_depth=8, engine=request.param)


def pattern(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_round_trip_of_any_length_and_alignment(file: orlop.AsyncFile, tmp_path: Path, count: int) -> None:
    data = pattern(count + 3)[3:]  # not aligned
    assert file.write(data, tmp_path / "a") == 1
    assert (tmp_path / "a").read_bytes() == data.tobytes()
    back = np.zeros(count, np.uint8)
    assert file.read(back, str(tmp_path / "a"), validate=True) == 1
    np.testing.assert_array_equal(back, data)


def test_async_verbs_count_and_hold_their_buffers(file: orlop.AsyncFile, tmp_path: Path) -> None:
    path = tmp_path / "a"
    for index in range(8):  # each array would be gone at once
        assert file.async_pwrite(pattern(300_000, index), path, file_offset=index * 300_000) == 0
    assert file.wait() == 8
    assert file.wait() == 0
    parts = [np.empty(300_000, np.uint8) for _ in range(8)]
    with open(path, "rb") as opened:
        for index, part in enumerate(parts):
            file.async_pread(part, opened.fileno(), index * 300_000)
        assert file.wait() == 8
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(part, pattern(300_000, index))


def test_buffers_of_every_dtype_and_protocol(file: orlop.AsyncFile, tmp_path: Path) -> None:
    floats = np.linspace(0, 1, 10_000, dtype=np.float32).reshape(100, 100)
    file.write(floats, tmp_path / "a")
    raw = bytearray(floats.nbytes)
    file.sync_pread(raw, tmp_path / "a")
    assert bytes(raw) == floats.tobytes()
    file.pwrite(memoryview(raw)[400:800], tmp_path / "b", False, False)
    assert (tmp_path / "b").read_bytes() == floats[1].tobytes()


def test_tensors_by_dlpack(file: orlop.AsyncFile, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(50_000, dtype=torch.float32).to(torch.bfloat16)
    file.write(tensor, tmp_path / "a")
    back = torch.zeros_like(tensor)
    file.pread(back[10_000:], tmp_path / "a", False, True, 20_000)
    assert file.wait() == 1
    assert torch.equal(back[10_000:], tensor[10_000:])
    locked = file.new_cpu_locked_tensor(1000, tensor)
    assert locked.dtype == torch.bfloat16 and locked.data_ptr() % 4096 == 0
    file.read(locked, tmp_path / "a")
    assert torch.equal(locked, tensor[:1000])
    file.free_cpu_locked_tensor(locked)
    with pytest.raises(orlop.UsageError, match="not contiguous"):
        file.write(tensor.reshape(2, -1).T, tmp_path / "a")


def test_locked_arrays_and_getters(tmp_path: Path) -> None:
    file = orlop.AsyncFile(1 << 20, 32, False, False, 1)
    assert (file.get_block_size(), file.get_queue_depth()) == (1 << 20, 32)
    assert file.get_alignment() >= 512
    assert file.backend in ("io_uring", "threads")
    array = file.new_cpu_locked_tensor(5000, np.empty(0, np.int16))
    assert array.dtype == np.int16 and array.shape == (5000,) and array.ctypes.data % 4096 == 0
    array[:] = 7
    file.write(array, tmp_path / "a")
    assert os.path.getsize(tmp_path / "a") == 10_000
    file.free_cpu_locked_tensor(array)


def test_what_cannot_work_is_refused(file: orlop.AsyncFile, tmp_path: Path) -> None:
    with pytest.raises(orlop.IoError, match="nowhere"):
        file.read(np.empty(10, np.uint8), tmp_path / "nowhere")
    with pytest.raises(orlop.UsageError, match="buffer"):
        file.write([1, 2, 3], tmp_path / "a")
    with pytest.raises((BufferError, ValueError)):
        file.read(np.empty((10, 10), np.uint8)[:, ::2], tmp_path / "a")
    with pytest.raises((BufferError, ValueError)):
        file.read(b"constant", tmp_path / "a")
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(orlop.IoError, match="short"):
        file.read(np.empty(10, np.uint8), tmp_path / "short")
    with pytest.raises(orlop.UsageError):
        orlop.AsyncFile(engine="magic")
