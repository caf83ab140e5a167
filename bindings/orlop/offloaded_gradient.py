"""What stands in `p.grad` while the gradient itself lies where the update reads it."""

from __future__ import annotations

from sys import getrefcount

import torch

from . import errors
from .tensor_functions import HANDS_OUT_MEMORY, METADATA, changes_in_place, each_of, replace, shares_memory


class OffloadedGradient(torch.Tensor):
    """The gradient of one parameter whose elements are with its states, in host memory or on the device.

    It has the parameter's shape, dtype and device. Norms and scaling, which are what clipping and
    loss scaling do, work where the elements are. Reading brings a copy; any other change in place, and
    any alias through which one may come (`.data`, a view), brings the gradient back into `p.grad` as a
    plain tensor and works on that, as does whoever has kept this one.
    """

    _plain: torch.Tensor | None = None  # what was put into `p.grad` in its place, until that is taken

    @staticmethod
    def make(slot) -> OffloadedGradient:
        """What is to stand in for the next gradient of a slot: the last one, if nobody else has kept it."""
        slot.stand_in = None
        parameter = slot.param
        # Whether nobody but the slot and `p.grad` has it: in Python the slot's attribute and the argument are the only
        # references, in torch those of the Python object and of `p.grad` are.
        uses = 2 if parameter.grad is slot.made else 1
        if _use_count is not None and getrefcount(slot.made) == 2 and _use_count(slot.made) == uses:
            return slot.made
        if slot.brought_back is not None:
            earlier, slot.brought_back = slot.brought_back(), None
            if earlier is not None:
                earlier._plain = None
        gradient = torch.Tensor._make_wrapper_subclass(
            OffloadedGradient, parameter.size(), strides=parameter.stride(), dtype=parameter.dtype,
            device=parameter.device,
        )  # fmt: skip
        # Weak, since autograd's reference from the parameter to its gradient is hidden from Python's
        # collector: a strong one would keep parameter and optimizer alive for ever.
        gradient._slot_reference = slot.reference
        slot.made = gradient
        return gradient

    @property
    def _slot(self):
        slot = self._slot_reference()
        if slot is None:
            raise errors.UsageError("the optimizer that held this gradient is gone")
        return slot

    def is_of(self, hooks: list) -> bool:
        """Whether it stands for the gradient of a slot with one of these hooks, or of one that is gone."""
        slot = self._slot_reference()
        return slot is None or slot.hook in hooks

    def __repr__(self, **_):
        with torch._C.DisableTorchFunctionSubclass():
            return f"OffloadedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        native = _NATIVE.get(func)
        if native is not None:
            result = native(*args, **kwargs)
            if result is not NotImplemented:
                return result
        changes = changes_in_place(func) or "out" in kwargs or getattr(func, "__name__", "") == "__set__"
        changes = changes or func in HANDS_OUT_MEMORY
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs, _restore if changes else _read)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """What torch does from C++: autograd adds the gradient of another backward. Others read."""
        if func is _ADD_IN_PLACE and isinstance(args[0], OffloadedGradient) and not kwargs:
            if args[0]._plain is not None:  # put into `p.grad` again by who has kept it
                args[0]._plain.add_(args[1])
            else:
                args[0]._slot.accumulate(*args)
            return args[0]
        if func._schema.is_mutable:
            name = next(arg._slot.name for arg in each_of(OffloadedGradient, args, kwargs or {}))
            raise errors.UsageError(
                f"{func} cannot change the gradient of {name}, whose elements are away; give the optimizer "
                'gradients="stay", which DistributedDataParallel needs, or clone the gradient first'
            )
        return _call(func, args, kwargs or {}, _read)


_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_use_count = getattr(torch.Tensor, "_use_count", None)  # an older torch does not tell


