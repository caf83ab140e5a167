"""Finds weights of a device that somebody has written where no version counter tells, as through `p.data`."""

from __future__ import annotations

import torch

from .square_sums import SquareSums


class WeightSums:
    """The sums of squares of weights as their home has left them, and as the next step finds them. (Changes of
    signs or order alone they need not show.)"""

    def __init__(self, device: torch.device):
        self._left, self._found = SquareSums(device), SquareSums(device)

    def leave(self, homes: list, params: list) -> None:
        """The weights are as their homes, behind what torch's current stream, always the same one here, was given."""
        self._left.square_sums([home.left_sum for home in homes], [param.data_ptr() for param in params])

    def written(self, slots: list) -> list:
        """Those that are not as they were left, in the order of torch's current stream. Waits for it."""
        self._found.square_sums(
            [slot.home.found_sum for slot in slots], [slot.param.data_ptr() for slot in slots]
        )
        left, found = self._left.read_sums(), self._found.read_sums()
        return [slot for slot in slots if left[slot.home.left_sum.row] != found[slot.home.found_sum.row]]
