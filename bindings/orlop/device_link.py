"""Copies between a CUDA device and the optimizer's host memory, ordered with torch's streams."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import deque

import torch

from . import _orlop, errors
from .device_room import DeviceRoom
from .device_states import DeviceStates, has_cuda_part
from .square_sums import SquareSums
from .state_home import last_at_work
from .torch_support import flat, stream_at
from .weight_sums import WeightSums

_log = logging.getLogger("orlop")

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
_WAIT_UNTIL_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ
_MOST_LEAVING = 1 << 30  # bytes of gradients on the device that are on their way
_MANY_LEAVING = 1 << 26  # from which on it is worth asking which of them have left
_OPEN = 0, 0  # a gate that nobody waits at


@functools.cache
def _driver():
    """libcuda.so.1, which every machine with a GPU has; None where it lacks something."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        pointer, size, unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        for name, arguments in {
            "cuMemHostRegister_v2": (pointer, size, unsigned),
            "cuMemHostUnregister": (pointer,),
            "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(ctypes.c_uint64), pointer, unsigned),
            "cuStreamWaitValue32_v2": (pointer, ctypes.c_uint64, ctypes.c_uint32, unsigned),
            "cuEventSynchronize": (pointer,),
        }.items():
            function = getattr(driver, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        _log.warning("the CUDA driver lacks what hides the update (%s); step() waits for it instead", error)
        return None
    return driver


class LeavingBatch:
    """Gradients that leave together, step after step."""

    def __init__(self, targets: list[_orlop.GradientTarget]):
        self.targets = targets
        self._native = _orlop.GradientBatch(targets)
        self.bytes = self._native.bytes
        self._arrival: torch.cuda.Event | None = None

    def offload(self, link: DeviceLink, grads: list, gate: tuple[int, int], sums) -> torch.cuda.Event:
        """Issues copies on the stream that the link has for it, and with `sums` the sums on torch's current one."""
        values = [grad.data_ptr() for grad in grads]
        room = sums.room_for(self._native, self.targets) if sums is not None else (0, 0)
        index, down = link.device.index, link.down_address
        behind = torch._C._cuda_getCurrentRawStream(index)
        # An event that the optimizer's thread may still have to wait for is not recorded again: behind a closed gate
        # the copies wait for that thread.
        if self._arrival is not None and gate is _OPEN:
            self._native.offload(values, index, down, behind, *gate, *room, self._arrival.cuda_event)
        else:
            self._native.offload(values, index, down, behind, *gate, *room)
            self._arrival = torch.cuda.Event(blocking=True)
            self._arrival.record(link.down)
        return self._arrival


class DeviceLink:
    """Streams of one device beside torch's own: gradients down, weights up, and in `states` the updates of what
    lives there. Homes are those of parameters in host memory (state_home.HostHome)."""

    fetches_blocks = False  # weights come with their update, not with the use of a block

    def __init__(self, device: torch.device, limit: int | None = None):
        self.device = device
        self.room = DeviceRoom(device, limit)
        self.states = DeviceStates(device)
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)
        # As the driver names them, for calls on the way of every block.
        self._index = device.index
        self.down_address, self._up_address = self.down.cuda_stream, self.up.cuda_stream
        self._pinned: dict[int, int] = {}  # bytes by address
        # Gradients on their way: their arrival, their bytes, the stream of torch that has written them, and they
        # themselves, so that nobody else gets their memory.
        self._leaving: deque[tuple[torch.cuda.Event, int, int, list]] = deque()
        self._leaving_bytes = 0
        self._batches: dict[_orlop.GradientTarget, LeavingBatch] = {}  # by their first target
        self._gates: dict[int, int | None] = {}  # address on the device of words that it waits for
        self._weight_sums = WeightSums(device) if has_cuda_part() else None
        self.unpinned_bytes = 0
        self._driver = _driver()
        self._wait_for_event = (
            ctypes.cast(self._driver.cuEventSynchronize, ctypes.c_void_p).value if self._driver else 0
        )

    def pin(self, ranges: list[tuple[int, int]]) -> None:
        """Registers host memory, so that copies from and to it run beside everything else."""
        self._gates.clear()
        self._batches.clear()
        torch.cuda.current_stream(self.device).synchronize()  # makes the device's context current
        for address, size in ranges:
            if address in self._pinned or size == 0 or self._driver is None:
                continue
            status = self._driver.cuMemHostRegister_v2(address, size, _PORTABLE_AND_MAPPED)
            if status == 0:
                self._pinned[address] = size
            else:
                self.unpinned_bytes += size
                _log.warning(
                    "pinning %.2f GiB of host memory after %.2f GiB failed (CUDA driver status %d); its copies "
                    "are slower and step() waits for them. See `ulimit -l` and the container's memory limit",
                    size / 2**30, sum(self._pinned.values()) / 2**30, status,
                )  # fmt: skip

    def pin_no_more_than(self, ranges: list[tuple[int, int]]) -> None:
        """Gives the registrations of all other memory back, before that memory itself goes. Waits for copies."""
        self.down.synchronize()
        self.up.synchronize()
        kept = {address for address, _ in ranges}
        for address in [address for address in self._pinned if address not in kept]:
            self._driver.cuMemHostUnregister(address)
            del self._pinned[address]
        self._gates.clear()
        self._batches.clear()

    def unpin_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Gives these registrations back, before their memory goes. Waits for copies."""
        gone = {address for address, _ in ranges}
        self.pin_no_more_than([pinned for pinned in self._pinned.items() if pinned[0] not in gone])

    def unpin(self) -> None:
        """Waits for all copies and updates, then gives the registrations and the room on the device back."""
        self.states.clear()
        self.pin_no_more_than([])
        self._leaving.clear()
        self._leaving_bytes = 0
        if self._weight_sums is not None:
            self._weight_sums = WeightSums(self.device)
        self.room.clear()

    close = unpin

    @property
    def is_pinned(self) -> bool:
        """Whether all of the optimizer's memory is."""
        return self._driver is not None and self.unpinned_bytes == 0

    def _is_pinned(self, address: int) -> bool:
        return any(begin <= address < begin + size for begin, size in self._pinned.items())

    # --- gradients ------------------------------------------------------------------------------

    def offload(
        self, grads: list[torch.Tensor], homes: list, sums: SquareSums | None = None
    ) -> torch.cuda.Event:
        """Copies gradients that torch's current stream has written to where the homes keep them, in one layout, behind
        the homes' last jobs, and has `sums` sum their squares; returns their arrival. The list of gradients is taken
        over."""
        last = last_at_work(homes)
        gate = self._gate(last, last.job)
        if has_cuda_part():
            batch = self._batch_of([home.target for home in homes])
            return self._leaves(batch.offload(self, grads, gate, sums), batch.bytes, grads)
        self._wait_at(self.down, gate)
        self._copy_by_torch(self.down, [home.gradient for home in homes], grads)
        if sums is not None:
            sums.square_sums([home.target for home in homes], [grad.data_ptr() for grad in grads])
        arrival = torch.cuda.Event(blocking=True)
        arrival.record(self.down)
        return self._leaves(arrival, sum(grad.nbytes for grad in grads), grads)

    def _leaves(self, arrival: torch.cuda.Event, size: int, grads: list[torch.Tensor]) -> torch.cuda.Event:
        self._leaving.append((arrival, size, torch._C._cuda_getCurrentRawStream(self._index), grads))
        self._leaving_bytes += size
        self._bound_leaving()
        return arrival

    def _batch_of(self, targets: list[_orlop.GradientTarget]) -> LeavingBatch:
        """Most batches are those of the step before."""
        batch = self._batches.get(targets[0])
        if batch is None or batch.targets != targets:
            batch = self._batches[targets[0]] = LeavingBatch(targets)
        return batch

    def _bring(self, into: list, homes: list, gate: tuple[int, int], behind_current: bool) -> None:
        """Copies dense tensors, whose memory has the same order, on the stream that brings weights up, behind the gate
        and with `behind_current` what torch's current stream was given so far; this thread waits where their host
        memory is not pinned."""
        if has_cuda_part():
            copies = [(a.data_ptr(), b.data_ptr(), b.nbytes) for a, b in zip(into, homes, strict=True)]
            behind = torch._C._cuda_getCurrentRawStream(self._index) if behind_current else self._up_address
            _orlop.device_copies(copies, self._index, self._up_address, behind, *gate)
            return
        self._wait_at(self.up, gate)
        if into:
            self._copy_by_torch(self.up, into, homes, behind_current)

    def _copy_by_torch(self, stream, into: list, tensors: list, behind_current: bool = True) -> None:
        """Where the CUDA part of Orlop is missing."""
        if behind_current:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(
                [flat(a) for a in into], [flat(b) for b in tensors], non_blocking=self.is_pinned
            )

    def _bound_leaving(self, asks: bool = False) -> None:
        """Device memory of gradients that wait for the host stays bounded: where too much is on its way, what their
        stream is given next waits for the first of them, but not for what left last, and has their memory. This thread
        does not wait. What has left is free, once it is much, or with `asks`."""
        while self._leaving:
            arrival, size, stream, grads = self._leaving[0]
            is_last = len(self._leaving) == 1  # which was sent only now
            has_left = (asks or (self._leaving_bytes > _MANY_LEAVING and not is_last)) and arrival.query()
            if not has_left:
                if self._leaving_bytes <= _MOST_LEAVING or is_last:
                    break
                if grads:
                    stream_at(stream, self.device).wait_event(arrival)
                else:  # of a backward before: torch has their memory once it sees that they have left
                    arrival.synchronize()
            self._leaving.popleft()
            self._leaving_bytes -= size

    def let_go(self) -> None:
        """A backward has ended: the memory of gradients that are still on their way is torch's again once they have
        left, without another call here. (That costs torch an event for each; those that have left are free at once.)"""
        self._bound_leaving(asks=True)
        for _, _, _, grads in self._leaving:
            for grad in grads:
                grad.record_stream(self.down)
            grads.clear()

    def take_room(self, size: int) -> bool:
        """Whether the optimizer may hold `size` bytes more on the device."""
        return self.room.take(size)

    def wait_arrival(self, arrival: torch.cuda.Event | None) -> None:
        """What torch's current stream is given from here on runs behind a gradient's copy to host memory."""
        if arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(arrival)

    def fence(self, arrival: torch.cuda.Event | None) -> tuple[int, int]:
        """What the optimizer's thread calls to wait for an arrival: address and argument."""
        if arrival is None:
            return 0, 0
        if self._driver is None:
            arrival.synchronize()
            return 0, 0
        return self._wait_for_event, arrival.cuda_event

    # --- weights --------------------------------------------------------------------------------

    def begin_updates(self) -> None:
        """What torch's current stream was given so far still reads the old weights."""
        self.up.wait_stream(torch.cuda.current_stream(self.device))
        self.states.begin()

    def read_weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """(numel) in host memory."""
        return flat(parameter).cpu()

    def write_weights(self, slot) -> None:
        """Brings weights that were written in host memory."""
        flat(slot.param).copy_(slot.home.weights)

    def leave_weights(self, homes: list, params: list) -> None:
        """Those of the device are as their homes: what differs at the next step somebody has written."""
        self.up.wait_stream(torch.cuda.current_stream(self.device))
        self._leave_behind(homes, params)

    def _leave_behind(self, homes: list, params: list) -> None:
        """What the stream that brings weights up was given."""
        if self._weight_sums is not None:
            with torch.cuda.stream(self.up):
                self._weight_sums.leave(homes, params)

    def written_weights(self, slots: list) -> list:
        """Slots whose weights on the device are not as the last upload has left them; waits for what torch's current
        stream was given."""
        if self._weight_sums is None or not slots:
            return []
        torch.cuda.current_stream(self.device).wait_stream(self.up)
        return self._weight_sums.written(slots)

    def upload(self, slots: list, version: int) -> None:
        """Brings the new weights of slots once the last of them is written, as `version` has it, in whose order they
        are; this thread does not wait for it."""
        gate = self._gate(slots[-1].home, version)
        homes, params = [slot.home for slot in slots], [slot.param for slot in slots]
        self._bring(params, [home.weights for home in homes], gate, False)
        self._leave_behind(homes, params)
        uploaded = torch.cuda.Event()
        uploaded.record(self.up)
        for slot in slots:
            slot.uploaded = uploaded

    def bring(self, update, make_room) -> torch.cuda.Event:
        """Calls `make_room`, which takes memory of torch's current stream and returns tensors there and their homes,
        and copies them on the stream that brings weights up, behind `update`, a home and its version; returns the
        event behind it."""
        into, homes = make_room()
        gate = self._gate(*update) if update is not None else _OPEN
        self._bring(into, homes, gate, True)
        arrived = torch.cuda.Event(blocking=True)  # the thread that reads drives may wait for it
        arrived.record(self.up)
        return arrived

    def _gate(self, home, version: int) -> tuple[int, int]:
        """What a stream waits for until the home is as `version`, which is 0 before its first job, has left it: the
        address of a word on the device and what it is to reach; nothing where it has. Where the device cannot see it
        this thread waits."""
        if not version or ctypes.c_uint32.from_address(home.version_address).value >= version:
            return _OPEN
        address = self._gate_address(home.version_address)
        if address is None:
            home.native.wait([home.index])
            return _OPEN
        return address, version

    def _wait_at(self, stream: torch.cuda.Stream, gate: tuple[int, int]) -> None:
        if gate != _OPEN:
            status = self._driver.cuStreamWaitValue32_v2(stream.cuda_stream, *gate, _WAIT_UNTIL_AT_LEAST)
            if status != 0:
                raise errors.DeviceError(
                    f"cuStreamWaitValue32 for version {gate[1]}: CUDA driver status {status}"
                )

    def _gate_address(self, gate: int) -> int | None:
        """Where the device sees a pinned word; None for one that it does not."""
        if gate not in self._gates:
            address = ctypes.c_uint64()
            seen = (
                self._driver is not None
                and self._is_pinned(gate)
                and self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), gate, 0) == 0
            )
            self._gates[gate] = address.value if seen else None
        return self._gates[gate]

    def wait_upload(self, slot) -> None:
        if slot.uploaded is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.uploaded)

    def make_current_stream_wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.up)
        self.states.make_current_stream_wait()
