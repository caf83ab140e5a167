"""Takes gradients to where the optimizer keeps them, those of a block, or of several small ones, in one go."""

from __future__ import annotations

import torch

from .gradient_sum import DeviceSum, HostSum, make_sum
from .offloaded_gradient import OffloadedGradient
from .torch_support import not_compiled, stream_at

# Of gradients that leave together, but for the last ones: their way to host memory takes several times as long as
# the calls that send them.
_LEAST_BYTES = 64 << 20


def take(slots: list) -> None:
    """Moves the plain `p.grad` of every slot to its home, or adds it to the sum of earlier micro-batches. A sum goes
    to the home with the micro-batch that was the last one in the step before; should another one come, it goes
    again. In place of the gradient stands what knows where it is. The slots are of one optimizer."""
    taken, grads = [], []
    for slot in slots:
        if slot.stand_in is not None:
            slot.forget_dropped()
        grad = slot.param.grad
        if grad is None:
            continue
        if slot.count or slot.sum is not None or not slot.keeps_as_it_is(grad):
            _take_each(slots)
            return
        taken.append(slot)
        grads.append(grad)
    keep(taken, grads)  # the only micro-batch
    for slot in taken:
        slot.count, slot.square_sum = 1, None
        slot.stand_in = slot.param.grad = OffloadedGradient.make(slot)


def _take_each(slots: list) -> None:
    first, begun, added, added_on_host = ([], []), ([], []), ([], []), ([], [])
    taken = []
    for slot in slots:
        slot.forget_dropped()
        grad = slot.plain_gradient()
        if grad is None or (slot.added is None and slot.param.grad.requires_grad):  # it is part of a graph
            continue
        taken.append(slot)
        slot.added = slot.square_sum = None
        slot.home.measured = False
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


def take_in_backward(slots: list) -> None:
    """take(), where autograd may be making a graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            take(slots)
    else:
        take(slots)


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
    """Gathers units of one device while backward writes their gradients, until these are enough to be worth the calls
    that take them. What the end of the backward finds here is taken as it is: all that neither leaves nor is added to
    a sum, by a host that need not wake for each block."""

    def __init__(self, device: torch.device):
        self.units: list[Unit] = []
        self._device = device
        self._open: Unit | None = None  # of which gradients have come, and more may
        self._done: list[Unit] = []
        self._done_bytes = 0
        self._stream = 0  # of torch, which has written what is done
        self._task = -1  # graph task whose end is already asked for
        self._link = None  # of what was taken in it
        # Backwards run inside of others. What waits for an end there may get a second gradient, which torch adds in the
        # weights' dtype: wherever states live, the same ones are to wait.
        self._nests = False

    def begin(self, unit: Unit) -> None:
        """The first gradient of a unit has come: what the one before it has not got it does not get."""
        if self._open is not None:
            self._open.end()
        self._open = unit
        self._ask_for_end()

    def end(self, unit: Unit) -> None:
        """A unit has all gradients that it gets, on its stream."""
        if unit is self._open:
            self._open = None
        if unit in self._done:  # another gradient for its last parameter
            return
        if self._done and unit.stream != self._stream:
            self.flush()
        self._stream = unit.stream
        self._done.append(unit)
        if self._nests or not unit.stays():
            self._done_bytes += unit.bytes
        self._ask_for_end()
        if self._done_bytes >= _LEAST_BYTES:
            self.flush()

    def _ask_for_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._nests = self._nests or self._task != -1
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def current_stream(self) -> int:
        """Torch's, as the driver names it."""
        return torch._C._cuda_getCurrentRawStream(self._device.index) if self._device.type == "cuda" else 0

    @not_compiled
    def _end(self) -> None:
        """The backward has ended, and the stream that it was called on is current again."""
        self._task = -1
        self.finish()
        if self._link is not None:
            self._link.let_go()

    def finish(self) -> None:
        """Takes what is left, on torch's current stream: whoever goes on there finds it done."""
        if self._open is not None:
            self._open.end()
        late = [unit for unit in self.units if unit.arrived and unit not in self._done]
        for unit in late:
            unit.learn()
        stream = self.current_stream()
        if self._done and self._stream != stream:
            torch.cuda.current_stream(self._device).wait_stream(stream_at(self._stream, self._device))
            self._stay_for_current(self._done)
        self._stay_for_current(late)  # whose streams autograd has made the current one wait for
        self._done, self._stream = self._done + late, stream
        self.flush()

    def _stay_for_current(self, units: list[Unit]) -> None:
        """The memory of these gradients is not given up before torch's current stream has read them."""
        for slot in _slots_of(units) if self._device.type == "cuda" else []:
            gradient = slot.new_gradient()
            if gradient is not None:
                gradient.record_stream(torch.cuda.current_stream(self._device))

    def flush(self) -> None:
        if not self._done:
            return
        slots = _slots_of(self._done)
        for unit in self._done:
            unit.arrived.clear()
        self._done, self._done_bytes = [], 0
        if not slots:
            return
        self._link = slots[0].link
        if self._stream == self.current_stream():
            take_in_backward(slots)
        else:  # backward has gone on to another one
            with torch.cuda.stream(stream_at(self._stream, self._device)):
                take_in_backward(slots)


