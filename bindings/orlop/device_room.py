"""Device memory that is left beside what a training step itself needs at its peak."""

from __future__ import annotations

import torch

_RESERVE = 1 << 30  # for what torch's allocator cannot use, and for libraries
_RESERVED_PART = 16  # and, where no limit is given, one part in so many of all


class DeviceRoom:
    """limit: bytes that all of torch's tensors on the device may take at most; None: what is free."""

    def __init__(self, device: torch.device, limit: int | None = None):
        self._device, self._limit = device, limit
        self._highest = 0  # bytes of torch's tensors at their highest, when last looked at
        self._peak = 0  # the same without what was taken here then
        self._taken = 0

    def left(self) -> int:
        """Bytes that leave room for the highest use of memory so far; below 0 where that has grown since."""
        return self._usable() - self._needed() - self._taken

    def take(self, size: int) -> bool:
        """Whether `size` bytes more are left, which then are taken."""
        if size > self.left():
            return False
        self._taken += size
        return True

    def give(self, size: int) -> None:
        self._taken -= size

    def clear(self) -> None:
        """All that was taken is free again."""
        self._taken = 0

    def _needed(self) -> int:
        # What was taken may or may not be part of the highest use: the largest seen without it counts. A use that
        # was seen before had other bytes taken beside it, so only a higher one tells something new.
        highest = self._highest_use()
        if highest > self._highest:
            self._highest = highest
            self._peak = max(self._peak, highest - self._taken)
        return self._peak

    def _highest_use(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def _usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        own = free + torch.cuda.memory_reserved(self._device)  # what torch holds, in use or cached
        if self._limit is None or own < self._limit:
            return own - own // _RESERVED_PART - _RESERVE
        return self._limit - _RESERVE
