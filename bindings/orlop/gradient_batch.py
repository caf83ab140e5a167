"""Takes gradients to where the optimizer keeps them, those of a block in one go."""

from __future__ import annotations

import weakref

import torch

from .gradient_sum import DeviceSum, make_sum
from .offloaded_gradient import OffloadedGradient


def take(slots: list) -> None:
    """Moves the plain `p.grad` of every slot to its home, or adds it to the sum of earlier micro-batches. A sum goes
    to the home with the micro-batch that was the last one in the step before; should another one come, it goes
    again. In place of the gradient stands what knows where it is."""
    first, begun, added, taken = [], [], [], []
    for slot in slots:
        grad = slot.plain_gradient()
        if grad is None:
            continue
        slot.square_sum, slot.home.measured = None, False
        taken.append(slot)
        if slot.count > 0:
            if slot.sum is None:
                slot.sum = make_sum(slot)
            if slot.count == 1 and slot.has_left:
                slot.sum.start()
            slot.has_left = False
            if slot.sum.on_device:
                added.append((slot, grad))
            else:
                slot.has_left = slot.count + 1 == slot.expected
                slot.sum.add(grad, slot.has_left)
        elif slot.expected > 1 and slot.sum is not None and slot.sum.on_device:
            begun.append((slot, grad))
            slot.has_left = False
        else:
            first.append((slot, grad))
        slot.count += 1
    keep(first)
    for slot, _ in first:
        if slot.sum is not None:
            slot.sum.took_first(slot.expected > 1)
    DeviceSum.start_all(begun)
    DeviceSum.add_all(added)
    settle([slot for slot in taken if slot.count == slot.expected])
    for slot in taken:
        slot.stand_in = slot.param.grad = OffloadedGradient.make(slot)


def settle(slots: list) -> None:
    """The gradients as they stand are on their way to the homes."""
    sums = []
    for slot in slots:
        if slot.has_left:
            continue
        slot.has_left = True
        if slot.sum.on_device:
            sums.append((slot, slot.sum.rounded()))
        else:
            slot.sum.leave()
    keep(sums)


def keep(gradients: list) -> None:
    """(slot, gradient (numel)): their homes have these gradients, and sum the squares where every step asks."""
    by_home: dict = {}
    for slot, grad in gradients:
        by_home.setdefault((type(slot.home), slot.home.link, slot.measures), []).append((slot.home, grad))
    for (kind, _, measures), pairs in by_home.items():
        homes = [home for home, _ in pairs]
        kind.keep(homes, [grad for _, grad in pairs])
        if measures:
            kind.measure(homes)


class Collector:
    """Gathers slots while backward writes their gradients, until their unit is complete: a block, whose gradients
    then are taken in one go. What another unit, another gradient of the same parameter or the end of the backward
    finds incomplete is taken as it is."""

    def __init__(self):
        self._unit = None
        self._waiting: list = []
        self._task = -1  # graph task whose end is already asked for

    def add(self, slot) -> None:
        if slot.unit is not self._unit:
            self.flush()
            self._unit = slot.unit
            task = torch._C._current_graph_task_id()
            if task not in (-1, self._task):
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        slot.waits = True
        self._waiting.append(slot)
        if len(self._waiting) == slot.unit.count:
            self.flush()

    def _end(self) -> None:
        self._task = -1
        self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._unit = self._waiting, [], None
        for slot in waiting:
            slot.waits = False
        with torch.no_grad():
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
