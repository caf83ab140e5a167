"""Writes tensors as safetensors, one at a time, so that those which are read when they are used need no more memory
than the largest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from . import errors

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_one_by_one(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """What safetensors.torch.save_file() writes, up to the order of the tensors."""
    order = sorted(
        tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)
    )  # each aligned to its elements
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise errors.UsageError(f"{path}: {name} is {tensor.dtype}, which cannot be saved")
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            whole = tensors[name].detach().cpu().contiguous()
            file.write(memoryview(whole.reshape(-1).view(torch.uint8).numpy()))
