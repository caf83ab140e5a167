"""Checkpoints of the engine: safetensors and JSON, readable without Orlop, complete or not there at all.

DIR/latest                    the newest tag
DIR/TAG/model.safetensors     weights and persistent buffers; a shared tensor once
DIR/TAG/optimizer.safetensors NAME.exp_avg, NAME.exp_avg_sq, NAME.master_lo or NAME.master
DIR/TAG/gradients.safetensors inside an accumulation window: NAME, as summed so far, with the loss scale
DIR/TAG/state.json            everything else, and the bytes of the files beside it
DIR/.orlop-*                  of a save that was killed: what it had written, or the old checkpoint it set aside

What JSON has no word for is {"$": KIND, "of": [...]} in state.json: a "tuple", a "dict" of [key, value] whose keys are
not text, a "Counter".
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import errors
from ..tensor_file import save_one_by_one

FORMAT = 2  # 1 had no tags: tuples became lists, keys became text
_OWN = ".orlop-"
_PARTIAL, _OLD = f"{_OWN}partial-", f"{_OWN}old-"
_LATEST = "latest"
_KINDS = {"tuple": tuple, "dict": dict, "Counter": lambda pairs: Counter(dict(pairs))}
# What load_checkpoint() takes from state.json.
_FIELDS = {
    "bytes": dict, "shared": dict, "client_state": object, "global_steps": int, "global_samples": int,
    "micro_steps": int, "skipped_steps": int, "lr_scheduler": (dict, type(None)), "loss_scaler.scale": (int, float),
    "loss_scaler.left": int, "loss_scaler.good": int, "loss_scaler.failures": int, "optimizer.steps": dict,
    "optimizer.param_groups": list,
}  # fmt: skip


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


def _encoded(value: Any, where: str) -> Any:
    """What JSON holds and _decoded() turns back; raises UsageError naming the place of what it cannot."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encoded(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$": "tuple", "of": _encoded(list(value), where)}
    if isinstance(value, Mapping):
        counts = isinstance(value, Counter)
        if not counts and "$" not in value and all(isinstance(key, str) for key in value):
            return {key: _encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [_encoded(key, f"{where}, a key"), _encoded(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"$": "Counter" if counts else "dict", "of": pairs}
    raise errors.UsageError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: numbers, text, lists, tuples and dicts "
        "can be saved"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return _KINDS[value["$"]](_decoded(value["of"]))
    return {key: _decoded(item) for key, item in value.items()}


def _write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    beside = path.with_name(_PARTIAL + path.name)
    beside.write_text(text, encoding="utf-8")
    _sync(beside)
    beside.replace(path)


def recover(folder: Path) -> None:
    """Of a checkpoint that a save of the same tag had set aside when it was killed: puts it back, or, where the
    new one is in its place already, removes it."""
    for aside in folder.glob(f"{_OLD}*"):
        home = aside.with_name(aside.name.removeprefix(_OLD))
        if home.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(home)


def check_tag(folder: Path, tag: str) -> None:
    """Raises UsageError for a tag that is no name of a folder, is one of the writer's own, or whose place has
    something else in it."""
    reason = None
    if tag != tag.strip() or tag in ("", ".", "..") or "/" in tag or "\0" in tag:
        reason = f"a tag names one folder in {folder}"
    elif tag == _LATEST or tag.startswith(_OWN):
        reason = f"the writer itself uses {_LATEST!r} and names that begin with {_OWN!r}"
    if reason is not None:
        raise errors.UsageError(f"save_checkpoint: tag {tag!r} is refused: {reason}; give another")
    place = folder / tag
    ours = all((place / name).is_file() for name in ("state.json", "model.safetensors"))
    empty = place.is_dir() and not any(place.iterdir())
    if os.path.lexists(place) and not ours and not empty:
        raise errors.UsageError(
            f"save_checkpoint: {place} is there and is no checkpoint of deepspeed_compat; it stays as it is: give "
            "another tag, or move it away"
        )


def write(
    folder: Path, tag: str, model: dict, others: dict[str, dict], state: dict[str, Any], latest: bool
) -> Path:
    """Writes DIR/TAG beside the old one, then puts it in its place, then moves `latest`. others: tensors by file.

    Raises UsageError, with nothing written, for a tag or a state that cannot be saved.
    """
    recover(folder)
    check_tag(folder, tag)
    try:
        state = {key: _encoded(value, key) for key, value in state.items()}
    except RecursionError:
        raise errors.UsageError("save_checkpoint: client_state or another state contains itself") from None
    folder.mkdir(parents=True, exist_ok=True)
    partial, final = folder / f"{_PARTIAL}{tag}", folder / tag
    for left_over in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    partial.mkdir()
    weights, state["shared"] = split_shared(model)
    _safetensors().save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for name, tensors in others.items():
        save_one_by_one(tensors, partial / f"{name}.safetensors")
    for path in partial.glob("*.safetensors"):
        _sync(path)
    state["bytes"] = {path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))}
    _write_text(partial / "state.json", json.dumps({"format": FORMAT, **state}, indent=1))
    _sync(partial)
    if final.exists():
        old = folder / f"{_OLD}{tag}"
        final.rename(old)
        partial.rename(final)
        _sync(folder)  # the new one is on the disk before the old one goes
        shutil.rmtree(old)
    else:
        partial.rename(final)
    _sync(folder)
    if latest:
        _write_text(folder / _LATEST, tag)
        _sync(folder)
    return final


def latest_tag(folder: Path) -> str | None:
    """The newest tag; None where there is no checkpoint."""
    path = folder / _LATEST
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint, whose tensor files have readable headers; raises InvalidDataError that
    says what is wrong."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InvalidDataError(f"{path}: no checkpoint of deepspeed_compat: {error}") from None
    if not isinstance(state, dict):
        raise errors.InvalidDataError(f"{path / 'state.json'}: holds a {type(state).__name__}, not an object")
    found = state.get("format")
    if found not in (1, FORMAT):
        raise errors.InvalidDataError(
            f"{path / 'state.json'}: format {found}, this version reads 1 and {FORMAT}"
        )
    if found == FORMAT:
        try:
            state = _decoded(state)
        except (KeyError, TypeError, ValueError) as error:
            raise errors.InvalidDataError(f"{path / 'state.json'}: a bad tag: {error!r}") from None
    _check_fields(state, path / "state.json")
    for name, size in state["bytes"].items():
        found = (path / name).stat().st_size if (path / name).exists() else "no"
        if found != size:
            raise errors.InvalidDataError(f"{path / name}: {found} bytes, {size} were written")
        _check_header(path / name)
    return state


def _check_fields(state: dict[str, Any], path: Path) -> None:
    for field, kind in _FIELDS.items():
        value: Any = state
        for part in field.split("."):
            if not isinstance(value, dict) or part not in value:
                raise errors.InvalidDataError(f"{path}: {field} is missing")
            value = value[part]
        if not isinstance(value, kind):
            raise errors.InvalidDataError(f"{path}: {field} is a {type(value).__name__}")


def _check_header(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise errors.InvalidDataError(f"{path}: no safetensors file: {error}") from None


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
        lost = sorted(set(state["shared"].values()) - set(tensors))
        if lost:
            raise errors.InvalidDataError(f"{path / 'model.safetensors'}: {lost[0]} is missing")
        tensors |= {alias: tensors[first] for alias, first in state["shared"].items()}
    return tensors