def _call(func, args, kwargs, bring):
    """What `func` returns for the gradients that `bring` brings. What shares memory with a copy that was to be read is
    an alias of the gradient: then the copy becomes `p.grad`."""
    brought: dict[int, tuple] = {}  # gradient and tensor; one tensor for each, however often it occurs

    def bring_once(gradient):
        if gradient._plain is not None:
            return gradient._plain
        if id(gradient) not in brought:
            brought[id(gradient)] = gradient, bring(gradient)
        return brought[id(gradient)][1]

    args, kwargs = replace(OffloadedGradient, (args, kwargs), bring_once)
    result = func(*args, **kwargs)
    if bring is _read:
        for gradient, tensor in brought.values():
            if shares_memory(result, tensor):
                gradient._slot.put_back(gradient, tensor)
    return result


def _read(gradient: OffloadedGradient) -> torch.Tensor:
    return gradient._slot.read_gradient(gradient)


def _restore(gradient: OffloadedGradient) -> torch.Tensor:
    return gradient._slot.restore_gradient(gradient)


def _factor(value) -> float | None:
    """A number or one-element tensor as a number; None for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and type(value) is torch.Tensor else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_offloaded(gradient) -> bool:
    return isinstance(gradient, OffloadedGradient) and gradient._plain is None


def _all_offloaded(gradients) -> bool:
    return all(map(_is_offloaded, gradients))


def _scale(gradient, value, *rest, **kwargs):
    factor = _factor(value)
    if rest or kwargs or factor is None or not _is_offloaded(gradient):
        return NotImplemented
    gradient._slot.scale_gradient(gradient, factor)
    return gradient if gradient._plain is None else gradient._plain


def _divide(gradient, value, *rest, **kwargs):
    factor = _factor(value)
    return NotImplemented if not factor else _scale(gradient, 1.0 / factor, *rest, **kwargs)


def _scale_all(gradients, value, *rest, **kwargs):
    factor = _factor(value)
    if rest or kwargs or factor is None or not _all_offloaded(gradients):
        return NotImplemented
    for gradient in gradients:
        gradient._slot.scale_gradient(gradient, factor)
    return None


def _norm(gradient, ord=2, dim=None, keepdim=False, dtype=None, **kwargs):
    if ord not in (2, "fro") or dim is not None or keepdim or kwargs or not _is_offloaded(gradient):
        return NotImplemented
    norm = gradient._slot.gradient_norm(gradient)
    return torch.tensor(norm, dtype=dtype or gradient._slot.param.dtype, device=gradient._slot.param.device)


def _norm_all(gradients, ord=2, dtype=None):
    if not _all_offloaded(gradients):
        return NotImplemented
    norms = [_norm(gradient, ord, dtype=dtype) for gradient in gradients]
    return NotImplemented if any(norm is NotImplemented for norm in norms) else tuple(norms)


def _unscale_all(gradients, found_inf, inverse_scale):
    if not _all_offloaded(gradients):
        return NotImplemented
    factor = float(inverse_scale)
    for gradient in gradients:
        if not gradient._slot.gradient_is_finite(gradient):
            found_inf.fill_(1.0)
        gradient._slot.scale_gradient(gradient, factor)
    return None


def _set_data(gradient, value):
    """As torch.nn.Module does when it has converted or moved what it holds: that is the gradient from now on."""
    if not _is_offloaded(gradient):
        return NotImplemented
    if isinstance(value, OffloadedGradient):
        value = value.detach()
    with torch._C.DisableTorchFunctionSubclass():
        gradient._slot.replace_gradient(gradient, value.detach())
    return None


_NATIVE = {
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.mul_: _scale,
    torch.Tensor.__imul__: _scale,
    torch.Tensor.div_: _divide,
    torch.Tensor.__itruediv__: _divide,
    torch.Tensor.norm: lambda gradient, p="fro", *rest, **kwargs: (
        NotImplemented if rest else _norm(gradient, p, **kwargs)
    ),
    torch.linalg.vector_norm: _norm,
}
# What clipping and the scaler of torch call; another torch may name them otherwise.
_NATIVE |= {
    getattr(torch, name): native
    for name, native in {
        "_foreach_mul_": _scale_all,
        "_foreach_norm": _norm_all,
        "_amp_foreach_non_finite_check_and_unscale_": _unscale_all,
    }.items()
    if hasattr(torch, name)
}
