"""Lets the next forward begin while the optimizer still writes the weights of later blocks."""

from __future__ import annotations

import functools
import weakref

import torch

from .torch_support import not_compiled


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated parts of a model in the order of their registration: the members of its outermost ModuleLists, each
    once, or, where these are ModuleLists or ModuleDicts, whose forward nobody calls, their members."""
    return list(dict.fromkeys(_blocks_in(module, inside=False)))


def _blocks_in(module: torch.nn.Module, inside: bool):
    """`inside`: of a ModuleList."""
    for child in module.children():
        is_list = isinstance(child, torch.nn.ModuleList)
        if inside and not is_list and not isinstance(child, torch.nn.ModuleDict):
            yield child
        else:
            yield from _blocks_in(child, inside or is_list)


class PassingHooks:
    """One forward pre-hook of several modules, which comes and goes: a call of a module that has no hooks costs half
    of one that has any, so those inside of a block have them only while they have something to wait for."""

    def __init__(self, modules: list[torch.nn.Module], hook):
        self._hook = hook
        self._modules = []  # each with the key of its hook, which torch gives to no other
        for module in modules:
            handle = module.register_forward_pre_hook(hook)
            handle.remove()
            self._modules.append((module, handle.id))

    def put(self) -> None:
        for module, key in self._modules:
            module._forward_pre_hooks[key] = self._hook

    def remove(self) -> None:
        for module, key in self._modules:
            module._forward_pre_hooks.pop(key, None)


class GateHook(functools.partial):
    """A hook of the module that knows its gate. Its copy, in a module that is copied or saved, does nothing; the weights
    of all parts inside of that module are waited for before they are read."""

    def __reduce__(self):
        if self.args:
            _before_access(self.args[0])
        return GateHook, (_does_nothing,)


class ForwardGate:
    """Forward pre-hooks: the model waits for the weights outside of its blocks, a block for its own. So does every
    module that holds weights itself, for loops that call parts of a model, until they are there."""

    def __init__(self, optimizer, module: torch.nn.Module):
        self._optimizer = weakref.ref(optimizer)
        units = [(block, list(block.parameters())) for block in find_blocks(module)]
        inside = {p for _, params in units for p in params}
        units.insert(0, (module, [p for p in module.parameters() if p not in inside]))
        # Position of a parameter's first use: the order in which updates run.
        self.rank: dict[torch.Tensor, int] = {}
        self._units_of: dict[torch.Tensor, list[int]] = {}
        for unit, (_, params) in enumerate(units):
            for p in params:
                self.rank.setdefault(p, len(self.rank))
                self._units_of.setdefault(p, []).append(unit)
        # By unit and by who writes: the last home and slot whose weights are being written; under None the indices of
        # all that the optimizer's thread writes in place.
        self._pending: dict[int, dict] = {}
        self._is_open = True  # nothing was submitted since everything was waited for
        self._leaving: dict[int, dict[torch.Tensor, weakref.ref]] = {}  # slots by unit and parameter
        reference = weakref.ref(self)
        self.handles = []
        self._inside: list[PassingHooks] = []  # by unit
        in_blocks = {m for block, _ in units[1:] for m in block.modules()}
        for unit, (part, _) in enumerate(units):
            wait = GateHook(_before_forward, reference, unit)
            self.handles.append(part.register_forward_pre_hook(wait))
            holders = [m for m in part.modules() if m is not part and m._parameters]
            self._inside.append(PassingHooks([m for m in holders if unit > 0 or m not in in_blocks], wait))
            self.handles.append(self._inside[unit])
            # A read or write of the whole part waits for everything. (The public name came after torch 2.4.)
            on_load = getattr(
                part, "register_load_state_dict_pre_hook", part._register_load_state_dict_pre_hook
            )
            for register in (part.register_state_dict_pre_hook, on_load):
                self.handles.append(register(GateHook(_before_access, reference)))

    def has_slot(self, slot) -> None:
        """A slot whose gradients leave: when the forward of its part begins and they have been dropped, their memory
        is free for the activations of that forward, and not only in the backward."""
        self._leaving.setdefault(self.unit_of(slot.param), {})[slot.param] = slot.reference

    def unit_of(self, parameter: torch.Tensor) -> int:
        """The part that waits for a parameter first: 0 for what is outside of blocks."""
        return self._units_of.get(parameter, (0,))[0]

    def close(self, slots: list) -> None:
        """These slots, in the order of their updates, are being written. Who uses a block that is fetched waits there."""
        self._is_open = False
        for slot in slots:
            if slot.link is not None and slot.link.fetches_blocks and not slot.home.on_device:
                continue
            for unit in self._units_of.get(slot.param, (0,)):
                if unit not in self._pending:
                    self._pending[unit] = {}
                    self._inside[unit].put()
                pending = self._pending[unit]
                if slot.link is None:
                    pending.setdefault(None, []).append(slot.home.index)
                else:  # each kind is written in order
                    pending[slot.link, slot.home.on_device] = slot.home, slot

    def pass_unit(self, unit: int) -> None:
        pending = self._pending.pop(unit, None)
        if pending is None:
            return
        self._inside[unit].remove()
        on_host = pending.pop(None, None)
        optimizer = self._optimizer()
        if on_host and optimizer is not None:
            optimizer._native.wait(on_host)
        for home, slot in pending.values():
            home.wait_written(slot)

    def forget_dropped(self, unit: int) -> None:
        for reference in self._leaving.get(unit, {}).values():
            slot = reference()
            if slot is not None and slot.stand_in is not None:
                slot.forget_dropped()

    def open_all(self) -> None:
        self._is_open = True
        for unit in list(self._pending):
            self.pass_unit(unit)

    def synchronize(self) -> None:
        optimizer = self._optimizer()
        if not self._is_open and optimizer is not None:
            optimizer.synchronize()


@not_compiled
def _before_forward(gate, unit, *_):
    gate = gate()
    if gate is not None:
        gate.pass_unit(unit)
        if torch._C._current_graph_task_id() == -1:  # in a backward its own hooks follow the gradients
            gate.forget_dropped(unit)


@not_compiled
def _before_access(gate, *_):
    gate = gate()
    if gate is not None:
        gate.synchronize()


def _does_nothing(*_):
    pass
