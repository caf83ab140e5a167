"""Sums of the squares of gradients on one device."""

from __future__ import annotations

import torch

from . import _orlop
from .torch_support import DTYPES

_ROW_BYTES = 16  # a sum in fp64, and the index of the first NaN or Inf
_LATER_BYTES = 64 << 20  # of gradients that wait for others


class SquareSums:
    """A row for each parameter. They run on torch's current stream, in the order that the host has."""

    def __init__(self, device: torch.device):
        self.device = device
        self.unmeasured: dict = {}  # homes with gradients that stay and that nobody has summed, in order
        self._rows = 0
        self._sums: torch.Tensor | None = None  # (rows, 16) bytes
        self._read: list[tuple[float, int]] | None = None  # what the host has of it
        self._later: dict[int, torch.Tensor] = {}  # the newest gradient of a row
        self._later_bytes = 0
        self._later_on = 0  # torch's stream that has written them

    def current_stream(self) -> int:
        """Torch's, as the driver names it."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def take_row(self) -> int:
        """A place for the sum of one parameter."""
        self._rows += 1
        return self._rows - 1

    def square_sums(self, gradients: list[torch.Tensor], rows: list[int]) -> None:
        """Issues the sums of dense gradients."""
        if self._sums is None or self._sums.shape[0] < self._rows:
            sums = torch.zeros(2 * self._rows, _ROW_BYTES, dtype=torch.uint8, device=self.device)
            if self._sums is not None:
                sums[: self._sums.shape[0]] = self._sums
            self._sums = sums
        self._issue(gradients, rows)
        self._read = None

    def square_sums_later(self, gradients: list[torch.Tensor], rows: list[int], size: int) -> None:
        """As square_sums(), of gradients of `size` bytes that nobody will write, together with others: once they are
        enough to be worth the launches, with flush(), or when somebody reads."""
        stream = self.current_stream()
        if stream != self._later_on:
            self.flush()
            self._later_on = stream
        self._later.update(zip(rows, gradients, strict=True))
        self._later_bytes += size
        if self._later_bytes >= _LATER_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._later:
            return
        later, self._later, self._later_bytes = self._later, {}, 0
        gradients = list(later.values())
        if self._later_on != self.current_stream():
            self._follow(gradients)
        self.square_sums(gradients, list(later))

    def read_sums(self) -> list[tuple[float, int]]:
        """By row: the sum of squares, and the index of the first NaN or Inf or -1. Waits for them."""
        self.flush()
        if self._read is None:
            sums = self._sums.cpu()
            totals = sums.view(torch.float64)[:, 0].tolist()
            self._read = list(zip(totals, sums.view(torch.int64)[:, 1].tolist(), strict=True))
        return self._read

    def forget_sums(self) -> None:
        """All rows are free again."""
        self.unmeasured.clear()
        self._later, self._later_bytes = {}, 0
        self._rows, self._sums, self._read = 0, None, None

    def _issue(self, gradients: list[torch.Tensor], rows: list[int]) -> None:
        squares = _orlop.DeviceSquareSums(
            [(grad.data_ptr(), DTYPES[grad.dtype], grad.numel()) for grad in gradients],
            rows,
            self._sums.data_ptr(),
        )
        scratch = torch.empty(squares.scratch_bytes, dtype=torch.uint8, device=self.device)
        squares.issue(scratch.data_ptr(), self.device.index, self.current_stream())

    def _follow(self, gradients: list[torch.Tensor]) -> None:
        """Another stream of torch has become current since these gradients were written."""
        current = torch.cuda.current_stream(self.device)
        written_on = (
            torch.cuda.ExternalStream(self._later_on, self.device)
            if self._later_on
            else torch.cuda.default_stream(self.device)
        )
        current.wait_stream(written_on)
        for gradient in gradients:
            gradient.record_stream(current)
