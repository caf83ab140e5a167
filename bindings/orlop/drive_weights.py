"""The weights of blocks that lie on drives, and the slots of host memory through which they come to the device."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch

from . import _orlop

_SLOTS = 3  # for blocks: at work, next, and the one after


def spread(sizes: Sequence[int], share: float) -> list[int]:
    """Positions of what is to lie on drives, of `sizes` bytes in the order of their use: about `share` of all bytes,
    spread evenly, so that the drives read one while those beside it are at work."""
    chosen, wanted, taken = [], 0.0, 0
    for position, size in enumerate(sizes):
        wanted += share * size
        if size > 0 and taken + size / 2 <= wanted:
            chosen.append(position)
            taken += size
    return chosen


class Reading:
    """The weights of a block on their way into a slot. With its `native` and `index`, the ticket of their arrival, it
    is to a link what a home with an update under way is."""

    def __init__(self, native, ticket: int, slot: _Slot, block):
        self.native, self.index, self.slot = native, ticket, slot
        self.version_address = native.written_address(0)  # of the word that says which tickets have ended
        self._block = weakref.ref(block)

    def drop(self) -> None:
        block = self._block()
        if block is not None and block.reading is self:
            block.reading = None


class _Slot:
    def __init__(self, index: int, memory: torch.Tensor):
        self.index, self.memory = index, memory
        self.reading: Reading | None = None  # the last one
        self.left = None  # event of the last copy to the device out of it
        self._waited_for: list[tuple[int, object]] = []  # such events, and the tickets of fetches behind them

    def begin(self, reading: Reading, ended: int) -> None:
        """`ended`: the last ticket that has ended, up to which nobody waits for an event any more."""
        if self.reading is not None:
            self.reading.drop()
        self.reading = reading
        self._waited_for = [kept for kept in self._waited_for if kept[0] > ended]
        self._waited_for.append((reading.index, self.left))


class DriveWeights:
    """Files for weights, in the directories of `drives`, which go with close() or when this is collected."""

    def __init__(self, drives: _orlop.StateDrives):
        self.native = _orlop.WeightDrives(drives)
        self.bytes = 0  # on the drives
        self.slot_bytes = 0  # of all slots
        self.fetches = 0
        self._index: dict[torch.Tensor, int] = {}
        self._slots: list[_Slot] = []
        self._next = 0
        self._links: list = []
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self.native, self._links)

    # --- whole weights --------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[Sequence[tuple[torch.Tensor, str]]]) -> None:
        """Room on the drives for the weights of these blocks, parameters with their names, and the slots."""
        named = [pair for block in blocks for pair in block]
        if not named:
            return
        sizes = [_bytes(p) for p, _ in named]
        first = self.native.add([name for _, name in named], sizes)
        self._index = {p: first + i for i, (p, _) in enumerate(named)}
        self.bytes = sum(sizes)
        most = max(self.native.slot_bytes([_bytes(p) for p, _ in block]) for block in blocks)
        self.native.take_slots(_SLOTS, most)
        self.slot_bytes = _SLOTS * most
        self._slots = [_Slot(i, torch.from_numpy(self.native.slot(i, most))) for i in range(_SLOTS)]

    def has_room_for(self, parameter: torch.Tensor) -> bool:
        return parameter in self._index

    def index_of(self, parameter: torch.Tensor) -> int:
        return self._index[parameter]

    def write(self, index: int, values: torch.Tensor) -> None:
        """`values` (numel) in host memory, of the weight's dtype, become what it is here."""
        self.native.write(index, values.data_ptr(), values.nbytes)

    def read(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """`values` (numel) in host memory, of the weight's dtype, become what it is here."""
        self.native.read(index, values.data_ptr(), values.nbytes)
        return values

    # --- blocks ---------------------------------------------------------------------------------

    def begin(self, block, link) -> None:
        """The weights of a block are on their way into a slot, unless they are already; returns at once."""
        if block.reading is not None:
            return
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        indices = [entry.index for entry in block.entries if entry.is_on_drives]
        fence = (0, 0) if link is None else link.fence(slot.left)
        block.reading = Reading(self.native, self.native.fetch(indices, slot.index, *fence), slot, block)
        ended = ctypes.c_uint32.from_address(block.reading.version_address).value
        slot.begin(block.reading, ended)
        self.fetches += 1

    def bring(self, block, link):
        """Copies what begin() reads to the block's room on the device, behind its arrival, without waiting for it;
        returns the event behind the copy."""
        reading, block.reading = block.reading, None
        arrived = link.bring((reading, reading.index), lambda: self._pairs(block, reading.slot))
        reading.slot.left = arrived
        return arrived

    def copy(self, block) -> None:
        """Waits for what begin() reads and copies it to the block's room."""
        reading, block.reading = block.reading, None
        self.native.wait([reading.index])
        for into, weights in zip(*self._pairs(block, reading.slot), strict=True):
            into.copy_(weights)

    def _pairs(self, block, slot: _Slot) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(numel) each: where the weights of a block go, and where they are in a slot."""
        into, weights, offset = [], [], 0
        for entry in block.entries:
            if entry.is_on_drives:
                into.append(entry.flat)
                weights.append(slot.memory[offset : offset + entry.bytes].view(entry.flat.dtype))
                offset += self.native.slot_bytes([entry.bytes])
        return into, weights

    def forget_readings(self) -> None:
        """What is in the slots, or on its way there, is not used."""
        for slot in self._slots:
            if slot.reading is not None:
                slot.reading.drop()

    def check(self) -> None:
        """Waits for all that is on its way, and raises what went wrong with it."""
        self.native.synchronize()

    def pin(self, link) -> None:
        """The device of the link copies out of the slots until close()."""
        link.pin(self.ranges())
        self._links.append(link)

    def ranges(self) -> list[tuple[int, int]]:
        """Host memory that a device copies from."""
        return self.native.ranges()

    def close(self) -> None:
        self.forget_readings()
        for slot in self._slots:  # its memory would keep the files
            slot.memory = slot.reading = slot.left = None
        self._slots.clear()
        self._finalizer()


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _close(owner: int, native, links) -> None:
    """Not in a fork, which has neither the threads nor the memory."""
    if os.getpid() == owner:
        for link in links:
            link.unpin_ranges(native.ranges())
        native.close()