def _slots_of(units: list[Unit]) -> list:
    slots = [slot() for unit in units for slot in unit.slots]
    return slots if None not in slots else [slot for slot in slots if slot is not None]


class Unit:
    """Parameters whose gradients are taken together. Autograd calls a hook of each when its gradient is written. The
    order in which they come is that of the backward before: once it is known, the last one ends the unit, and the hooks
    of all others only append to a list, without a step of Python's.

    slots: weak references. arrived: parameters. stream: of torch, which has written the last gradient.
    """

    __slots__ = ("_hooks", "arrived", "bytes", "collector", "slots", "stream")

    def __init__(self, collector: Collector):
        self.collector = collector  # of the unit's device, whose thread of autograd calls it
        self.slots: list = []
        self.arrived: list = []
        self.bytes = self.stream = 0
        self._hooks: dict[int, GradientHook] = {}  # by the id() of their parameters
        collector.units.append(self)

    def add(self, slot) -> None:
        self.slots.append(slot.reference)
        self._hooks[id(slot.param)] = slot.hook
        self.bytes += slot.param.nbytes
        for hook in self._hooks.values():
            hook.calls(self._arrive)

    @not_compiled
    def _arrive(self, parameter: torch.Tensor) -> None:
        """While the order is not known."""
        if not self.arrived:
            self.collector.begin(self)
        elif any(other is parameter for other in self.arrived):
            return
        self.stream = self.collector.current_stream()
        self.arrived.append(parameter)
        if len(self.arrived) == len(self.slots):
            self.end()

    def stays(self) -> bool:
        """Whether taking these gradients changes nothing on the device: each is, as far as one knows, the only one of its
        step, and used where it is."""
        for reference in self.slots:
            slot = reference()
            if slot is None or slot.count or slot.expected > 1 or not slot.home.on_device:
                return False
        return True

    def end(self) -> None:
        """Nothing more comes in this backward."""
        self.learn()
        self.collector.end(self)

    def learn(self) -> None:
        """What came last will be the last."""
        for hook in self._hooks.values():
            hook.calls(self.arrived.append)
        self._hooks[id(self.arrived[-1])].calls(self._arrive_last)

    @not_compiled
    def _arrive_last(self, _parameter: torch.Tensor) -> None:
        self.stream = self.collector.current_stream()
        self.collector.end(self)


class GradientHook:
    """What autograd calls when it has written one parameter's gradient, or given it to what stands in `p.grad`. The
    parameter refers to it."""

    __slots__ = ("_handle",)

    def __init__(self, parameter: torch.Tensor):
        self._handle = parameter.register_post_accumulate_grad_hook(_does_nothing)

    def calls(self, function) -> None:
        """With the parameter, from now on: autograd calls what is in the dictionary that the handle knows."""
        self._handle.hooks_dict_ref()[self._handle.id] = function

    def remove(self) -> None:
        self._handle.remove()


def _does_nothing(_parameter: torch.Tensor) -> None:
    pass
