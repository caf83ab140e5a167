"""What this process holds, for tests of what is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> tuple[int, int, int]:
    """Bytes of the C heap in use, objects of Python's own allocator, tensors that Python holds."""
    import torch

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    info = mallinfo2()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    return info.uordblks + info.hblkhd, sys.getallocatedblocks(), tensors


def arena_bytes() -> int:
    """Mappings that are kept out of core dumps, which host arenas are."""
    total = size = 0
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("VmFlags:") and "dd" in line.split():
                total += size
    return total


def resident_bytes() -> int:
    """Of the whole process. Moves up and down by some 10 MiB with what allocators keep for later."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """With it: `bytes`, the highest that this process held beyond what it held before, of memory that is not the
    content of a file, which the system may take back at any time, and `left`, what it holds now. Asks every
    millisecond."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free already is no part of what is held
        self._before = self._highest = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.001):
            self._highest = max(self._highest, _anonymous_bytes())

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self.left = _anonymous_bytes() - self._before
        self.bytes = max(self._highest - self._before, self.left)


def _anonymous_bytes() -> int:
    with open("/proc/self/statm") as statm:
        _, resident, of_files, *_ = statm.read().split()
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")
