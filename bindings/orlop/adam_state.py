"""The states of orlop.AdamW: masters, and state_dict in torch's layout both ways."""

from __future__ import annotations

import logging

from . import torch_support
from .torch_support import torch

from .adam_checks import match_groups, match_states  # isort: skip
from .gradient_sum import room_report  # isort: skip
from .placement import describe  # isort: skip
from .state_home import MASTER_KEY, MOMENT_KEYS  # isort: skip

_log = logging.getLogger("orlop")


class StateSide:
    """Part of AdamW, over its `_slots`, `_native` and torch's `state`."""

    def master(self, p):
        """A copy of the fp32 master of `p`, in host memory."""
        self._slot_of(p)
        self.synchronize()
        self._follow_moves()
        slot = self._slot_of(p)
        self._find_written([slot])
        slot.follow_weights()
        return slot.home.read_master(slot).as_strided(p.size(), p.stride())

    @torch.no_grad()
    def set_master(self, p, value):
        """Writes the fp32 master of `p` and the weights, rounded (bf16: half up; fp16: nearest even)."""
        self._slot_of(p)
        self.synchronize()
        self._follow_moves()
        slot = self._slot_of(p)
        slot.follow_weights()
        value = torch.as_tensor(value, dtype=torch.float32, device="cpu").expand(p.shape)
        laid = torch.empty_strided(p.size(), p.stride(), dtype=torch.float32).copy_(value)
        slot.home.write_master(slot, torch_support.flat(laid))
        slot.wrote_weights()

    def placement(self):
        """Where masters and moments live: {"host", "nvme" or a device: {"bytes": ..., "parameters": [names]}};
        "nvme" has also the `weight_bytes` of weights that orlop.wrap keeps there."""
        return self._placement.report()

    def __repr__(self):
        return f"{super().__repr__()[:-1]}States: {describe(self.placement())}\n)"

    def home_changed(self, slot, old):
        """The states of a slot have left the home `old`: what torch's state shows are those where they are."""
        state = self.state.get(slot.param, {})
        for key, plane in slot.planes.items():
            if state.get(key) is old.planes[key]:
                state[key] = plane
        if self._is_streamed(slot.param):
            self._stream.home_is(slot)

    def memory_report(self):
        """Bytes by purpose, in host memory where no device is named; the states of frozen parameters do not exist."""
        drives = self._stream.drives if self._stream is not None else None
        slots = {"slots of weights": drives.slot_bytes} if drives is not None else {}
        return {**self._native.memory_report(), **slots, **room_report(self._slots.values())}

    def host_bytes(self):
        """Of memory_report(), what is in host memory."""
        return sum(size for purpose, size in self.memory_report().items() if " on " not in purpose)

    def weight_bytes_on_drives(self):
        """Of blocks that orlop.wrap streams, frozen ones too."""
        drives = self._stream.drives if self._stream is not None else None
        return drives.bytes if drives is not None else 0

    def _show_state(self, p):
        """The entry of `self.state`, whose tensors are the states themselves. What a user took out of it
        starts anew; what a user put in its place is taken over."""
        state, slot = self.state[p], self._slots[p]
        fresh = "step" not in state
        if fresh:
            state["step"] = torch.tensor(0.0)
        for key, plane in slot.planes.items():
            if state.get(key) is plane:
                continue
            if key in state:
                plane.copy_(state[key])
            elif fresh and key in MOMENT_KEYS:
                plane.zero_()
            state[key] = plane
        return state

    def state_dict(self):
        """torch's layout. As with torch's optimizers the tensors are the live ones, where they live: copy them to
        keep them; after the first step, which may move them, these are others.
        16-bit parameters have one tensor more, the part of the fp32 master that the weight lacks. States on drives
        are read when somebody uses their tensor, as often as that is; after close() they are gone."""
        self.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes a state_dict of this class or of torch.optim.AdamW, from any device."""
        self.synchronize()
        self._follow_moves()
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups = match_groups(self.param_groups, state_dict, self._decoupled)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        by_param = match_states(dict(zip(saved_ids, params, strict=True)), state_dict["state"], self._names)
        self._check_groups(groups)
        self.param_groups[:] = groups
        self._adopt(by_param)
        self.state.clear()
        for p, state in by_param.items():
            self._load_state(p, state)
        without = [self._names[p] for p, s in by_param.items() if MASTER_KEY[p.dtype] not in (None, *s)]
        if without:
            _log.warning("%d masters were not in the state that was loaded and start from the weights (%s, ...)",
                         len(without), without[0])  # fmt: skip
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_state(self, p, state):
        slot = self._slots[p]
        rest = state.get(MASTER_KEY[p.dtype])
        slot.home.write_planes({key: state[key] for key in slot.planes if key in state})
        if rest is not None:
            slot.loaded_rest = slot.home.rest_to_keep(rest) if slot.link and not slot.home.on_device else None
        self.state[p] = {"step": torch.tensor(float(state["step"])), **slot.planes}
        self.state[p].update({k: v for k, v in state.items() if k not in self.state[p]})
