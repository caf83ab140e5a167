"""Which optimizer states live on the device: as many as fit beside what a training step needs there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from .adam_checks import check_choice
from .gradient_batch import keep
from .gradient_sum import DeviceSum, HostSum
from .state_home import DeviceHome, device_bytes

_log = logging.getLogger("orlop")
_CHECKED_EVERY = 16  # steps
_PLACES = {"host": "in host memory", "nvme": "on drives"}


def choose(sizes: Sequence[int], room: int) -> list[int]:
    """Positions of what is to live on the device, of `sizes` bytes in the order of first use in a forward.

    An update on the host hides under the part of the next forward that comes before its weights are used: the first
    have nothing to hide under, the last nearly all of it. So the first come first, and what does not fit is passed
    over for what does.
    """
    chosen = []
    for position, size in enumerate(sizes):
        if size <= room:
            chosen.append(position)
            room -= size
    return chosen


class Placement:
    """Moves states between host memory and the device, for one optimizer; their bits do not depend on it.

    States begin in host memory. The first step() that has updated shows what a whole step needs on the device at its
    highest; what `DeviceRoom` then says is left, and no more than `limit` bytes, takes states with room for their
    gradients, which stay on the device from then on. Should later steps need more, states go back.
    """

    def __init__(self, optimizer, limit: int | None):
        self._optimizer = weakref.ref(optimizer)
        self._limit = limit
        self._waiting: list = []  # slots that no step has been seen with
        self._steps = 0

    def expect(self, slots: list) -> None:
        """New slots, in host memory."""
        for slot in slots:
            slot.leave_device = self._leave
        if self._limit != 0:
            self._waiting += [slot for slot in slots if slot.link is not None]

    def forget(self) -> None:
        self._waiting.clear()

    def after_step(self) -> None:
        """All updates of a step have been issued."""
        self._steps += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._move_up(waiting)
        elif self._steps % _CHECKED_EVERY == 0:
            self._keep_reserve()

    def on_device(self) -> list:
        """Slots whose states are on a device, in the order of use."""
        optimizer = self._optimizer()
        return [slot for slot in optimizer.in_order_of_use() if slot.home.on_device]

    def report(self) -> dict[str, dict]:
        """By place, "host", "nvme" or a device: the parameters whose states live there, and the bytes of these states;
        of weights on drives, also of frozen ones, "nvme" has the `weight_bytes`."""
        places: dict[str, dict] = {}
        for slot in self._optimizer().in_order_of_use():
            where = str(slot.device) if slot.home.on_device else slot.home.place
            place = places.setdefault(where, {"bytes": 0, "parameters": []})
            place["parameters"].append(slot.name)
            place["bytes"] += sum(plane.nbytes for plane in slot.planes.values())
        weights = self._optimizer().weight_bytes_on_drives()
        if weights:
            places.setdefault("nvme", {"bytes": 0, "parameters": []})["weight_bytes"] = weights
        return places

    # --- moves ----------------------------------------------------------------------------------

    def _move_up(self, waiting: list) -> None:
        optimizer = self._optimizer()
        by_link: dict = {}
        wanted = {id(slot) for slot in waiting}
        for slot in optimizer.in_order_of_use():
            link = optimizer.link_beside(slot) if id(slot) in wanted else None
            if link is not None and slot.numel > 0 and link.states.is_available:
                by_link.setdefault(link, []).append(slot)
        moved = []
        for link, slots in by_link.items():
            sizes = [_bytes_on_device(slot) for slot in slots]
            chosen = choose(sizes, self._room_on(link))
            if chosen:
                optimizer.synchronize()
                link.states.make_place()
            for position in chosen:
                link.take_room(sizes[position])
                moved.append(self._to_device(slots[position], link))
        optimizer.release_host(moved)

    def _room_on(self, link) -> int:
        left = link.room.left()
        if self._limit is None:
            return left
        used = sum(slot.home.bytes for slot in self.on_device() if slot.home.link is link)
        return min(left, self._limit - used)

    def _to_device(self, slot, link):
        """Its states are on the device afterwards; returns the home in host memory that it has left. Nothing of the
        slot is under way."""
        old = slot.home
        slot.settle()
        slot.follow_weights()
        link.make_current_stream_wait()
        new = DeviceHome(slot, link)
        for key, plane in old.planes.items():
            new.planes[key].copy_(plane)
        if slot.stand_in is not None:
            new.keep([new], [old.arrived().to(slot.device, copy=True)], slot.measures)
        if isinstance(slot.sum, HostSum):
            slot.sum = DeviceSum(slot, slot.sum.values)
        slot.home, slot.copied = new, False
        self._optimizer().home_changed(slot, old)
        return old

    def _leave(self, slot) -> None:
        """The states of one parameter go to host memory."""
        old, optimizer = slot.home, self._optimizer()
        old.link.states.make_current_stream_wait()
        (new,) = optimizer.make_host_homes([slot.param], [slot.link], [slot.seed])
        new.adopt(slot)
        new.target.row, slot.home = old.target.row, new
        for key, plane in old.planes.items():
            new.planes[key].copy_(plane)
        if slot.stand_in is not None:
            keep([slot], [old.gradient])
        old.forget_gradient()
        slot.copied = False
        old.link.states.synchronize()  # nobody writes the planes, which torch gives to somebody else
        old.link.room.give(old.bytes)
        optimizer.home_changed(slot, old)

    def _keep_reserve(self) -> None:
        for slot in reversed(self.on_device()):
            if slot.home.link.room.left() < 0:
                _log.info("the states of %s leave the device, whose memory is needed", slot.name)
                self._leave(slot)


def _bytes_on_device(slot) -> int:
    size = device_bytes(slot.param, slot.moments)
    return size + slot.sum.bytes if isinstance(slot.sum, HostSum) else size


def describe(report: dict[str, dict]) -> str:
    """One line of Placement.report()."""
    parts = [
        f"{place['bytes'] / 2**30:.2f} GiB of {len(place['parameters'])} parameters "
        + _PLACES.get(where, f"on {where}")
        + (f", with {place['weight_bytes'] / 2**30:.2f} GiB of weights" if "weight_bytes" in place else "")
        for where, place in report.items()
    ]
    return ", ".join(parts) or "none yet"


def states_limit(states) -> int | None:
    """Of the argument `states` of orlop.AdamW: bytes of states on a device, None for what fits."""
    if isinstance(states, int) and not isinstance(states, bool) and states >= 0:
        return states
    check_choice("states", states, ("auto", "host"))
    return None if states == "auto" else 0
