"""What this machine has and allows, read from /proc, /sys and the driver. Changes nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

_IO_URING_SETUP = 425  # the same number on every Linux architecture
_ENOSYS, _EPERM, _EACCES = 38, 1, 13
_CAP_IPC_LOCK = 14
_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _fields(path: str) -> dict[str, str]:
    """KEY: VALUE lines; of repeated keys the first."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def cpu() -> dict[str, Any]:
    info = _fields("/proc/cpuinfo")
    flags = set(info.get("flags", "").split())
    return {
        "model": info.get("model name", platform.machine()),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "max_isa": os.environ.get("ORLOP_MAX_ISA"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
    }


def _cgroup_limit() -> int | None:
    """The smallest memory limit of this process's cgroup and its parents (v2), or of v1."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup/memory")
        if controllers not in ("", "memory"):
            continue
        folder = root / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            if root not in (candidate, *candidate.parents):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(str(candidate / name))
                if text.isdigit():
                    limits.append(int(text))
    return min(limits, default=None)


def memory() -> dict[str, Any]:
    info = _fields("/proc/meminfo")

    def kilobytes(key: str) -> int:
        return int(info.get(key, "0").split()[0]) * 1024

    total = kilobytes("MemTotal")
    limit = _cgroup_limit()
    thp = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "total_bytes": total,
        "available_bytes": kilobytes("MemAvailable"),
        "cgroup_limit_bytes": limit if limit is not None and limit < total else None,
        "transparent_hugepages": thp[thp.find("[") + 1 : thp.find("]")] if "[" in thp else "unknown",
        "free_hugepages": int(info.get("HugePages_Free", "0")),
    }


def locked_memory() -> dict[str, Any]:
    """How much may be pinned: without a limit when the process has CAP_IPC_LOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int(_fields("/proc/self/status").get("CapEff", "0"), 16)
    return {
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "cap_ipc_lock": bool(capabilities >> _CAP_IPC_LOCK & 1),
    }


def io_uring() -> str:
    """allowed, forbidden (seccomp, sysctl) or missing (old kernel)."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Zero entries is an invalid size: a kernel that lets us in says EINVAL, and no ring is made.
    libc.syscall(_IO_URING_SETUP, 0, None)
    error = ctypes.get_errno()
    if error == _ENOSYS:
        return "missing"
    return "forbidden" if error in (_EPERM, _EACCES) else "allowed"


def _cuda_devices(cuda: ctypes.CDLL) -> list[dict[str, Any]]:
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    devices = []
    for index in range(count.value):
        handle, name, total = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(handle), index)
        cuda.cuDeviceGetName(name, len(name), handle)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
        devices.append({"index": index, "name": name.value.decode(), "total_bytes": total.value})
    return devices


def gpus() -> dict[str, Any]:
    """CUDA devices as the driver lists them; empty where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"driver": None, "devices": []}
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    status = cuda.cuInit(0)
    return {"driver": driver, "devices": _cuda_devices(cuda) if status == 0 else [], "cuInit": status}


def free_space(paths: list[str]) -> dict[str, int]:
    return {path: shutil.disk_usage(path).free for path in paths}


def probe(paths: list[str]) -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "memory": memory(),
        "locked_memory": locked_memory(),
        "io_uring": io_uring(),
        "gpu": gpus(),
        "free_bytes": free_space(paths),
        "kernel": platform.release(),
    }
