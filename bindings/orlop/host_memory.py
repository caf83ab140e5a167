"""Host memory of weights outside of the optimizer's arenas."""

from __future__ import annotations

import bisect
import ctypes

import torch

_GIVEN_BACK_TOGETHER = 32 << 20
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


class MappedFiles:
    """Which host memory is the content of a file, as libraries load weights; as of now."""

    def __init__(self):
        self._begins, self._ends = [], []
        try:
            with open("/proc/self/maps") as maps:
                for line in maps:
                    addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
                    if inode != "0":
                        begin, end = (int(address, 16) for address in addresses.split("-"))
                        self._begins.append(begin)
                        self._ends.append(end)
        except OSError:
            pass  # not Linux, or no /proc: then sizes alone tell

    def hold(self, values: torch.Tensor) -> bool:
        at = bisect.bisect_right(self._begins, values.data_ptr()) - 1
        return at >= 0 and values.data_ptr() < self._ends[at]


def owned(values: torch.Tensor, files: MappedFiles) -> torch.Tensor:
    """`values`, copied if their memory is part of something larger or of a file, which may change or go."""
    is_part = values.untyped_storage().nbytes() != values.nbytes
    return values.clone() if is_part or files.hold(values) else values


class FreedMemory:
    """Gives memory that was freed back to the system, where the C heap would keep it for later."""

    def __init__(self):
        self._bytes = 0

    def add(self, size: int) -> None:
        """`size` bytes more are free; they go back with others."""
        self._bytes += size
        if self._bytes >= _GIVEN_BACK_TOGETHER:
            self.give_back()

    def give_back(self) -> None:
        self._bytes = 0
        if _trim is not None:
            _trim(0)
