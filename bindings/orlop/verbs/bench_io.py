"""orlop bench io: reads and writes a drive by block size and depth, then once more at the best point beside
fio, where that is installed: the same file, block size, depth, O_DIRECT and bytes of memory, by turns.

fio uses as many bytes of memory as it has in flight. Those stay in the processor's cache, into which many drives move
faster than into memory, so our side has as many in that comparison. What an engine gets in its slots comes after it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig
from ..errors import UsageError
from .options import config_from_args

_PATTERNS = ("read", "write", "mixed")
_SLOTS_BYTES = 6 * (32 << 20)  # as the slots of an engine
_ALIGNMENT = 4096


class _OurSide:
    """The file through orlop.AsyncFile, in `memory_bytes` of memory that are used over and over: what was in them
    does not matter. All calls of a pass are issued at once."""

    def __init__(self, path: Path, size: int, memory_bytes: int, point: dict, config: RunConfig) -> None:
        from .. import _orlop

        self._file = _orlop.AsyncFile(
            point["block_bytes"], point["depth"], direct=config.nvme_direct, engine=config.nvme_engine
        )
        self._path = str(path)
        self._piece = min(memory_bytes, size // 2) // _ALIGNMENT * _ALIGNMENT
        self.size = size // self._piece * self._piece
        self._memory = self._file.new_cpu_locked_tensor(self._piece, np.empty(0, np.uint8))
        self._memory[:] = np.random.default_rng(0).integers(0, 256, self._piece, np.uint8)
        self.run("write")  # turns allocated blocks into written ones

    def run(self, pattern: str) -> float:
        """Bytes per second of one pass over the file. Mixed: every second call reads, the others write."""
        begin = time.perf_counter()
        for index in range(self.size // self._piece):
            reads = pattern == "read" or (pattern == "mixed" and index % 2 == 0)
            move = self._file.async_pread if reads else self._file.async_pwrite
            move(self._memory, self._path, index * self._piece)
        self._file.wait()
        return self.size / (time.perf_counter() - begin)


def _fio_memory(block: int, depth: int) -> str:
    """Huge pages as on our side, if the system has set enough of them aside (sysctl vm.nr_hugepages)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("HugePages_Free:") and int(line.split()[1]) * (2 << 20) > (depth + 1) * block:
            return "mmaphuge"
    return "malloc"


def _run_fio(path: Path, size: int, block: int, depth: int, direct: bool, pattern: str) -> float:
    command = [
        "fio",
        "--name=peer",
        f"--filename={path}",
        f"--size={size}",
        f"--rw={'rw' if pattern == 'mixed' else pattern}",
        f"--bs={block}",
        f"--iodepth={depth}",
        f"--direct={int(direct)}",
        "--ioengine=io_uring",
        "--fixedbufs=1",
        "--registerfiles=1",
        "--thread=1",
        "--invalidate=0",
        "--scramble_buffers=0",
        f"--iomem={_fio_memory(block, depth)}",
        "--allow_file_create=0",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"fio ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout)["jobs"][0]
    moved = sum(job[way]["io_bytes"] for way in ("read", "write"))
    return moved / (max(job[way]["runtime"] for way in ("read", "write")) * 1e-3)


def _pairs(ours: Callable[[], float], peer: Callable[[], float], count: int) -> dict[str, float]:
    """Medians of both and of the ratio over pairs; who goes first alternates as well."""
    mine, theirs = [], []
    for index in range(count):
        order = ((peer, theirs), (ours, mine)) if index % 2 == 0 else ((ours, mine), (peer, theirs))
        for measure, into in order:
            into.append(measure())
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {
        "bytes_per_second": statistics.median(mine),
        "fio_bytes_per_second": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def beside_fio(folder: str, size: int, point: dict, pairs: int, config: RunConfig) -> dict[str, Any]:
    """{pattern: medians} at a block size and depth; leaves nothing behind."""
    block, depth = point["block_bytes"], point["depth"]
    path = Path(folder) / f"orlop-bench-{os.getpid()}.tmp"
    try:
        side = _OurSide(path, size, block * depth, point, config)
        rows = {
            pattern: _pairs(
                functools.partial(side.run, pattern),
                functools.partial(_run_fio, path, side.size, block, depth, config.nvme_direct, pattern),
                pairs,
            )
            for pattern in _PATTERNS
        }
        side = _OurSide(path, size, _SLOTS_BYTES, point, config)
        for pattern, row in rows.items():
            row["in_slots_bytes_per_second"] = statistics.median(side.run(pattern) for _ in range(pairs))
        return rows
    finally:
        path.unlink(missing_ok=True)


def _print_sweep(path: str, result: dict[str, Any]) -> None:
    print(f"{path}: {result['backend']}, {'O_DIRECT' if result['direct'] else 'through the page cache'}")
    print("   block  depth  read GiB/s  write GiB/s")
    for point in result["points"]:
        print(
            f"{point['block_bytes'] // 1024:>4} KiB  {point['depth']:>5}  {point['read_gib_per_s']:>10.2f}"
            f"  {point['write_gib_per_s']:>11.2f}"
        )
    best = result["best"]
    print(f"best: --nvme-block {best['block_bytes'] // 1024}KiB --nvme-queue-depth {best['depth']}")


def _print_peer(result: dict[str, Any], pairs: int) -> None:
    if result["beside_fio"] is None:
        print("fio is not installed: nothing to compare with")
        return
    best = result["best"]
    memory = _fio_memory(best["block_bytes"], best["depth"])
    print(f"at that point beside fio ({memory}), medians of {pairs} alternating pairs:")
    for pattern, row in result["beside_fio"].items():
        print(
            f"  {pattern:<5}  {row['bytes_per_second'] / 1e9:.2f} GB/s, fio {row['fio_bytes_per_second'] / 1e9:.2f}: "
            f"{row['ratio']:.3f} ({row['least_ratio']:.2f} to {row['most_ratio']:.2f}); in {_SLOTS_BYTES >> 20} MiB of "
            f"slots {row['in_slots_bytes_per_second'] / 1e9:.2f}"
        )


def run(args: argparse.Namespace) -> int:
    from .. import _orlop

    settings = argparse.Namespace(**{**vars(args), "settings": args.settings[1:]})
    config = config_from_args(settings)
    swept = _orlop.sweep_aio(args.path, args.size, engine=config.nvme_engine, direct=config.nvme_direct)
    names = ("block_bytes", "depth", "read_gib_per_s", "write_gib_per_s")
    *points, best = ({name: getattr(point, name) for name in names} for point in (*swept.points, swept.best))
    result: dict[str, Any] = {
        "backend": swept.backend,
        "direct": swept.direct,
        "points": points,
        "best": best,
        "beside_fio": None,
    }
    if shutil.which("fio") is not None:
        result["beside_fio"] = beside_fio(args.path, args.size, best, args.pairs, config)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_sweep(args.path, result)
        _print_peer(result, args.pairs)
    return 0
