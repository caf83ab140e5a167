"""How the PyTorch doors are told of drives: directories, or a mapping with the keys of the section `nvme`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _orlop, errors
from .config import OPTIONS, parse_bytes, parse_value, read_config_file

_MEMBERS = {
    "paths": ("nvme", "paths"),
    "block": ("nvme_block", "block_bytes"),
    "queue_depth": ("nvme_queue_depth", "queue_depth"),
    "direct": ("nvme_direct", "direct"),
    "engine": ("nvme_engine", "engine"),
    "verify": ("nvme_verify", "verify"),
}  # key of the section: option of a run, member of NvmeConfig
_SLOTS = {"slot": "slot_bytes", "host": "host_bytes"}


def state_drives(nvme: Any) -> _orlop.StateDrives | None:
    """From one directory, several, or a mapping; None where none is named.

    Beside the keys of `nvme` in the configuration of a run: slot, bytes of host memory through which one chunk of
    states passes, and host, bytes of all slots.
    """
    if nvme is None:
        return None
    if isinstance(nvme, (str, os.PathLike)) or not isinstance(nvme, (Mapping, Sequence)):
        nvme = [nvme]
    if not isinstance(nvme, Mapping):
        nvme = {"paths": nvme}
    unknown = sorted(set(nvme) - set(_MEMBERS) - set(_SLOTS))
    if unknown:
        known = ", ".join((*_MEMBERS, *_SLOTS))
        raise errors.UsageError(f"nvme: {unknown[0]!r} is not known; use {known}")
    drives, config = _orlop.StateDrives(), _orlop.NvmeConfig()
    for key, (option, member) in _MEMBERS.items():
        if key in nvme:
            setattr(config, member, parse_value(OPTIONS[option], _plain(nvme[key]), "nvme"))
    if not config.paths:
        raise errors.UsageError("nvme: paths names no directory")
    for key, member in _SLOTS.items():
        if key in nvme:
            setattr(drives, member, _bytes(key, nvme[key]))
    if "slot" in nvme and "host" not in nvme:
        drives.host_bytes = 5 * drives.slot_bytes
    drives.nvme = config
    return drives


def param_share(nvme: Any) -> tuple[float, Any]:
    """(share of the weights that is on drives, the rest of the section `nvme` of orlop.wrap)."""
    if not isinstance(nvme, Mapping) or "param_share" not in nvme:
        return 0.0, nvme
    rest = {key: value for key, value in nvme.items() if key != "param_share"}
    share = parse_value(OPTIONS["nvme_param_share"], nvme["param_share"], "nvme")
    if share and not rest.get("paths"):
        raise errors.UsageError(
            f"nvme: param_share is {share:g}, but paths names no directory for the weights"
        )
    return share, rest


def split_config(config: Any) -> tuple[Any, Any]:
    """(the rest, the section `nvme` or None) of what orlop.wrap is configured with."""
    if isinstance(config, (str, Path)) and config != "auto":
        flat = dict(read_config_file(Path(config)))
        nvme = {key: flat.pop(option) for key, (option, _) in _MEMBERS.items() if option in flat}
        if "nvme_param_share" in flat:
            nvme["param_share"] = flat.pop("nvme_param_share")
        if "device_mem" in flat:
            flat["gpu"] = flat.pop("device_mem")
        return flat, nvme or None
    if not isinstance(config, Mapping):
        return config, None
    return {key: value for key, value in config.items() if key != "nvme"}, config.get("nvme")


def _plain(value: Any) -> Any:
    """Paths as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [os.fspath(item) for item in value]
    return value


def _bytes(key: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise errors.UsageError(f"nvme: {key}: {error}") from None
