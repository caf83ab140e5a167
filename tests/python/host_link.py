"""The interface of device_link.DeviceLink over plain memory, for tests without a GPU: weights that are not the
optimizer's memory, gradients that arrive late, uploads after their update, states on a "device" with room for some."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import torch

import orlop
from orlop import _orlop, adam_slots
from orlop.square_sums import SquareSums
from orlop.state_home import last_at_work

WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Late:
    """Ends when a timer copies gradients, behind the copy before it, as on a stream."""

    def __init__(self, hosts, grads, before):
        self.done = threading.Event()
        self.before = before.done if before is not None else None
        self.wait = WAIT(lambda _: 0 if self.done.wait(30) else 1)
        threading.Timer(0.003, self._copy, (hosts, [grad.clone() for grad in grads])).start()

    def _copy(self, hosts, grads):
        assert self.before is None or self.before.wait(30)
        torch._foreach_copy_(hosts, grads)
        self.done.set()

    def synchronize(self):
        assert self.done.wait(30)


class Updated:
    """The end of a batch of updates, which run when somebody waits for them, in order."""

    def __init__(self, work):
        self.work, self.held = work, []

    def synchronize(self):
        if self.work is not None:
            self.work, work = None, self.work
            work()
        self.held.clear()


class HostStates(SquareSums):
    """The interface of DeviceStates: what it issues runs late, and in order."""

    is_available = True

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.issued = []
        self.updated = 0  # parameters
        self._native = _orlop.TensorOptimizer(1)

    def make_place(self):
        self.synchronize()

    def _issue(self, targets, values):
        for target, address in zip(targets, values, strict=True):
            view = _orlop.GradientView(address, target.dtype, target.numel)
            total, _, first = self._native.norm([view])
            self._sums[target.row].view(torch.float64)[0] = total
            self._sums[target.row].view(torch.int64)[1] = first

    def begin(self):
        self.synchronize()

    def adam_steps(self, shards, hypers, factor):
        addresses = [shard.grad for shard in shards]

        def work(before=tuple(self.issued)):
            for earlier in before:
                earlier.synchronize()
            for shard, hyper, address in zip(shards, hypers, addresses, strict=True):
                shard.grad = address
                _orlop.adam_step(shard, hyper, factor, 1)

        self.updated += len(shards)
        self.issued.append(Updated(work))
        return self.issued[-1]

    def wait(self, updated):
        updated.synchronize()

    def current_stream(self):
        return 0

    def let_go(self, gradient, stream, updated):
        if updated is not None:
            updated.held.append(gradient)

    def synchronize(self):
        for updated in self.issued:
            updated.synchronize()
        self.issued.clear()

    make_current_stream_wait = synchronize

    def clear(self):
        self.synchronize()
        self.forget_sums()


class Room:
    """The interface of DeviceRoom."""

    def __init__(self, size):
        self.size = self.free = size

    def left(self):
        return self.free

    def take(self, size):
        if size > self.free:
            return False
        self.free -= size
        return True

    def give(self, size):
        self.free += size

    def clear(self):
        self.free = self.size


class HostLink:
    """Uploads run on a thread of their own, in order."""

    fetches_blocks = False
    room_bytes = 0  # of sums and states on the "device"

    def __init__(self, device, limit=None):
        self.device, self.unpinned_bytes, self.is_pinned = device, 0, True
        self.room, self.states = Room(HostLink.room_bytes if limit is None else limit), HostStates()
        self.up = None
        self.brought = Updated(None)  # the last of what came up for blocks
        self.pending = []
        self.uploads = self.offloads = self.let_go_at = 0
        self.last = None  # copy of a gradient
        self.left = {}  # weights by home

    def pin(self, ranges):
        self.ranges = ranges

    pin_no_more_than = pin

    def unpin_ranges(self, ranges):
        self.make_current_stream_wait()

    def unpin(self):
        self.make_current_stream_wait()
        self.room.clear()

    close = unpin

    def offload(self, grads, homes, sums=None):
        if sums is not None:
            sums.square_sums([home.target for home in homes], [grad.data_ptr() for grad in grads])
        self._check_pinned(home.gradient for home in homes)
        last = last_at_work(homes)
        last.native.wait([last.index])
        for home in homes:  # nobody reads any more what the copy is about to overwrite
            assert ctypes.c_uint32.from_address(home.version_address).value >= home.job
        self.offloads += len(grads)
        self.last = Late([home.gradient for home in homes], grads, self.last)
        return self.last

    def _is_pinned(self, address, size):
        return size == 0 or any(
            begin <= address and address + size <= begin + length for begin, length in self.ranges
        )

    def _check_pinned(self, tensors):
        """What the link copies is in memory that it was told to pin."""
        for tensor in tensors:
            assert self._is_pinned(tensor.data_ptr(), tensor.nbytes)

    def let_go(self):
        self.let_go_at = self.offloads

    def take_room(self, size):
        return self.room.take(size)

    def wait_arrival(self, arrival):
        if arrival is not None:
            arrival.synchronize()

    def fence(self, arrival):
        if isinstance(arrival, Updated):
            arrival.synchronize()
            return 0, 0
        return (0, 0) if arrival is None else (ctypes.cast(arrival.wait, ctypes.c_void_p).value, 0)

    def read_weights(self, parameter):
        return parameter.detach().as_strided((parameter.numel(),), (1,)).clone()

    def write_weights(self, slot):
        slot.param.detach().as_strided((slot.numel,), (1,)).copy_(slot.home.weights)

    def leave_weights(self, homes, params):
        self.left.update((home, param.data.clone()) for home, param in zip(homes, params, strict=True))

    def written_weights(self, slots):
        self.make_current_stream_wait()
        return [slot for slot in slots if not torch.equal(self.left[slot.home], slot.param)]

    def begin_updates(self):
        self.make_current_stream_wait()

    def upload(self, slots, version):
        last = slots[-1].home
        written = last.version_address
        assert self._is_pinned(written, 4)
        self._check_pinned(slot.home.weights for slot in slots)
        gate = ctypes.c_uint32.from_address(written)

        def copy(homes=tuple(slot.home for slot in slots)):
            while gate.value < version:
                time.sleep(0.0005)
            for slot, home in zip(slots, homes, strict=True):
                slot.param.data.as_strided((slot.numel,), (1,)).copy_(home.weights)
                self.left[home] = slot.param.data.clone()

        self.uploads += 1
        uploaded = threading.Thread(target=copy)
        uploaded.start()
        for slot in slots:
            slot.uploaded = uploaded
        self.pending.append(uploaded)

    def bring(self, update, make_room):
        into, homes = make_room()
        if update is not None:
            home, version = update
            home.native.wait([home.index])
            written = ctypes.c_uint32.from_address(home.version_address)
            assert written.value >= version  # what a stream would wait for
        before, self.brought = self.brought, Updated(None)

        def copy():
            before.synchronize()
            if into:
                torch._foreach_copy_(into, homes)

        self.brought.work = copy
        return self.brought

    def wait_upload(self, slot):
        for thread in self.pending:
            thread.join()

    def make_current_stream_wait(self):
        self.wait_upload(None)
        self.pending.clear()
        self.states.synchronize()


@contextlib.contextmanager
def all_away(monkeypatch, room=0):
    """All parameters are treated as those of a device with room for so many bytes."""
    with monkeypatch.context() as patched:
        patched.setattr(HostLink, "room_bytes", room)
        patched.setattr(adam_slots, "DeviceLink", HostLink)
        patched.setattr(orlop.AdamW, "_is_away", staticmethod(lambda p: True))
        yield
