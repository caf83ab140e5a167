"""orlop doctor: what this machine offers, and what stands in the way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..hardware import probe
from ..progress import format_bytes

SUMMARY = "what this machine offers and forbids"
_NEEDED_ISA = "avx2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--path", action="append", metavar="DIR", help="folder whose free space matters")


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
    if facts["gpu"]["driver"] and not facts["gpu"]["devices"]:
        lines.append(f"a CUDA driver is there but shows no device (cuInit {facts['gpu']['cuInit']})")
    return lines


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
        *((f"free in {path}", format_bytes(free)) for path, free in facts["free_bytes"].items()),
        ("kernel", facts["kernel"]),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")


def run(args: argparse.Namespace) -> int:
    paths = args.path or ["."]
    for path in paths:
        if not Path(path).is_dir():
            raise UsageError(f"--path {path}: no such folder")
    facts = probe(paths)
    facts["remarks"] = remarks(facts)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    _print_text(facts)
    for line in facts["remarks"]:
        print(f"note: {line}")
    return 0
