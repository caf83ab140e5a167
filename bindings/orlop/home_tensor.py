"""What stands for values that are where Orlop keeps them: states on drives, and the `data` of weights that are away."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import UsageError
from .tensor_functions import METADATA, MOVES, changes_in_place, each_of, replace, shares_memory

_SAME_ELEMENTS = {torch.Tensor.detach, torch.Tensor.data.__get__}


class View(NamedTuple):
    """A part of a plane, in elements of its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, plane: torch.Tensor) -> torch.Tensor:
        return plane.as_strided(self.size, self.stride, plane.storage_offset() + self.offset)


class HomeTensor(torch.Tensor):
    """One plane of a parameter in its home, or a view of it.

    Reading gives a tensor in host memory, which lasts, or where operands are on a device one there. What changes it
    changes the home: copy_() and zero_() of a plane write piece by piece, any other change in place reads, changes and
    writes the whole plane. Pickled, or copied, it is a tensor in host memory.
    """

    @staticmethod
    def make(home, key: str, dtype: torch.dtype, like: torch.Tensor) -> HomeTensor:
        """`home` has read_plane(key), write_planes({key: values}) and zero_plane(key); `like` shape and strides."""
        plane = View(tuple(like.size()), like.stride(), 0)
        return _stand_in(home, key, dtype, plane, plane)

    def __repr__(self, **_):
        with torch._C.DisableTorchFunctionSubclass():
            return f"HomeTensor({self._key}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(args[0].unbind(0))
        if func in _SAME_ELEMENTS:
            return _stand_in(args[0]._home, args[0]._key, args[0].dtype, args[0]._view, args[0]._plane)
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


def _stand_in(home, key: str, dtype: torch.dtype, view: View, plane: View) -> HomeTensor:
    tensor = torch.Tensor._make_wrapper_subclass(
        HomeTensor, view.size, strides=view.stride, storage_offset=view.offset, dtype=dtype
    )
    tensor._home, tensor._key, tensor._view, tensor._plane = home, key, view, plane
    return tensor


def _call(func, args, kwargs, changes: bool):
    changed = args[0] if args and changes else kwargs.get("out")
    name = getattr(func, "__name__", "")
    if isinstance(changed, HomeTensor) and changed._view == changed._plane:
        if name == "copy_" and len(args) > 1:
            changed._home.write_planes({changed._key: replace(HomeTensor, args[1], _read)})
            return changed
        if name == "zero_":
            changed._home.zero_plane(changed._key)
            return changed
    to_write = list(each_of(HomeTensor, changed))
    on_device = next((t.device for t in each_of(torch.Tensor, args, kwargs) if t.device.type == "cuda"), None)
    planes: dict[tuple, torch.Tensor] = {}  # by home and key: one for all of its views

    def bring(tensor):
        if not isinstance(tensor, HomeTensor):
            return tensor.cpu() if to_write and on_device is not None else tensor
        at = tensor._home, tensor._key
        if at not in planes:
            planes[at] = tensor._home.read_plane(tensor._key)
        part = tensor._view.of(planes[at])
        return part if to_write or on_device is None else part.to(on_device)

    args, kwargs = replace(torch.Tensor, (args, kwargs), bring)
    result = func(*args, **kwargs)
    for home, key in dict.fromkeys((tensor._home, tensor._key) for tensor in to_write):
        home.write_planes({key: planes[home, key]})
    if isinstance(changed, HomeTensor):
        return changed
    return result if func in MOVES else replace(torch.Tensor, result, lambda t: _as_view(t, planes))


def _read(tensor: HomeTensor) -> torch.Tensor:
    return tensor._view.of(tensor._home.read_plane(tensor._key))


def _as_view(result: torch.Tensor, planes: dict) -> torch.Tensor:
    """A result, or, where it is a view of a plane, what stands for that."""
    for (home, key), plane in planes.items():
        if result.dtype == plane.dtype and shares_memory(result, plane):
            offset = result.storage_offset() - plane.storage_offset()
            view = View(tuple(result.size()), result.stride(), offset)
            return _stand_in(home, key, plane.dtype, view, View(tuple(plane.size()), plane.stride(), 0))
    return result
