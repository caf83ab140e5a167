"""Takes gradients to where the optimizer keeps them, those of a block in one go."""

from __future__ import annotations

import weakref

import torch

from .gradient_sum import DeviceSum, HostSum, make_sum
from .offloaded_gradient import OffloadedGradient


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
    kinds = {(home.link, home.on_device) for home in homes}
    if len(kinds) == 1:
        homes[0].keep(homes, grads, measures)
        return
    for kind in kinds:
        chosen = [i for i, home in enumerate(homes) if (home.link, home.on_device) == kind]
        homes[chosen[0]].keep([homes[i] for i in chosen], [grads[i] for i in chosen], measures)


class Collector:
    """Gathers slots while backward writes their gradients, until their unit is complete: a block, whose gradients
    then are taken in one go. What another unit, another gradient of the same parameter or the end of the backward
    finds incomplete is taken as it is."""

    def __init__(self):
        self._unit = None
        self._waiting: list = []
        self._task = -1  # graph task whose end is already asked for
        self._link = None  # of what was taken in it

    def add(self, slot) -> None:
        unit, waiting = slot.unit, self._waiting
        if unit is not self._unit:
            waiting = self._begin(unit)
        slot.waits = True
        waiting.append(slot)
        if len(waiting) == unit.count:
            self.flush()

    def _begin(self, unit) -> list:
        self.flush()
        self._unit = unit
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return self._waiting

    def _end(self) -> None:
        self._task = -1
        self.flush()
        if self._link is not None:
            self._link.let_go()

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._unit = self._waiting, [], None
        for slot in waiting:
            slot.waits = False
        self._link = waiting[0].link
        if torch.is_grad_enabled():  # not in a backward, unless it makes a graph
            with torch.no_grad():
                take(waiting)
        else:
            take(waiting)


class GradientHooks:
    """What autograd calls around its write of one parameter's gradient. The parameter refers to this, so that it
    refers weakly to the slot."""

    __slots__ = ("_handles", "_slot")

    def __init__(self, slot):
        self.follow(slot)
        self._handles = (
            slot.param.register_hook(self.before),
            slot.param.register_post_accumulate_grad_hook(self.after),
        )

    def follow(self, slot) -> None:
        """Another slot has taken the parameter over."""
        self._slot = weakref.ref(slot)

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
        for handle in self._handles:
            handle.remove()


class Unit:
    """Parameters whose gradients are taken together."""

    __slots__ = ("collector", "count")

    def __init__(self, collector: Collector):
        self.collector = collector  # of the unit's device, whose thread of autograd calls it
        self.count = 0
