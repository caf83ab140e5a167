"""What the PyTorch doors share: the check of the installed torch, dtypes, layouts and refusals."""

from __future__ import annotations

import functools
import itertools
import re

from . import errors
from ._orlop import DType

OLDEST_TORCH = (2, 4)


class TorchError(errors.UsageError, ImportError):
    """PyTorch is missing or too old for the door that was asked for."""


def _version_of(torch) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def require_torch(door: str):
    """The torch module; raises TorchError with what to install."""
    wanted = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        raise TorchError(
            f"{door} needs PyTorch {wanted} or newer, which is not installed ({error}): pip install torch"
        ) from None
    if _version_of(torch) < OLDEST_TORCH:
        raise TorchError(
            f"{door} needs PyTorch {wanted} or newer, {torch.__version__} is installed: "
            "pip install --upgrade torch"
        )
    return torch


torch = require_torch("this part of Orlop")
TORCH_VERSION = _version_of(torch)

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


def not_compiled(function):
    """What it does is no part of a model, or of a step, that is compiled."""
    apart = torch._disable_dynamo(function)  # loads the compiler when it is called

    @functools.wraps(function)
    def either(*args, **kwargs):
        return (apart if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    return either


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, as a view (numel)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def stream_at(address: int, device: torch.device) -> torch.cuda.Stream:
    """A stream of torch's by the driver's name for it, 0 for the default stream."""
    return torch.cuda.ExternalStream(address, device) if address else torch.cuda.default_stream(device)


def in_layout_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` with the strides of `parameter`, copied only where they differ."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return tensor
    copy = torch.empty_strided(parameter.size(), parameter.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def is_uninitialized(parameter: torch.Tensor) -> bool:
    """Of a lazy module, which has not seen an input."""
    return isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Refuses, by name, what no update could be right for."""
    kind = type(parameter).__name__
    if is_uninitialized(parameter):
        raise errors.UsageError(
            f"{name} is of a lazy module and has no shape yet; run one forward of the model first"
        )
    if hasattr(parameter, "placements") or kind in ("DTensor", "FlatParameter"):
        raise errors.UsageError(
            f"{name} is sharded by another wrapper ({kind}, FSDP or DTensor); Orlop and that wrapper "
            "would both manage it: give Orlop the plain model"
        )
    if hasattr(parameter, "ds_id"):
        raise errors.UsageError(
            f"{name} is managed by DeepSpeed ZeRO-3; Orlop and DeepSpeed would both manage it: "
            "give Orlop the plain model"
        )
    if parameter.dtype not in DTYPES and parameter.requires_grad:
        raise TypeError(
            f"{name} is {parameter.dtype}; the optimizer updates float32, bfloat16 and float16. "
            "Convert it, or leave it out of the parameters"
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"{name} has layout {parameter.layout}; only dense (strided) tensors can be updated")
    if parameter.device.type not in ("cpu", "cuda"):
        raise errors.UsageError(
            f"{name} is on device '{parameter.device}'; Orlop updates parameters on cpu and cuda"
            + ("; give a model built on 'meta' its weights first" if parameter.device.type == "meta" else "")
        )
    if parameter.device.type == "cuda" and torch.version.cuda is None:
        raise errors.UsageError(
            f"{name} is on '{parameter.device}', but PyTorch {torch.__version__} is not built for CUDA "
            "(ROCm is not supported)"
        )
    if not is_dense(parameter):
        raise errors.UsageError(
            f"{name} of shape {tuple(parameter.shape)} and strides {parameter.stride()} does not fill its "
            "memory without gaps; make it contiguous"
        )


def check_disjoint(named: list[tuple[str, torch.Tensor]]) -> None:
    """Refuses two parameters that share memory: each would be stepped for both."""
    ranges = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in named
        if p.untyped_storage().nbytes() > 0 and p.numel() > 0 and p.device.type in ("cpu", "cuda")
    )
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(ranges):
        if device == other_device and begin < end:
            raise errors.UsageError(
                f"{name} and {other} share memory; tie weights by using one Parameter in both places"
            )
