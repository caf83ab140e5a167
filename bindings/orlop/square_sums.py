"""Sums of the squares of gradients, or weights, on one device."""

from __future__ import annotations

import torch

from . import _orlop

_ROW_BYTES = 16  # a sum in fp64, and the index of the first NaN or Inf


class SquareSums:
    """A row for each parameter, which its target knows. They run on torch's current stream, in the order that the host
    has."""

    def __init__(self, device: torch.device):
        self.device = device
        self.unmeasured: dict = {}  # homes with gradients that stay and that nobody has summed, in order
        self._rows = 0
        self._sums: torch.Tensor | None = None  # (rows, 16) bytes
        self._read: list[tuple[float, int]] | None = None  # what the host has of it
        self._sums_scratch: torch.Tensor | None = None
        self._scratch_of = 0  # the stream that uses it

    def current_stream(self) -> int:
        """Torch's, as the driver names it."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def square_sums(self, targets: list[_orlop.GradientTarget], values: list[int]) -> None:
        """Issues the sums of dense tensors, which are at these addresses."""
        self._give_rows(targets)
        self._read = None
        self._issue(targets, values)

    def room_for(self, batch: _orlop.GradientBatch, targets: list[_orlop.GradientTarget]) -> tuple[int, int]:
        """Results and scratch of sums that somebody is about to issue on torch's current stream."""
        if self._sums is None or not batch.has_rows:
            self._give_rows(targets)
        self._read = None
        stream, size = self.current_stream(), batch.scratch_bytes
        scratch = self._sums_scratch
        if scratch is None or stream != self._scratch_of or scratch.nbytes < size:
            scratch = self._sums_scratch = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._scratch_of = stream
        return self._sums.data_ptr(), scratch.data_ptr()

    def _give_rows(self, targets: list[_orlop.GradientTarget]) -> None:
        for target in targets:
            if target.row < 0:
                target.row = self._rows
                self._rows += 1
        if self._sums is None or len(self._sums) < self._rows:
            self._grow()

    def read_sums(self) -> list[tuple[float, int]]:
        """By row: the sum of squares, and the index of the first NaN or Inf or -1. Waits for them."""
        if self._read is None:
            sums = self._sums.cpu()
            totals = sums.view(torch.float64)[:, 0].tolist()
            self._read = list(zip(totals, sums.view(torch.int64)[:, 1].tolist(), strict=True))
        return self._read

    def forget_sums(self) -> None:
        """All rows are free again."""
        self.unmeasured.clear()
        self._rows, self._sums, self._read, self._sums_scratch = 0, None, None, None

    def _grow(self) -> None:
        """Twice the rows. Any stream of torch may write the old ones before it, and the new ones after it."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda _: None
        wait(self.device)
        sums = torch.zeros(2 * self._rows, _ROW_BYTES, dtype=torch.uint8, device=self.device)
        if self._sums is not None:
            sums[: self._sums.shape[0]] = self._sums
        wait(self.device)
        self._sums = sums

    def _issue(self, targets: list, values: list[int]) -> None:
        batch = _orlop.GradientBatch(targets)
        room = self.room_for(batch, targets)
        batch.square_sums(values, *room, self.device.index, self.current_stream())
