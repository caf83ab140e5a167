"""What tells StreamedWeights that a block is about to be used, or has been: hooks of its forward, and of the tensors
with which its backward begins."""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from itertools import chain

import torch

from . import errors
from .torch_support import not_compiled

# Values of which everybody knows that no graph hangs on them.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.nn.Parameter}
)  # fmt: skip
_CONTAINERS = frozenset({list, tuple, dict})
_PUT_ON_LAYERS = frozenset({list, dict})
_MAY_HOLD_TENSORS = _CONTAINERS | {type(None), int, float}  # now, or later
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_DEPTH = 4  # of objects in objects that are looked into


def register_hooks(manager, model: torch.nn.Module, blocks: list) -> list:
    """Handles of hooks that call the manager, as long as it is there."""
    reference, bind = _Reference(manager), functools.partial
    handles = [model.register_forward_hook(bind(_leave_model, reference), always_call=True)]
    for block in blocks:
        block.attributes = Attributes(block.module)
        handles += [  # before hooks that were there already, which may use the weights
            block.module.register_forward_pre_hook(bind(_enter, reference, block.index), prepend=True),
            block.module.register_forward_hook(bind(_leave, reference, block.index), always_call=True),
        ]
    return handles


class _Reference(weakref.ref):
    """To the manager, whose hooks do nothing in a copy of the model."""

    def __deepcopy__(self, memo):
        return _nobody

    def __reduce_ex__(self, protocol):
        raise errors.UsageError(
            "a wrapped model cannot be pickled, since hooks bring its weights: save its state_dict(), or "
            "orlop.unwrap(model) first"
        )


def _nobody():
    return None


class Attributes:
    """Where modules keep more than weights, among it perhaps tensors of their last forward. What they consist of is
    looked up again only when it has changed, since this is asked after every forward."""

    def __init__(self, module: torch.nn.Module):
        self._module = weakref.ref(module)
        self._children: list[dict] = []
        self._known: list[torch.nn.Module] = []
        self._dicts: list[dict] = []
        self._sizes: list[int] = []
        self._places: list[tuple[dict, str]] = []

    def tensors(self) -> list[torch.Tensor]:
        children = [*chain.from_iterable(map(dict.values, self._children))]
        if children != self._known or [*map(len, self._dicts)] != self._sizes or not self._dicts:
            self._look_up()
        found = []
        for attributes, name in self._places:
            value = attributes.get(name)
            kind = type(value)
            if kind in _PLAIN:
                continue
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif name == "_buffers":
                found += (b for b in value.values() if b is not None and b.requires_grad)
            elif kind in _CONTAINERS and value:
                found += (leaf for leaf in _leaves(value, 0) if isinstance(leaf, torch.Tensor))
        return found

    def _look_up(self) -> None:
        modules = [m for m in self._module().modules() if isinstance(m._modules, dict)]
        self._children = [m._modules for m in modules if m._modules]
        self._known = [*chain.from_iterable(map(dict.values, self._children))]
        self._dicts = [vars(m) for m in modules] + [m._modules for m in modules if not m._modules]
        self._sizes = [*map(len, self._dicts)]
        self._places = []
        for module in modules:
            # What a layer of torch's own has are numbers and tuples of them, except what somebody put on it.
            is_torchs = type(module).__module__.startswith("torch.nn.modules.")
            kinds = _PUT_ON_LAYERS if is_torchs else _MAY_HOLD_TENSORS
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and (type(value) in kinds or isinstance(value, torch.Tensor)):
                    self._places.append((vars(module), name))
            if module._buffers:
                self._places.append((vars(module), "_buffers"))


def _leaves(value, depth: int = _DEPTH):
    """The tensors in a value, and the objects that hide what they have; `depth`: of objects that are looked into."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif kind in _PLAIN:
        pass
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, depth)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, depth)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), depth)
    elif kind.__module__ != "numpy" and not isinstance(value, enum.Enum):
        found = False
        if depth > 0 and not callable(value):
            for leaf in _leaves(getattr(value, "__dict__", None), depth - 1):
                if isinstance(leaf, torch.Tensor):
                    found = True
                    yield leaf
        if not found:
            yield value


@not_compiled
def _enter(manager, index, *_):
    manager = manager()
    if manager is None:
        return
    if torch._C._current_graph_task_id() != -1:  # recomputed inside backward
        manager.begin_backward(index)
    else:
        manager.begin_forward(index)


@not_compiled
def _leave(manager, index, _module, _args, output):
    reference, manager = manager, manager()
    if manager is None or manager.all_stay:
        return
    block = manager.blocks[index]
    builds_graph = torch.is_grad_enabled()
    seen, hidden = output is None, False
    for leaf in _leaves(output):
        if isinstance(leaf, torch.Tensor):
            seen = True
            _watch(reference, block, leaf, builds_graph)
        else:
            hidden = True
    if builds_graph and (hidden or not seen):  # nothing tells when its backward begins
        block.keep()
    for tensor in block.attributes.tensors():
        _watch(reference, block, tensor, builds_graph)
    if torch._C._current_graph_task_id() == -1:  # a recomputed block is needed by its backward at once
        manager.end_forward(block)


def _watch(reference, block, tensor, builds_graph) -> None:
    """A tensor that outlives a forward of the block: its backward begins that of the block, if it was made there."""
    if not block.resident and block.shares(tensor) and not hasattr(tensor, "_orlop_entry"):
        block.exposed = True
    if not builds_graph or not tensor.requires_grad:
        return
    node = tensor.grad_fn
    if node is None:  # nothing comes behind it
        return
    key = reference, tensor.output_nr
    maker = node.metadata.get(key)
    if maker is None:
        node.metadata[key] = block.index
        tensor.register_hook(functools.partial(_before_backward, reference, block.index, None))
    elif maker != block.index and block.index in reference().blocks[maker].callers:
        tensor.register_hook(functools.partial(_before_backward, reference, block.index, maker))


def _leave_model(manager, *_):
    manager = manager()
    if manager is not None and torch._C._current_graph_task_id() == -1:
        manager.forget_forwards()
        manager.end_pass()


def _before_backward(manager, index, callee, _gradient):
    """`callee`: the block whose output the tensor is, too; its backward comes first."""
    manager = manager()
    if manager is None:
        return
    manager.begin_backward(index)
    if callee is not None:
        manager.begin_backward(callee)
    if torch.is_grad_enabled():  # of this backward a graph is made, which needs the weights, too
        for each in (index, callee):
            if each is not None:
                manager.blocks[each].keep()
