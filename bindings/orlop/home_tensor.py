"""What stands for values that are where Orlop keeps them: states on drives, and the `data` of weights that are away."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import UsageError
from .tensor_functions import METADATA, MOVES, changes_in_place, each_of, replace, shares_memory

# For these the plane need not go to its device.
_OF_THE_HOST = {torch.Tensor.copy_, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.__reduce_ex__}
_SAME_ELEMENTS = {torch.Tensor.detach, torch.Tensor.data.__get__}


class View(NamedTuple):
    """A part of a plane, in elements of its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, plane: torch.Tensor) -> torch.Tensor:
        return plane.as_strided(self.size, self.stride, plane.storage_offset() + self.offset)


class HomeTensor(torch.Tensor):
    """One plane of a parameter in its home, or a view of it, as if it were on its device.

    Reading gives a tensor there, which lasts. What changes it changes the home: copy_() and zero_() of a plane write
    piece by piece, any other change in place reads, changes and writes the whole plane. Pickled it is a tensor in host
    memory.
    """

    @staticmethod
    def make(home, key: str, dtype: torch.dtype, like: torch.Tensor, device="cpu") -> HomeTensor:
        """`home` has read_plane(key), in host memory, write_planes({key: values}) and zero_plane(key); `like` shape and
        strides."""
        plane = View(tuple(like.size()), like.stride(), 0)
        return _stand_in(home, key, dtype, device, plane, plane)

    def is_all_of(self, home) -> bool:
        return self._home == home and self._view == self._plane

    def __repr__(self, **_):
        with torch._C.DisableTorchFunctionSubclass():
            return f"HomeTensor({self._key}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(args[0].unbind(0))
        if func in _SAME_ELEMENTS:
            return _alike(args[0], args[0]._view)
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **kwargs)
            if getattr(func, "__name__", "") == "__set__":
                raise UsageError("an attribute of values in their home cannot be set; copy_() writes them")
            return _call(func, args, kwargs, changes_in_place(func))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """What torch does from C++."""
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {}, func._schema.is_mutable)


def _stand_in(home, key: str, dtype: torch.dtype, device, view: View, plane: View) -> HomeTensor:
    tensor = torch.Tensor._make_wrapper_subclass(
        HomeTensor, view.size, strides=view.stride, storage_offset=view.offset, dtype=dtype, device=device
    )
    tensor._home, tensor._key, tensor._view, tensor._plane = home, key, view, plane
    return tensor


def _alike(tensor: HomeTensor, view: View) -> HomeTensor:
    """Another view of the same plane."""
    return _stand_in(tensor._home, tensor._key, tensor.dtype, tensor.device, view, tensor._plane)


def _call(func, args, kwargs, changes: bool):
    changed = args[0] if args and changes else kwargs.get("out")
    name = getattr(func, "__name__", "")
    brought: dict[tuple, tuple] = {}  # by home and key: one of its views, and the plane, the same one for all

    def bring(tensor):
        at = tensor._home, tensor._key
        if at not in brought:
            plane = tensor._home.read_plane(tensor._key)
            brought[at] = tensor, plane if func in _OF_THE_HOST else plane.to(tensor.device)
        return tensor._view.of(brought[at][1])

    if isinstance(changed, HomeTensor) and changed._view == changed._plane:
        if name == "copy_" and len(args) > 1:
            changed._home.write_planes({changed._key: replace(HomeTensor, args[1], bring)})
            return changed
        if name == "zero_":
            changed._home.zero_plane(changed._key)
            return changed
    plain_args, plain_kwargs = replace(HomeTensor, (args, kwargs), bring)
    result = func(*plain_args, **plain_kwargs)
    for home, key in dict.fromkeys((tensor._home, tensor._key) for tensor in each_of(HomeTensor, changed)):
        home.write_planes({key: brought[home, key][1]})
    if isinstance(changed, HomeTensor):
        return changed
    return result if func in MOVES else replace(torch.Tensor, result, lambda t: _as_view(t, brought))


def _as_view(result: torch.Tensor, brought: dict) -> torch.Tensor:
    """A result, or, where it is a view of a plane, what stands for that."""
    for tensor, plane in brought.values():
        if result.dtype == plane.dtype and shares_memory(result, plane):
            offset = result.storage_offset() - plane.storage_offset()
            return _alike(tensor, View(tuple(result.size()), result.stride(), offset))
    return result
