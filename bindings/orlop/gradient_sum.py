"""Sums of micro-batches' gradients in fp32, on the device where there is room, else in host memory.

Both kinds take the first gradient, which has left already, as their start, grow by every later one, and leave as
one gradient in the weights' dtype, rounded once. Their bits are the same.
"""

from __future__ import annotations

import torch


class HostSum:
    """Every gradient leaves and is added there, by the optimizer's thread."""

    on_device = False

    def __init__(self, slot):
        self._slot = slot
        self._values = torch.empty(slot.numel, dtype=torch.float32)
        self.bytes = 4 * slot.numel

    def start(self) -> None:
        self._accumulate(add=False)

    def add(self, grad: torch.Tensor) -> None:
        self._slot.copy_to_host(grad)
        self._accumulate(add=True)

    def leave(self) -> None:
        slot = self._slot
        slot.job = slot.native.round_sum(slot.index, slot.view_of(self._values), self._values)
        slot.arrival, slot.measured = None, True

    def _accumulate(self, add: bool) -> None:
        slot = self._slot
        view = slot.view_of(self._values)
        slot.job = slot.native.accumulate(slot.index, view, add, *slot.fence(), slot.arrival)


class DeviceSum:
    """Gradients are added in place by torch's current stream; one copy leaves."""

    on_device = True

    def __init__(self, slot):
        self._slot = slot
        self._values = torch.empty(slot.numel, dtype=torch.float32, device=slot.param.device)
        self.bytes = 4 * slot.numel

    def start(self) -> None:
        self._slot.link.wait_arrival(self._slot.arrival)
        self.start_with(self._slot.host_gradient.to(self._values.device, non_blocking=True))

    def start_with(self, grad: torch.Tensor) -> None:
        """With a first gradient that has not left."""
        self._slot.link.wait_arrival(self._slot.left_last)
        self._values.copy_(grad)

    def add(self, grad: torch.Tensor) -> None:
        self._slot.link.wait_arrival(self._slot.left_last)
        self._values.add_(grad)

    def leave(self) -> None:
        self._slot.copy_to_host(self._values.to(self._slot.dtype))
        self._slot.measure()


def make_sum(slot) -> HostSum | DeviceSum:
    """Decided once for each parameter, when its second micro-batch comes for the first time."""
    on_device = slot.link is not None and slot.link.take_room(4 * slot.numel)
    return DeviceSum(slot) if on_device else HostSum(slot)


def room_report(slots) -> dict[str, int]:
    """Bytes of the sums by purpose and place."""
    report: dict[str, int] = {}
    for slot in slots:
        if slot.sum is not None:
            place = f" on {slot.device}" if slot.sum.on_device else ""
            report["gradient sums" + place] = report.get("gradient sums" + place, 0) + slot.sum.bytes
    return report
