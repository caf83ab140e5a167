"""orlop doctor: what this machine offers, and what stands in the way."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..hardware import probe
from ..progress import format_bytes

SUMMARY = "what this machine offers and forbids"
_NEEDED_ISA = "avx2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--path",
        action="append",
        metavar="DIR",
        help="folder on a drive that checkpoints or swapped states may go to; with --measure the first one's drive is measured, too",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure matmuls, copies, memory and the optimizer once (under a minute) and keep the figures: "
        "plans then predict times from them",
    )
    parser.add_argument("--device", default="auto", help="what to measure: auto, host, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="host threads; 0: every usable core")


def remarks(facts: dict[str, Any]) -> list[str]:
    """What is in the way: consequence and remedy, one line each."""
    lines = []
    if _NEEDED_ISA not in facts["cpu"]["isa"]:
        lines.append("no AVX2: the optimizer runs its scalar path, several times slower")
    if facts["memory"]["transparent_hugepages"] == "never":
        lines.append(
            "transparent huge pages are off: host memory is touched 4 KiB at a time; "
            "remedy: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    locked = facts["locked_memory"]
    if locked["memlock_bytes"] is not None and not locked["cap_ipc_lock"]:
        lines.append(
            f"at most {format_bytes(locked['memlock_bytes'])} may be locked: NVMe buffers are not "
            "registered with io_uring; remedy: ulimit -l unlimited"
        )
    if facts["io_uring"] != "allowed":
        lines.append(f"io_uring is {facts['io_uring']}: NVMe goes through plain reads and writes by threads")
    for drive in facts["drives"]:
        if not drive["direct"]:
            lines.append(
                f"{drive['directory']}: swapping goes through the page cache: {drive['why_not_direct']}"
            )
    if facts["gpu"]["driver"] and not facts["gpu"]["devices"]:
        lines.append(f"a CUDA driver is there but shows no device (cuInit {facts['gpu']['cuInit']})")
    return lines


def drives(paths: list[str]) -> list[dict[str, Any]]:
    """What each folder's drive offers to swapping. A folder that cannot be written is an error."""
    from .. import _orlop

    names = ("directory", "file_system", "device", "direct", "why_not_direct")
    names += ("free_bytes", "total_bytes", "percent_worn")
    reports = [_orlop.report_drive(path) for path in paths]
    return [{name: getattr(report, name) for name in names} for report in reports]


def _drive_text(drive: dict[str, Any]) -> str:
    parts = [
        f"{format_bytes(drive['free_bytes'])} free of {format_bytes(drive['total_bytes'])}",
        drive["file_system"] + (f" on {drive['device']}" if drive["device"] else ""),
        "O_DIRECT" if drive["direct"] else "no O_DIRECT",
    ]
    if drive["percent_worn"] is not None:
        parts.append(f"{drive['percent_worn']} % of its rated writes used")
    return ", ".join(parts)


def _print_text(facts: dict[str, Any]) -> None:
    cpu, memory = facts["cpu"], facts["memory"]
    limit = memory["cgroup_limit_bytes"]
    locked = facts["locked_memory"]
    unlimited = locked["memlock_bytes"] is None or locked["cap_ipc_lock"]
    devices = facts["gpu"]["devices"]
    rows = [
        ("cpu", f"{cpu['model']}, {cpu['usable_cpus']} usable CPUs, {cpu['numa_nodes']} NUMA node(s)"),
        ("isa", ", ".join(cpu["isa"]) + (f" (capped: {cpu['max_isa']})" if cpu["max_isa"] else "")),
        (
            "memory",
            f"{format_bytes(memory['total_bytes'])}, available {format_bytes(memory['available_bytes'])}"
            + (f", cgroup limit {format_bytes(limit)}" if limit else ""),
        ),
        (
            "huge pages",
            f"transparent: {memory['transparent_hugepages']}, reserved free: {memory['free_hugepages']}",
        ),
        ("locked memory", "no limit" if unlimited else format_bytes(locked["memlock_bytes"])),
        ("io_uring", facts["io_uring"]),
        ("gpu", "; ".join(f"{d['name']} {format_bytes(d['total_bytes'])}" for d in devices) or "none"),
        *((f"drive {drive['directory'].rstrip('/')}", _drive_text(drive)) for drive in facts["drives"]),
        ("kernel", facts["kernel"]),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from .. import _orlop

    drive = args.path[0] if args.path else ""
    measured = _orlop.measure_hardware(device=args.device, threads=args.threads, drive=drive)
    return {**json.loads(measured.json), "path": measured.path}


def _print_profile(profile: dict[str, Any]) -> None:
    matmuls = ", ".join(
        f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in profile["matmul_flop_per_s"].items()
    )
    rates = {
        "upload": "upload_bytes_per_s",
        "offload": "offload_bytes_per_s",
        "device memory": "device_bytes_per_s",
        "host update": "host_bytes_per_s",
        "collectives": "collective_bytes_per_s",
        "drive, read": "nvme_read_bytes_per_s",
        "drive, write": "nvme_write_bytes_per_s",
    }
    print(f"measured {profile['device']} with {profile['processor']}; kept in {profile['path']}")
    print(f"  matmuls        {matmuls}")
    for name, key in rates.items():
        if key in profile:
            print(f"  {name:<14} {profile[key] / 1e9:.2f} GB/s")
    print(f"  one operation  {1e6 * profile['launch_seconds']:.1f} us")


def run(args: argparse.Namespace) -> int:
    paths = args.path or ["."]
    for path in paths:
        if not Path(path).is_dir():
            raise UsageError(f"--path {path}: no such folder")
    facts = probe(paths)
    facts["drives"] = drives(paths if args.path or os.access(".", os.W_OK) else [])
    facts["remarks"] = remarks(facts)
    if args.measure:
        facts["profile"] = measure(args)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    _print_text(facts)
    for line in facts["remarks"]:
        print(f"note: {line}")
    if args.measure:
        _print_profile(facts["profile"])
    return 0
