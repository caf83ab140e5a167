"""Brings the weights of a block to the device when its forward or backward begins, and lets them go after."""

from __future__ import annotations

import weakref

import torch

from .block_hooks import register_hooks
from .host_memory import FreedMemory
from .streamed_block import Block
from .torch_support import flat


class _Link:
    """What an optimizer's slot asks of its link, for weights that are fetched by their block instead."""

    fetches_blocks = True

    def __init__(self, manager, device_link):
        self._manager, self._inner = weakref.ref(manager), device_link
        self.states = None if device_link is None else device_link.states

    def read_weights(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """(numel) in host memory: those on the device, where somebody may have written them, else the home; None where
        that is on drives."""
        block, entry = self._manager().block_of[parameter], self._manager().entry_of[parameter]
        self._manager()._arrive(block)
        on_device = not entry.has_home or (block.here and not block.stale)
        return flat(parameter).cpu() if on_device else entry.host

    def write_weights(self, slot) -> None:
        manager = self._manager()
        manager.block_of[slot.param].stale = True
        manager.forget_readings()
        manager.refresh()

    def leave_weights(self, homes, params) -> None:
        """Here every write of the device's copy is seen (streamed_parameter.present)."""

    def upload(self, slots, version) -> None:
        """The homes are written by the update itself; a copy on the device is fetched again when it is needed."""
        manager = self._manager()
        for slot in slots:
            block = manager.block_of[slot.param]
            block.stale, block.update = True, (slot.home, version)
        manager.forget_readings()

    def offload(self, grads, homes, sums=None):
        if self._inner is not None:
            return self._inner.offload(grads, homes, sums)
        for home, grad in zip(homes, grads, strict=True):
            home.native.wait([home.index])
            home.gradient.copy_(grad)
        return None

    def let_go(self) -> None:
        if self._inner is not None:
            self._inner.let_go()

    def take_room(self, size: int) -> bool:
        return self._inner is not None and self._inner.take_room(size)

    def wait_arrival(self, arrival) -> None:
        self._inner.wait_arrival(arrival)

    def fence(self, arrival):
        return self._inner.fence(arrival) if self._inner is not None else (0, 0)


class StreamedWeights:
    """The blocks of one model. At rest only resident ones are on the device; in a pass two: the block at work
    and the next one, which is fetched ahead in the order that was last observed."""

    def __init__(self, model: torch.nn.Module, blocks: list[Block], device_link=None, drives=None):
        self.blocks = blocks
        self.drives = drives  # DriveWeights; None: all weights are in host memory
        self.link = _Link(self, device_link)
        self.device_link = device_link
        # Nothing ever goes or is read: no block needs to know what is used after it.
        self.all_stay = drives is None and all(block.resident for block in blocks)
        self._next: dict[tuple[bool, int], int] = {}  # (in backward, block) -> block seen after it
        self._last: tuple[bool, int] | None = None
        self._callback_of = -1  # graph task whose end is already asked for
        self._visiting: dict[int, Block] = {}  # here, but not for good
        self._active: dict[int, Block] = {}  # whose forward has begun and not ended
        self.fetches = self.prefetch_hits = 0
        self.peak_blocks = 0  # on the device at once
        self._here = 0
        self._freed = FreedMemory()
        if drives is not None and device_link is not None:
            drives.pin(device_link)
        self.entry_of = {entry.parameter: entry for block in blocks for entry in block.entries}
        self.block_of = {entry.parameter: block for block in blocks for entry in block.entries}
        self.handles = register_hooks(self, model, blocks)

    def drives_of(self, parameter: torch.Tensor):
        """The DriveWeights that are the home of a parameter; None for one in host memory."""
        return self.entry_of[parameter].drives

    def ranges(self) -> list[tuple[int, int]]:
        """Host memory beside the optimizer's that the device copies from."""
        return self.drives.ranges() if self.drives is not None else []

    def owns(self, parameter: torch.Tensor) -> bool:
        return parameter in self.entry_of

    def home_is(self, slot) -> None:
        """The optimizer has taken a parameter over: its copy of the weights, if it has one, is the home from now on."""
        entry = self.entry_of[slot.param]
        is_first, entry.slot = entry.slot is None, slot
        entry.on_device = slot.home.on_device
        entry.host = None if entry.on_device or entry.is_on_drives else slot.home.weights
        if is_first and not entry.is_on_drives:
            self._freed.add(entry.bytes)
        self.block_of[slot.param].update = None

    def link_beside(self, parameter: torch.Tensor):
        """The device's link, if the weights are there for good."""
        block = self.block_of[parameter]
        if not (block.resident and block.here):
            return None
        if block.is_on_drives:  # an update may have passed by
            self._fetch(block)
        return None if block.stale else self.device_link

    def resident_blocks(self) -> list[int]:
        """Blocks whose weights are on the device now."""
        return [block.index for block in self.blocks if block.here]

    # --- moving ---------------------------------------------------------------------------------

    def _fetch(self, block: Block) -> None:
        if block.here and not block.stale:
            return
        if block.here:
            self._keep_written(block)
        self.fetches += 1
        if self.device_link is not None:
            self._bring(block, self.device_link)
        else:
            self._copy(block)
        if not block.here:
            self._here += 1
            self.peak_blocks = max(self.peak_blocks, self._here)
            if not block.resident:
                self._visiting[block.index] = block
        block.here, block.stale = True, False

    def _bring(self, block: Block, link) -> None:
        """This thread waits for neither updates, drives nor copies."""
        if block.is_on_drives:
            self.drives.begin(block, link)
        into, homes = block.open()
        if homes or not block.is_on_drives:
            block.arrived = link.bring(block.update, lambda: (into, homes))
        if block.is_on_drives:  # on the same stream
            block.arrived = self.drives.bring(block, link)

    def _copy(self, block: Block) -> None:
        if block.is_on_drives:
            self.drives.begin(block, None)
        for entry in block.entries:
            entry.wait()
        with torch.no_grad():
            for into, home in zip(*block.open(), strict=True):
                into.copy_(home)
            if block.is_on_drives:
                self.drives.copy(block)

    def fetch_resident(self) -> None:
        """After an update was submitted: blocks that stay take their new weights as they are written, in the
        order of their use; nobody waits but the stream that copies. Those on drives are read when their turn comes:
        reads run in the order in which they are issued, and the first blocks are not to wait for the last updates."""
        if self.device_link is None:
            return
        for block in self.blocks:
            if block.here and block.resident and block.stale and not block.is_on_drives:
                self._fetch(block)

    def _arrive(self, block: Block) -> None:
        if block.arrived is None:
            return
        self.device_link.wait_arrival(block.arrived)
        block.arrived = None
        for entry in block.entries:
            if entry.version != entry.parameter._version and entry.has_home:
                block.stale = True  # the write ran beside the copy: what is there now, nobody knows
                entry.lose_write()

    def release(self, block: Block) -> None:
        if not block.here or block.resident or block.is_needed:
            return
        self._arrive(block)
        self._keep_written(block)
        block.empty()
        block.here = block.stale = False
        self._here -= 1
        del self._visiting[block.index]

    @staticmethod
    def _keep_written(block: Block, write: bool = False, after_section: bool = False) -> None:
        """No write to a copy that is about to go is lost. (What changes where a parameter lies, changes its version, or
        is done in a section of gathered().)"""
        for entry in block.entries:
            if after_section or entry.version != entry.parameter._version:
                entry.keep_written(block.stale, write)

    def refresh(self) -> None:
        """Blocks on the device that an update has passed by are fetched again."""
        for block in self.blocks:
            if block.here:
                if block.stale:
                    self._fetch(block)
                self._arrive(block)
        self._check_drives()

    def _check_drives(self) -> None:
        """Nobody gets what was made of weights that could not be read."""
        if self.drives is not None:
            self.drives.check()

    def release_all(self) -> None:
        for block in list(self._visiting.values()):
            self.release(block)

    def need(self, index: int, backward: bool) -> None:
        """Block `index` is used now: it is here afterwards, and the one that is likely next is on its way."""
        block = self.blocks[index]
        self.prefetch_hits += block.here and not block.stale and not block.resident
        self._fetch(block)
        self._arrive(block)
        if self._last is not None and self._last[0] == backward and self._last[1] != index:
            self._next[self._last] = index
        self._last = (backward, index)
        following = self._after(index, backward)
        for other in list(self._visiting.values()):  # what was used before this point of the pass is done
            if other.index not in (index, following) and other.index not in block.callers:
                self.release(other)
        if 0 <= following < len(self.blocks) and self.device_link is not None:
            self._fetch(self.blocks[following])
        if self.drives is not None:
            self._read_ahead(following, self._after(following, backward))

    def _after(self, index: int, backward: bool) -> int:
        """The block that is likely to be used after another."""
        return self._next.get((backward, index), index - 1 if backward else index + 1)

    def _read_ahead(self, *indices: int) -> None:
        """What is on drives of blocks that are used soon comes to host memory."""
        for index in indices:
            block = self.blocks[index] if 0 <= index < len(self.blocks) else None
            if block is not None and block.is_on_drives and (block.stale or not block.here):
                self.drives.begin(block, self.device_link)

    def begin_forward(self, index: int) -> None:
        block = self.blocks[index]
        if self.all_stay:
            self._fetch(block)
            self._arrive(block)
            return
        block.callers |= self._active.keys() - {index}
        self.need(index, backward=False)
        block.active += 1
        self._active[index] = block

    def end_forward(self, block: Block) -> None:
        block.active = max(0, block.active - 1)
        if block.active == 0:
            self._active.pop(block.index, None)
        self.release(block)

    def forget_forwards(self) -> None:
        """The whole model's forward is over, however it ended."""
        for block in self._active.values():
            block.active = 0
        self._active.clear()

    def begin_backward(self, index: int) -> None:
        if self.all_stay:  # a forward that is recomputed
            self.begin_forward(index)
            return
        task = torch._C._current_graph_task_id()
        if task != -1 and task != self._callback_of:
            self._callback_of = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.need(index, backward=True)

    def _end_backward(self) -> None:
        self._callback_of = -1
        self.end_pass()

    def end_pass(self) -> None:
        """Forward of the whole model or backward is over: only resident blocks stay."""
        self._last = None
        self.release_all()
        self.forget_readings()
        self._check_drives()

    def forget_readings(self) -> None:
        """What was read ahead is not used."""
        if self.drives is not None:
            self.drives.forget_readings()

    # --- gathering ------------------------------------------------------------------------------

    def gather(self, parameters) -> list[tuple[Block, tuple[int, int]]]:
        """Blocks that stay to the end of the section, each with what refers to it so far."""
        blocks = list({id(b): b for b in (self.block_of.get(p) for p in parameters) if b}.values())
        for block in blocks:
            self._fetch(block)
            self._arrive(block)
            block.sections += 1
        self._check_drives()
        return [(block, block.uses()) for block in blocks]

    def scatter(
        self, gathered: list[tuple[Block, tuple[int, int]]], write: bool, may_be_in_graph: bool
    ) -> None:
        """Ends a gather. What was kept of the weights stays valid, and so do graphs, until the next step."""
        try:
            for block, _ in gathered:
                self._keep_written(block, write, after_section=True)
        finally:
            for block, before in gathered:
                block.sections -= 1
                block.look_at_uses(before, may_be_in_graph)
        for block, _ in gathered:
            self.release(block)

    def leave_optimizer(self) -> None:
        """The optimizer ends; its memory stays the home of the weights, and what is on the device is its last word."""
        try:
            self.refresh()
            for entry in self.entry_of.values():
                entry.wait()
        finally:  # an optimizer that has failed is left, too
            for entry in self.entry_of.values():
                entry.leave_optimizer()
            for block in self.blocks:
                block.update = None

    def restore(self) -> None:
        """All weights on the device for good."""
        for block in self.blocks:
            block.resident = True
            self._fetch(block)
            self._arrive(block)
        self._check_drives()
        self._visiting.clear()
        for entry in self.entry_of.values():
            entry.parameter.__class__ = entry.kind
            vars(entry.parameter).pop("_orlop_entry", None)
        self.close()

    def close(self) -> None:
        """Blocks come and go no more; what is on drives goes."""
        for handle in self.handles:
            handle.remove()
        if self.drives is not None:
            self.drives.close()
            self.drives = None

    def begin_step(self) -> None:
        """Graphs that outlive the step have old weights."""
        for block in self.blocks:
            if block.kept:
                self._keep_written(block)
                block.keep_no_more()
        self.release_all()
