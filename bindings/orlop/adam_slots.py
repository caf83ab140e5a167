"""The parameters of orlop.AdamW: the room for their states, and what links them to where their weights are."""

from __future__ import annotations

from . import _orlop, errors, torch_support

from .adam_checks import refuse_several_ranks  # isort: skip
from .device_link import DeviceLink  # isort: skip
from .drive_home import DriveHome  # isort: skip
from .optimizer_slot import Slot  # isort: skip
from .state_home import HostHome, device_bytes  # isort: skip

_ROOM_BYTES = 256 << 20  # of states that are taken and given back together


class SlotSide:
    """Part of AdamW, over its `_slots`, `_links`, `_native` and `_stream`."""

    def _slot_of(self, p):
        if p not in self._slots:
            raise errors.UsageError(
                "this tensor is frozen or not a parameter of the optimizer: it has no states"
            )
        return self._slots[p]

    def _is_away(self, p):
        """Whether the weights are not the optimizer's own memory, so that they have to be copied."""
        return p.is_cuda or self._is_streamed(p)

    def _is_streamed(self, p):
        return self._stream is not None and self._stream.owns(p)

    def _link_of(self, p):
        """What copies gradients down and weights up; None where the optimizer works on them in place."""
        if self._is_streamed(p):
            return self._stream.link
        if not self._is_away(p):
            return None
        if p.device not in self._links:
            shared = self._stream.device_link if self._stream is not None else None
            self._links[p.device] = shared or DeviceLink(p.device, self._device_limit)
        return self._links[p.device]

    def _adopt(self, params):
        """Makes room for the states of parameters that have none yet, in one piece."""
        params = [p for p in params if p not in self._slots]
        if not params:
            return
        if any(self._leaves(p) for p in params):
            refuse_several_ranks()
        links = [self._link_of(p) for p in params]
        if self._stream is not None and self._stream.device_link is not None:
            self._links.setdefault(self._stream.device_link.device, self._stream.device_link)
        slots = []
        for begin, end in self._rooms(params, links):
            seeds = range(len(self._slots), len(self._slots) + end - begin)
            homes = self.make_host_homes(params[begin:end], links[begin:end], seeds)
            for p, home, seed in zip(params[begin:end], homes, seeds, strict=True):
                slot = Slot(p, self._names[p], self._moments, seed, home)
                slot.measures = self._nonfinite != "apply"
                if self._is_streamed(p):
                    self._stream.home_is(slot)
                self._slots[p] = slot
                slots.append(slot)
                if self._leaves(p):
                    self._hook(slot)
        self._placement.expect(slots)
        if self._ready:
            self._make_units(slots)

    def _rooms(self, params, links):
        """(begin, end) of parameters whose states are taken in one piece: all, or, where they may move to a device
        and give their memory back, so many that the piece is worth it."""
        begin = size = 0
        for end, p in enumerate(params, 1):
            size += device_bytes(p, self._moments)
            if end == len(params) or (any(links) and size >= _ROOM_BYTES):
                yield begin, end
                begin, size = end, 0

    def make_host_homes(self, params, links, seeds):
        """Room in host memory, or on the drives where there are some, for the states of these parameters."""
        specs = [
            _orlop.TensorSpec(
                name=self._names[p],
                dtype=torch_support.DTYPES[p.dtype],
                moment_dtype=torch_support.DTYPES[self._moments],
                numel=p.numel(),
                weights=0 if self._is_away(p) else p.data_ptr(),
                keep_gradient=self._leaves(p) or self._is_away(p),
                seed=seed,
                on_drives=self._drives is not None and p.numel() > 0,
            )
            for p, seed in zip(params, seeds, strict=True)
        ]
        for p, spec in zip(params, specs, strict=True):
            weights = self._stream.drives_of(p) if self._is_streamed(p) else None
            if weights is not None:
                spec.live_on(weights.native, weights.index_of(p))
        first = self._native.add(specs, [None if self._is_away(p) else p.detach() for p in params])
        for link in self._links.values():
            link.pin(self._ranges())
        return [
            (DriveHome if specs[i].on_drives else HostHome)(
                self._native, first + i, p, self._moments, link, specs[i].keep_gradient
            )
            for i, (p, link) in enumerate(zip(params, links, strict=True))
        ]

    def _make_native(self):
        if self._drives is None:
            return _orlop.TensorOptimizer(self._threads)
        return _orlop.TensorOptimizer(self._threads, self._drives)

    def release_host(self, homes):
        """Gives the host memory of states that have left it back."""
        if not homes:
            return
        self._native.release([home.index for home in homes])
        ranges = self._ranges()
        for link in self._links.values():
            link.pin_no_more_than(ranges)

    def _ranges(self):
        """Host memory that devices copy from and to."""
        return self._native.ranges() + (self._stream.ranges() if self._stream is not None else [])

    def link_beside(self, slot):
        """The link of the device on which the weights of a slot are for good; None without one."""
        return self._stream.link_beside(slot.param) if self._is_streamed(slot.param) else slot.link

    def in_order_of_use(self):
        """The slots, in the order in which a forward of the module needs their weights."""
        slots = list(self._slots.values())
        if self._gate is None:
            return slots
        rank = self._gate.rank
        return sorted(slots, key=lambda slot: rank.get(slot.param, -1))

    def _has_states(self, slot):
        return "step" in self.state.get(slot.param, {})

    def _follow_moves(self):
        """Parameters that `module.to()`, or another tensor as their `data`, took to another device, dtype or order of
        elements get new room, states included. So do those of another shape, unless they have states already."""
        moved = {slot for slot in self._slots.values() if slot.has_moved()}
        if not moved:
            return
        for slot in moved:
            shape, now = list(slot.shape), list(slot.param.size())
            if shape != now and self._has_states(slot):
                raise errors.UsageError(
                    f"{slot.name} has shape {now}, its optimizer states have {shape}: make a new optimizer after such a "
                    "change, or make it before the first step"
                )
        self._check_groups(self.param_groups)
        old, saved = self._native, {}
        for p, slot in self._slots.items():
            if slot.is_away and (p.device, p.dtype, p.size()) == (slot.device, slot.dtype, slot.shape):
                slot.restore_gradient(slot.stand_in)
            slot.drop_gradient()
            if self._has_states(slot):
                others = {key: value for key, value in self.state[p].items() if key not in slot.planes}
                saved[p] = others | slot.states_to_move()
        params = list(self._slots)
        self._slots, self._units, self._collectors = {}, {}, {}
        self._placement.forget()
        for link in self._links.values():
            link.unpin()
        old.close()
        self._native = self._parts[0] = self._make_native()
        self._adopt(params)
        for p, state in saved.items():
            self._load_state(p, state)
