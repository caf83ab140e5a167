"""Checkpoints of the engine: safetensors and JSON, readable without Orlop, complete or not there at all.

DIR/latest                    the newest tag
DIR/TAG/model.safetensors     weights and persistent buffers; a shared tensor once
DIR/TAG/optimizer.safetensors NAME.exp_avg, NAME.exp_avg_sq, NAME.master_lo or NAME.master
DIR/TAG/gradients.safetensors inside an accumulation window: NAME, as summed so far, with the loss scale
DIR/TAG/state.json            everything else, and the bytes of the files beside it
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from .. import errors
from ..tensor_file import save_one_by_one

FORMAT = 1


def _safetensors():
    import safetensors.torch

    return safetensors.torch


def split_shared(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(each tensor once and contiguous, name -> name of the one it is)."""
    first: dict[tuple, str] = {}
    kept, shared = {}, {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() > 0 and key in first:
            shared[name] = first[key]
        else:
            first[key] = name
            kept[name] = tensor.detach().cpu().contiguous()
    storages: set[int] = set()
    for name, tensor in kept.items():  # views of one buffer are written apart
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() > 0 and (address in storages or tensor.untyped_storage().nbytes() > tensor.nbytes):
            kept[name] = tensor.clone()
        storages.add(address)
    return kept, shared


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    _sync(beside)
    beside.replace(path)


def recover(folder: Path) -> None:
    """Of a checkpoint that a save of the same tag had set aside when it was killed: puts it back, or, where the
    new one is in its place already, removes it."""
    for aside in folder.glob("*.old.tmp"):
        home = aside.with_name(aside.name.removesuffix(".old.tmp"))
        if home.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(home)


def write(
    folder: Path, tag: str, model: dict, others: dict[str, dict], state: dict[str, Any], latest: bool
) -> Path:
    """Writes DIR/TAG beside the old one, then puts it in its place, then moves `latest`. others: tensors by file."""
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    partial, final = folder / f"{tag}.tmp", folder / tag
    for left_over in folder.glob("*.tmp"):
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    partial.mkdir()
    weights, state["shared"] = split_shared(model)
    _safetensors().save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for name, tensors in others.items():
        save_one_by_one(tensors, partial / f"{name}.safetensors")
    for path in partial.glob("*.safetensors"):
        _sync(path)
    state["bytes"] = {path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))}
    try:
        text = json.dumps({"format": FORMAT, **state}, indent=1)
    except TypeError as error:
        shutil.rmtree(partial)
        raise errors.UsageError(f"client_state holds what JSON cannot: {error}") from None
    _write_text(partial / "state.json", text)
    _sync(partial)
    if final.exists():
        old = folder / f"{tag}.old.tmp"
        final.rename(old)
        partial.rename(final)
        _sync(folder)  # the new one is on the disk before the old one goes
        shutil.rmtree(old)
    else:
        partial.rename(final)
    _sync(folder)
    if latest:
        _write_text(folder / "latest", tag)
        _sync(folder)
    return final


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint; raises InvalidDataError that says what is wrong."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InvalidDataError(f"{path}: no checkpoint of deepspeed_compat: {error}") from None
    if state.get("format") != FORMAT:
        raise errors.InvalidDataError(f"{path}: format {state.get('format')}, this version reads {FORMAT}")
    for name, size in state["bytes"].items():
        found = (path / name).stat().st_size if (path / name).exists() else "no"
        if found != size:
            raise errors.InvalidDataError(f"{path / name}: {found} bytes, {size} were written")
    return state


def check_scheduler(scheduler, state: dict[str, Any], path: Path) -> None:
    """Refuses to go on with a schedule from its beginning."""
    if scheduler is not None and state["lr_scheduler"] is None:
        raise errors.InvalidDataError(
            f"{path}: was saved without a scheduler, whose step is therefore unknown; "
            "load_lr_scheduler_states=False begins the schedule anew, load_module_only=True loads weights alone"
        )


def read_tensors(path: Path, state: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    if f"{name}.safetensors" not in state["bytes"]:
        return {}
    tensors = _safetensors().load_file(path / f"{name}.safetensors")
    if name == "model":
        tensors |= {alias: tensors[first] for alias, first in state["shared"].items()}
    return tensors
