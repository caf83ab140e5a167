"""What classes of tensors whose elements are elsewhere ask about the functions that torch calls for them."""

from __future__ import annotations

import torch


def _of_tensors(*names: str) -> set:
    """Methods that every torch has, or only some."""
    return {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}


# Operations that ask about the tensor, not for its elements.
METADATA = (
    _of_tensors(
        "__len__", "dim", "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size",
        "is_floating_point", "is_complex", "is_contiguous", "is_conj", "is_neg", "is_signed", "is_inference",
        "get_device",
    )
    | {torch.is_floating_point, torch.is_complex, torch.numel}
    | {
        attribute.__get__
        for attribute in _of_tensors(
            "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_cuda", "is_cpu",
            "is_leaf", "is_quantized", "is_meta", "is_nested", "is_mps", "is_xpu", "requires_grad", "grad_fn",
            "output_nr", "names", "_version", "_backward_hooks", "retains_grad", "itemsize", "nbytes",
        )
    }
)  # fmt: skip
# What hands out the memory, and not as a tensor.
HANDS_OUT_MEMORY = _of_tensors(
    "__array__", "__dlpack__", "_typed_storage", "data_ptr", "numpy", "storage", "untyped_storage"
) | {torch.Tensor.__cuda_array_interface__.__get__}
# What brings a tensor elsewhere, or to another kind: where it is there already it may be the same one.
MOVES = _of_tensors(
    "to", "cuda", "cpu", "half", "bfloat16", "float", "double", "type", "contiguous", "pin_memory"
)
_IN_PLACE_DUNDERS = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ipow__"
}  # fmt: skip


def changes_in_place(func) -> bool:
    """Whether a function of torch's changes its first argument, which may be a list of them."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def each_of(kind: type, *values):
    """Those of a class in the arguments of a function."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from each_of(kind, *value)
        elif isinstance(value, dict):
            yield from each_of(kind, *value.values())


def replace(kind: type, value, by):
    """An argument or a result with `by(x)` in the place of each x of a class."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {key: replace(kind, item, by) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    items = [replace(kind, item, by) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return items if isinstance(value, list) else tuple(items)


def shares_memory(result, tensor: torch.Tensor) -> bool:
    """Whether a result is a tensor, or has one, in the memory of another."""
    if isinstance(result, (list, tuple)):
        return any(shares_memory(item, tensor) for item in result)
    if result is tensor:
        return True
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or not tensor.numel():
        return False
    return result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
