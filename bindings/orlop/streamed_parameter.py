"""A parameter whose weights are in host memory, or on drives, for now: it has its shape, and refuses arithmetic."""

from __future__ import annotations

import functools
import logging
import sys
from typing import NamedTuple

import torch

from . import errors
from .home_tensor import HomeTensor
from .tensor_functions import METADATA, MOVES, each_of

_log = logging.getLogger("orlop")

# What may be done with a parameter while its weights are away, besides asking about it.
_ALLOWED = METADATA | {
    torch.Tensor.grad.__get__,
    torch.Tensor.grad.__set__,
    torch.Tensor.grad.__delete__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.untyped_storage,
    torch.Tensor.data_ptr,
    # Other tensors of its shape, dtype or device.
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.Tensor.new_empty,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.new_tensor,
}
_told: set[str] = set()


class StreamedParameter(torch.nn.Parameter):
    """The class of a parameter between two uses of its block. detach() gives a view of the host memory, or
    a copy of what is on drives, so that state_dict() is complete; `data` is the weights where they are; copy_() writes
    there; to() and the like change nothing."""

    def __repr__(self, **_):
        with torch._C.DisableTorchFunctionSubclass():
            return f"StreamedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, weights {_place(self)})"

    def __format__(self, spec):
        return format(repr(self), spec)

    def __deepcopy__(self, memo):
        raise errors.UsageError(
            f"{self._orlop_entry.name}: the weights are {_place(self)}, and a copy of a wrapped model needs all of them "
            "at once: copy it inside `with orlop.gathered(model.parameters()):`, or copy its state_dict()"
        )

    def __reduce_ex__(self, protocol):
        raise errors.UsageError(
            f"{self._orlop_entry.name}: the weights are {_place(self)}, and a parameter is pickled with its weights: "
            "save it inside `with orlop.gathered(model.parameters()):`, or save the model's state_dict()"
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ALLOWED or (func is torch.Tensor.type and len(args) + len(kwargs) == 1):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func is torch._has_compatible_shallow_copy_type:
            return True  # module.to() then sets data, which changes nothing
        if func == torch.Tensor.data.__get__ and (first._orlop_entry.is_on_drives or first.is_cuda):
            return HomeTensor.make(_AwayWeights(first._orlop_entry), "data", first.dtype, first, first.device)
        if func == torch.Tensor.data.__set__:
            entry, value = first._orlop_entry, args[1]
            if isinstance(value, StreamedParameter):  # module.to()
                return _leave(entry, None)
            if isinstance(value, HomeTensor) and value.is_all_of(_AwayWeights(entry)):
                return None  # as `p.data += x` does once it has written them
            return entry.write_host(_fitting(first, value))
        if isinstance(first, StreamedParameter) and not any(
            isinstance(a, StreamedParameter) for a in args[1:]
        ):
            entry = first._orlop_entry
            if func is torch.Tensor.detach:
                return entry.host_view()
            if func == torch.Tensor.data.__get__:
                return entry.host_view()
            if func is torch.Tensor.copy_:
                entry.write_host(args[1])
                return first
            if func in MOVES:
                return _leave(entry, first)
        names = [a._orlop_entry.name for a in each_of(StreamedParameter, args, kwargs)]
        raise errors.UsageError(
            f"{', '.join(names)}: the weights are in host memory, or on drives; use them inside the forward of their "
            "own block, or inside `with orlop.gathered(...):`. What updates them is the optimizer that wrap() returned, "
            "which a Trainer takes as optimizers=(optimizer, None)"
        )


class _AwayWeights(NamedTuple):
    """What a HomeTensor asks of its home."""

    entry: object  # streamed_block.Entry

    def read_plane(self, key: str) -> torch.Tensor:
        return self.entry.host_view()

    def write_planes(self, values: dict[str, torch.Tensor]) -> None:
        for value in values.values():
            self.entry.write_host(value)

    def zero_plane(self, key: str) -> None:
        self.entry.write_host(torch.zeros(()))


@functools.cache
def present(kind: type) -> type:
    """The class of a parameter of class `kind` while its weights are on the device. torch lets writes by way of `data`
    pass unseen; here they count as any other."""

    def copied(parameter, memo):
        copy = kind.__deepcopy__(parameter, memo)
        copy.__class__ = kind
        return copy

    def reduced(parameter, protocol):  # as a plain one, alone in its storage
        copy = copied(parameter, {})
        vars(copy).update((name, value) for name, value in vars(parameter).items() if name != "_orlop_entry")
        return copy.__reduce_ex__(protocol)

    members = {
        "__module__": kind.__module__,
        "data": property(_data, _set_data),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
    }
    return type(kind)(kind.__name__, (kind,), members)


def _data(parameter):
    return parameter.detach()


def _set_data(parameter, value):
    if value.data_ptr() == parameter.data_ptr() and value.dtype == parameter.dtype:
        return
    elif sys._getframe(1).f_code is torch.nn.Module._apply.__code__:  # module.to()
        _leave(parameter._orlop_entry, None)
    else:
        parameter.detach().copy_(_fitting(parameter, value))


def _fitting(parameter, value):
    """`value`, if it is one that the weights can become where they are."""
    with torch._C.DisableTorchFunctionSubclass():
        wanted, given = ((tuple(t.shape), t.dtype) for t in (parameter, value))
    if wanted != given:
        raise errors.UsageError(
            f"{parameter._orlop_entry.name}: `data` of shape {given[0]} and {given[1]} cannot take the place of "
            f"{wanted[0]} and {wanted[1]}, for which orlop.wrap keeps room; orlop.unwrap(model) first"
        )
    return value


def _place(parameter) -> str:
    return "on drives" if parameter._orlop_entry.is_on_drives else "in host memory"


def _leave(entry, parameter):
    if "move" not in _told:
        _told.add("move")
        _log.warning("%s: weights that orlop.wrap manages stay where they are and as they are", entry.name)
    return parameter
