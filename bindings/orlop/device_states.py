"""Adam and norms over tensors of one CUDA device, beside torch's own streams."""

from __future__ import annotations

import functools
import logging

import torch

from . import _orlop
from .square_sums import SquareSums

_log = logging.getLogger("orlop")


@functools.cache
def has_cuda_part() -> bool:
    """Whether this build has what works on device memory itself, and the driver is new enough for it; without it torch
    copies gradients."""
    try:
        _orlop.check_device(torch.cuda.current_device())
    except RuntimeError as error:
        _log.warning(
            "optimizer states stay in host memory: %s (PyTorch %s is built for CUDA %s)",
            error,
            torch.__version__,
            torch.version.cuda,
        )
        return False
    return True


class DeviceStates(SquareSums):
    """Updates run on a stream of their own, behind what torch's current stream was given when they are issued, so
    that they hide under the next forward; norms run on torch's current stream."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)
        if has_cuda_part():
            _orlop.device_load(device.index)
        self._update_scratch: torch.Tensor | None = None  # updates are in order
        self._issued = 0  # batches of updates
        self._awaited: dict[int, int] = {}  # by torch's stream: the last batch that it waits for

    @property
    def is_available(self) -> bool:
        """Whether this build has the CUDA part that updates here."""
        return has_cuda_part()

    def make_place(self) -> None:
        """Before memory is taken for good: it comes to lie beside what torch's allocator has cached for what comes
        and goes, not in between."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    # --- updates --------------------------------------------------------------------------------

    def begin(self) -> None:
        """What torch's current stream was given so far comes before the next updates: it still reads the old
        weights, and has written the gradients."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def adam_steps(self, shards: list, hypers: list, factor: float) -> torch.cuda.Event:
        """Issues the update of each shard with its gradient times `factor`; returns the event behind them. The
        gradients stay until let_go()."""
        with torch.cuda.stream(self.stream):
            if self._update_scratch is None:
                size = _orlop.device_adam_scratch_bytes()
                self._update_scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
            _orlop.device_adam_steps(
                shards,
                hypers,
                factor,
                self._update_scratch.data_ptr(),
                self.device.index,
                self.stream.cuda_stream,
            )
            updated = torch.cuda.Event()
            updated.record(self.stream)
        self._issued += 1
        updated.number = self._issued
        return updated

    def wait(self, updated: torch.cuda.Event) -> None:
        """What torch's current stream is given from here on finds these updates."""
        torch.cuda.current_stream(self.device).wait_event(updated)
        self._awaited[self.current_stream()] = updated.number

    def make_current_stream_wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._awaited[self.current_stream()] = self._issued

    def let_go(self, gradient: torch.Tensor, stream: int, updated: torch.cuda.Event | None) -> None:
        """The memory of a gradient that was written on torch's stream `stream` is about to be given up, with `updated`
        behind the last update that may read it. Where that stream waits for the update already, so does whoever gets
        the memory next; else torch's allocator has to be told, which costs as much as a launch."""
        if updated is not None and self._awaited.get(stream, 0) < updated.number:
            gradient.record_stream(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def clear(self) -> None:
        """Waits for the updates; all rows are free again."""
        self.synchronize()
        self.forget_sums()
