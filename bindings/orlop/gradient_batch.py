"""Takes gradients to where the optimizer keeps them, those of a block, or of several small ones, in one go."""

from __future__ import annotations

import weakref

import torch

from .gradient_sum import DeviceSum, HostSum, make_sum
from .offloaded_gradient import OffloadedGradient
from .torch_support import stream_at

_LEAST_BYTES = 4 << 20  # of gradients that leave together, but for the last ones


def take(slots: list) -> None:
    """Moves the plain `p.grad` of every slot to its home, or adds it to the sum of earlier micro-batches. A sum goes
    to the home with the micro-batch that was the last one in the step before; should another one come, it goes
    again. In place of the gradient stands what knows where it is. The slots are of one optimizer."""
    first, begun, added, added_on_host = ([], []), ([], []), ([], []), ([], [])
    taken = []
    for slot in slots:
        grad = slot.plain_gradient()
        if grad is None:
            continue
        taken.append(slot)
        slot.square_sum, slot.home.measured = None, False
        slot.count += 1
        if slot.count == 1:
            sums = slot.expected > 1 and slot.sum is not None and slot.sum.on_device
            batch = begun if sums else first
        else:
            batch = added if _sum_of_earlier(slot).on_device else added_on_host
        slot.has_left = batch is first or (batch is added_on_host and slot.count == slot.expected)
        batch[0].append(slot)
        batch[1].append(grad)
    keep(*first)
    for slot in first[0]:
        if slot.sum is not None:
            slot.sum.took_first(slot.expected > 1)
    if len(first[0]) < len(taken):
        DeviceSum.start_all(*begun)
        DeviceSum.add_all(*added)
        keep(*added_on_host, measures=False)
        for slot in added_on_host[0]:
            slot.sum.add(last=slot.has_left)
        settle([slot for slot in taken if slot.count == slot.expected])
    for slot in taken:
        slot.stand_in = slot.param.grad = OffloadedGradient.make(slot)


def _sum_of_earlier(slot) -> HostSum | DeviceSum:
    """What grows by a second gradient and all later ones."""
    if slot.sum is None:
        slot.sum = make_sum(slot)
    if slot.count == 2 and slot.has_left:
        slot.sum.start()
    return slot.sum


def settle(slots: list) -> None:
    """The gradients as they stand are on their way to the homes."""
    left = [slot for slot in slots if not slot.has_left]
    for slot in left:
        slot.has_left = True
        if not slot.sum.on_device:
            slot.sum.leave()
    summed = [slot for slot in left if slot.sum.on_device]
    keep(summed, [slot.sum.rounded() for slot in summed])


def keep(slots: list, grads: list[torch.Tensor], measures: bool = True) -> None:
    """The homes of these slots, of one optimizer, have these gradients, in the weights' layout, and with `measures`
    sum the squares where every step asks."""
    if not slots:
        return
    measures = measures and slots[0].measures
    homes = [slot.home for slot in slots]
    first = homes[0]
    for home in homes:
        if home.link is not first.link or home.on_device is not first.on_device:
            break
    else:
        first.keep(homes, grads, measures)
        return
    kinds = [(home.link, home.on_device) for home in homes]
    for kind in set(kinds):
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        homes[chosen[0]].keep([homes[i] for i in chosen], [grads[i] for i in chosen], measures)


class Collector:
    """Gathers slots of one device while backward writes their gradients. With the last one of its unit, a block, or
    when another unit begins, they are taken in one go, once they are enough to be worth the calls. What another
    gradient of the same parameter or the end of the backward finds here is taken as it is."""

    def __init__(self, device: torch.device):
        self._device = device
        self._waiting: list = []
        self._waiting_bytes = 0  # of the units that they are of
        self._unit = None
        self._missing = 0  # slots of it that have not come
        self._stream = 0  # of torch, which has written all that waits
        self._task = -1  # graph task whose end is already asked for
        self._link = None  # of what was taken in it

    def add(self, slot) -> None:
        if slot.unit is not self._unit:
            self._begin(slot.unit)
        slot.waits = True
        slot.hooks.watch()
        self._waiting.append(slot)
        self._missing -= 1
        if self._missing == 0:
            self._unit = None
            if self._waiting_bytes >= _LEAST_BYTES:
                self.flush()

    def _begin(self, unit) -> None:
        stream = self._current_stream()
        if self._waiting and (stream != self._stream or self._waiting_bytes >= _LEAST_BYTES):
            self.flush()
        self._unit, self._missing, self._stream = unit, unit.count, stream
        self._waiting_bytes += unit.bytes
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _current_stream(self) -> int:
        """Torch's, as the driver names it."""
        return torch._C._cuda_getCurrentRawStream(self._device.index) if self._device.type == "cuda" else 0

    def _end(self) -> None:
        """The backward has ended, and the stream that it was called on is current again."""
        self._task = -1
        self.finish()
        if self._link is not None:
            self._link.let_go()

    def finish(self) -> None:
        """Takes what is left, on torch's current stream: whoever goes on there finds it done."""
        if self._waiting and self._stream != self._current_stream():
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream_at(self._stream, self._device))
            for slot in self._waiting:
                if slot.param.grad is not None:
                    slot.param.grad.record_stream(current)
            self._stream = current.cuda_stream
        self.flush()

    def flush(self) -> None:
        self._unit = None
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for slot in waiting:
            slot.waits = False
        self._link = waiting[0].link
        if self._stream == self._current_stream():
            self._take(waiting)
        else:  # backward has gone on to another one
            with torch.cuda.stream(stream_at(self._stream, self._device)):
                self._take(waiting)

    @staticmethod
    def _take(slots: list) -> None:
        if torch.is_grad_enabled():  # not in a backward, unless it makes a graph
            with torch.no_grad():
                take(slots)
        else:
            take(slots)


class GradientHooks:
    """What autograd calls around its write of one parameter's gradient. The parameter refers to this, so that it
    refers weakly to the slot. The call before costs more than the one after, and is asked for only while something
    stands, or waits, in `p.grad`."""

    __slots__ = ("_after", "_before", "_slot")

    def __init__(self, slot):
        self.follow(slot)
        self._before = slot.param.register_hook(self.before)
        self._after = slot.param.register_post_accumulate_grad_hook(self.after)
        self.rest()

    def follow(self, slot) -> None:
        """The slot, or another one that has taken the parameter over."""
        self._slot = weakref.ref(slot)
        slot.hooks = self

    def watch(self) -> None:
        """From here on autograd calls before(). It goes by the dictionary that the handle knows."""
        self._before.hooks_dict_ref()[self._before.id] = self.before

    def rest(self) -> None:
        self._before.hooks_dict_ref().pop(self._before.id, None)

    def before(self, _gradient) -> None:
        """Backward is about to write `p.grad`."""
        slot = self._slot()
        if slot is None:
            return
        if slot.waits:
            slot.unit.collector.flush()
        if slot.stand_in is not None:
            slot.before_accumulation()

    def after(self, _parameter) -> None:
        """`p.grad` is there."""
        slot = self._slot()
        if slot is not None:
            slot.unit.collector.add(slot)

    def remove(self) -> None:
        self._before.remove()
        self._after.remove()


class Unit:
    """Parameters whose gradients are taken together."""

    __slots__ = ("bytes", "collector", "count")

    def __init__(self, collector: Collector):
        self.collector = collector  # of the unit's device, whose thread of autograd calls it
        self.count = self.bytes = 0

    def add(self, slot) -> None:
        slot.unit = self
        self.count += 1
        self.bytes += slot.param.nbytes
