"""What tells StreamedWeights that a block is about to be used, or has been: hooks of its forward, and of the tensors
with which its backward begins."""

from __future__ import annotations

import dataclasses
import functools
import weakref

import torch


def register_hooks(manager, model: torch.nn.Module, blocks: list) -> list:
    """Handles of hooks that call the manager, as long as it is there."""
    reference, bind = weakref.ref(manager), functools.partial
    handles = [model.register_forward_hook(bind(_leave_model, reference), always_call=True)]
    for block in blocks:
        handles += [
            block.module.register_forward_pre_hook(bind(_enter, reference, block.index)),
            block.module.register_forward_hook(bind(_leave, reference, block.index), always_call=True),
        ]
    return handles


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))


def _enter(manager, index, *_):
    manager = manager()
    if manager is None:
        return
    if torch._C._current_graph_task_id() != -1:  # recomputed inside backward
        manager.begin_backward(index)
        return
    manager.begin_forward(index)


def _leave(manager, index, _module, _args, output):
    manager = manager()
    if manager is None or manager.all_stay:
        return
    block = manager.blocks[index]
    if torch.is_grad_enabled() and output is not None:
        reference = weakref.ref(manager)
        seen = False
        for tensor in _tensors(output):
            seen = True
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_before_backward, reference, index))
        if not seen:  # nothing tells when its backward begins: it stays until the next step
            block.holds += 1
    if torch._C._current_graph_task_id() == -1:  # a recomputed block is needed by its backward at once
        manager.end_forward(block)


def _leave_model(manager, *_):
    manager = manager()
    if manager is not None and torch._C._current_graph_task_id() == -1:
        manager.forget_forwards()
        manager.end_pass()


def _before_backward(manager, index, _gradient):
    manager = manager()
    if manager is not None:
        manager.begin_backward(index)
