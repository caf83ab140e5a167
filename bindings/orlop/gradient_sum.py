"""Sums of micro-batches' gradients in fp32, on the device where there is room, else in host memory.

Both kinds take the first gradient, which the slot's home keeps already, as their start, grow by every later one, and
go to the home as one gradient in the weights' dtype, rounded once. Their bits are the same. All are in the weights'
layout.
"""

from __future__ import annotations

import torch


class HostSum:
    """Every gradient leaves and is added there, by the optimizer's thread. For states in host memory."""

    on_device = False

    def __init__(self, slot):
        self._slot = slot
        self.values = _empty_sum(slot, torch.device("cpu"))
        self.bytes = 4 * slot.numel
        self._has_begun = False

    def took_first(self, more_to_come: bool) -> None:
        """The home has a step's first gradient. Where more are expected the sum begins at once: in the backward that
        brings the next one the optimizer's thread has less to do."""
        self._has_begun = False
        if more_to_come:
            self.start()

    def start(self) -> None:
        """With the first gradient, which the home keeps."""
        if not self._has_begun:
            self._accumulate(add=False, last=False)
            self._has_begun = True

    def add(self, last: bool) -> None:
        """Grows by a later gradient, which the home has now; with `last` it also leaves, in the same pass."""
        self._accumulate(add=True, last=last)

    def leave(self) -> None:
        home = self._slot.home
        home.became_sum(home.native.round_sum(home.index, home.view(self.values), self.values))

    def _accumulate(self, add: bool, last: bool) -> None:
        home = self._slot.home
        view = home.view(self.values)
        home.job = home.native.accumulate(home.index, view, add, last, *home.fence(), home.arrival)
        if last:
            home.became_sum(home.job)


class DeviceSum:
    """Gradients are added in place by torch's current stream; the home gets one of them."""

    on_device = True

    def __init__(self, slot, values: torch.Tensor | None = None):
        """values: of a sum that goes on here."""
        self._slot = slot
        self._values = _empty_sum(slot, slot.param.device)
        if values is not None:
            self._values.copy_(values)
        self.bytes = 4 * slot.numel

    def took_first(self, more_to_come: bool) -> None:
        """What is the only one so far begins no sum."""

    def start(self) -> None:
        """With the first gradient, which the home keeps."""
        first = self._slot.home.gradient_beside_weights()
        self.start_all([self._slot], [first.to(self._values.device, non_blocking=True)])

    @staticmethod
    def start_all(slots: list, gradients: list[torch.Tensor]) -> None:
        """The sums of these slots become these first gradients, which the homes do not keep."""
        if slots:
            torch._foreach_copy_(_writable_sums(slots), gradients)

    @staticmethod
    def add_all(slots: list, gradients: list[torch.Tensor]) -> None:
        """The sums of these slots grow by these gradients."""
        if slots:
            torch._foreach_add_(_writable_sums(slots), gradients)

    def rounded(self) -> torch.Tensor:
        """In the weights' dtype, for the home. In fp32 it is the sum itself."""
        return self._values.to(self._slot.dtype)


def _empty_sum(slot, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(slot.param.size(), slot.param.stride(), dtype=torch.float32, device=device)


def _writable_sums(slots: list) -> list[torch.Tensor]:
    """The sums on the device of these slots, once nobody reads them as an fp32 gradient any more."""
    for link, event in {(slot.link, slot.home.left_last) for slot in slots}:
        link.wait_arrival(event)
    return [slot.sum._values for slot in slots]


def make_sum(slot) -> HostSum | DeviceSum:
    """Decided once for each parameter, when its second micro-batch comes for the first time. States on a device that
    has no room for the sum leave it."""
    if slot.link is not None and slot.link.take_room(4 * slot.numel):
        return DeviceSum(slot)
    if slot.home.on_device:
        slot.leave_device(slot)
    return HostSum(slot)


def room_report(slots) -> dict[str, int]:
    """Bytes of the sums by purpose and place, and of the states that are on a device with their gradients."""
    report: dict[str, int] = {}

    def count(purpose: str, size: int) -> None:
        report[purpose] = report.get(purpose, 0) + size

    for slot in slots:
        if slot.sum is not None:
            count("gradient sums" + (f" on {slot.device}" if slot.sum.on_device else ""), slot.sum.bytes)
        if slot.home.on_device:
            count(f"states and gradients on {slot.device}", slot.home.bytes)
    return report
