"""Reads a DeepSpeed configuration and says what every key of it becomes. Needs no torch."""

from __future__ import annotations

import base64
import contextlib
import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import deepspeed_keys as table
from .errors import UsageError
from .hjson_reader import read_hjson

_ZERO = "zero_optimization"
_OFF = (False, None, 0, "auto", {})
_SECTIONS = {
    ".".join(parts[:count])
    for parts in (path.split(".") for path in table.KEYS)
    for count in range(1, len(parts))
}


@dataclass(frozen=True)
class Finding:
    """What became of one key: grade A, B, R, "-" (a comment) or "?" (unknown)."""

    path: str
    value: Any
    grade: str
    text: str


class DeepSpeedConfig:
    """Effective values by dotted path, and a Finding for every key that was given."""

    def __init__(self, values: Mapping[str, Any], source: str, world_size: int = 1):
        self.source = source
        self.findings: list[Finding] = []
        given = dict(_flatten(self._normalised(dict(values))))
        compat = given.get("compat")
        if compat not in (None, "auto", "0.18"):
            raise UsageError(f'{source}: compat is {compat!r}; only "0.18" is known')
        self._values = {path: key.default for path, key in table.KEYS.items()}
        if compat == "0.18":
            self._values.update(table.DEFAULTS_018)
        self._strict = given.get("strict") is True
        self._given = given
        for path, value in given.items():
            self._take(path, value)
        self._check_choices()
        self._settle_batch(world_size)

    def __getitem__(self, path: str) -> Any:
        return self._values[path]

    def as_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def scheduler_params(self) -> dict[str, Any]:
        """Of the schedule that is named. warmup_max_lr None: each group's lr."""
        params = {name: key.default for name, key in table.SCHEDULERS[self["scheduler.type"]].items()}
        for name, value in self["scheduler.params"].items():
            if value != "auto":
                params[name] = value
            elif name in table.SCHEDULER_AUTO:
                params[name] = table.SCHEDULER_AUTO[name]
        return params

    # --- reading --------------------------------------------------------------------------------

    @classmethod
    def read(cls, source: Any, world_size: int = 1) -> DeepSpeedConfig:
        """From a mapping, a path, or the base64url text of a JSON object."""
        if isinstance(source, DeepSpeedConfig):
            return source
        if isinstance(source, Mapping):
            return cls(source, "config", world_size)
        if not isinstance(source, (str, os.PathLike)):
            raise UsageError(f"config: a path, a dict or base64 text is needed, not {type(source).__name__}")
        path = Path(source)
        try:
            return cls(read_hjson(path.read_text(encoding="utf-8"), str(path)), str(path), world_size)
        except OSError as error:
            decoded = _decode(str(source))
            if decoded is None:
                raise UsageError(f"{source}: cannot be read: {error.strerror}") from None
            return cls(read_hjson(decoded, "config (base64)"), "config (base64)", world_size)
        except UnicodeDecodeError as error:
            raise UsageError(f"{source}: not UTF-8 text at byte {error.start}") from None

    def _normalised(self, values: dict[str, Any]) -> dict[str, Any]:
        """One spelling for every key; two spellings of one key are an error that names both."""
        for old, new in table.RENAMED.items():
            _rename(values, old, new, self.source)
        zero = values.get(_ZERO)
        if isinstance(zero, bool):
            values[_ZERO] = {"stage": int(zero)}
            self.findings.append(Finding(_ZERO, zero, "A", f"deprecated: stage {int(zero)}"))
        elif isinstance(zero, Mapping):
            values[_ZERO] = self._normalised_zero(dict(zero))
        return values

    def _normalised_zero(self, zero: dict[str, Any]) -> dict[str, Any]:
        for key in list(zero):
            if f"{_ZERO}.stage3_{key}" in table.KEYS:
                _rename(zero, key, f"stage3_{key}", self.source)
        for old, new in table.RENAMED_IN_ZERO.items():
            _rename(zero, old, new, self.source)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if old not in zero:
                continue
            wanted = zero.pop(old)
            if new in zero:
                raise UsageError(f"{self.source}: {_ZERO}.{old} and {_ZERO}.{new} mean the same; give one")
            if wanted is True:
                zero[new] = {"device": "cpu"}
            self.findings.append(Finding(f"{_ZERO}.{old}", wanted, "A", f"deprecated: {new}.device"))
        old = "cpu_offload_use_pin_memory"
        if old in zero:
            note = table.KEYS[f"{_ZERO}.offload_optimizer.pin_memory"].note
            self.findings.append(Finding(f"{_ZERO}.{old}", zero.pop(old), "B", f"deprecated: {note}"))
        for section in ("offload_optimizer", "offload_param"):
            if zero.get(section, 0) is None:
                zero.pop(section)
        return zero

    def _take(self, path: str, value: Any) -> None:
        if any(_is_comment(part) for part in path.split(".")):
            self.findings.append(Finding(path, value, "-", "a comment"))
            return
        section = path.split(".", 1)[0]
        if section in table.REFUSED_SECTIONS:
            self._refuse_section(section, path, value)
            return
        if path in _SECTIONS:
            if value not in (None, {}):
                raise UsageError(
                    f"{self.source}: {path} = {value!r}: a section is needed: {_section_example(path, value)}"
                )
            return
        owner = _container_of(path)
        if owner is not None:
            value_of_owner = dict(self._values[owner] or {})
            value_of_owner[path[len(owner) + 1 :]] = value
            self._values[owner] = value_of_owner
            path, value = owner, value_of_owner
            self.findings = [finding for finding in self.findings if finding.path != owner]
        key = table.KEYS.get(path)
        if key is None:
            self._unknown(path, value)
            return
        if value == "auto":
            self.findings.append(Finding(path, value, key.grade, f"default: {self._values[path]!r}"))
            return
        value = _parse(path, key, value, self.source)
        if key.grade == "R" and value != key.default and value is not None:
            raise UsageError(f"{self.source}: {path} = {value!r} is refused: {key.note}")
        self._values[path] = value
        self.findings.append(Finding(path, value, key.grade, key.note))

    def _refuse_section(self, section: str, path: str, value: Any) -> None:
        name = path.rsplit(".", 1)[-1]
        if path == section or name == "enabled":
            asks = value not in _OFF
        elif section in ("compile", "amp"):
            asks = value is True
        elif section in table.SWITCHES:
            switches = (f"{section}.enabled", f"{section}.{table.SWITCHES[section]}")
            off = any(switch in self._given and not _is_on(self._given[switch]) for switch in switches)
            asks = not off and _is_on(value)
        else:
            asks = False
        if asks:
            raise UsageError(f"{self.source}: {path} is refused: {table.REFUSED_SECTIONS[section]}")
        self.findings.append(Finding(path, value, "R", "off, as is everything of this section"))

    def _unknown(self, path: str, value: Any) -> None:
        hint = _hint(path)
        if path.startswith(f"{_ZERO}.") or self._strict:
            raise UsageError(f"{self.source}: unknown key {path!r}{hint}")
        self.findings.append(Finding(path, value, "?", f"unknown, ignored{hint}"))

    # --- rules between keys ---------------------------------------------------------------------

    def _check_choices(self) -> None:
        optimizer = self["optimizer.type"]
        if optimizer is not None and optimizer.lower() not in {name.lower() for name in table.OPTIMIZERS}:
            raise UsageError(
                f"{self.source}: optimizer.type = {optimizer!r} is refused: "
                f"{' and '.join(table.OPTIMIZERS)} are here"
                + ("" if optimizer in table.REFUSED_OPTIMIZERS else "; the name is not DeepSpeed's either")
            )
        for finding in self.findings:
            if finding.grade == "?" and finding.path.startswith("optimizer.params."):
                raise UsageError(f"{self.source}: unknown key {finding.path!r}{_hint(finding.path)}")
        self._check_scheduler()
        self._check_one_of(f"{_ZERO}.stage", (0, 1, 2, 3))
        self._check_one_of("torch_autocast.dtype", ("bfloat16", "float16"))
        self._check_one_of("data_types.grad_accum_dtype", (None, "fp32", "fp16", "bf16"))
        self._check_one_of("log_level", (None, "debug", "info", "warning", "error", "critical"))
        for section in (f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"):
            self._check_one_of(f"{section}.device", ("none", "cpu", "nvme"))
            if self[f"{section}.device"] == "nvme" and not self[f"{section}.nvme_path"]:
                raise UsageError(
                    f"{self.source}: {section}.device = 'nvme' needs {section}.nvme_path, a directory or a list of "
                    "one per drive"
                )
        if self[f"{_ZERO}.offload_param.device"] != "none" and self[f"{_ZERO}.stage"] != 3:
            raise UsageError(
                f"{self.source}: {_ZERO}.offload_param needs {_ZERO}.stage 3, which is {self[f'{_ZERO}.stage']}"
            )
        if self["fp16.enabled"] and self["bf16.enabled"]:
            raise UsageError(f"{self.source}: fp16.enabled and bf16.enabled are both true; give one")
        if self["bf16.bf16_optimizer_states"] and not self["bf16.bf16_master_weights_and_grads"]:
            raise UsageError(
                f"{self.source}: bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads, "
                "as in DeepSpeed"
            )

    def _check_scheduler(self) -> None:
        scheduler = self["scheduler.type"]
        if scheduler is None:
            return
        if scheduler not in table.SCHEDULERS:
            raise UsageError(
                f"{self.source}: scheduler.type = {scheduler!r} is refused: {', '.join(table.SCHEDULERS)} "
                "are here; torch's own schedulers can be given to initialize()"
            )
        known = table.SCHEDULERS[scheduler]
        params = {name: value for name, value in self["scheduler.params"].items() if not _is_comment(name)}
        unknown = set(params) - set(known)
        if unknown:
            raise UsageError(f"{self.source}: scheduler.params.{min(unknown)} is unknown to {scheduler}")
        self._values["scheduler.params"] = {
            name: value
            if value == "auto"
            else _parse(f"scheduler.params.{name}", known[name], value, self.source)
            for name, value in params.items()
        }

    def _check_one_of(self, path: str, known: tuple) -> None:
        if self[path] not in known:
            shown = ", ".join(str(value) for value in known if value is not None)
            raise UsageError(f"{self.source}: {path} = {self[path]!r} is not one of {shown}")

    def _settle_batch(self, world_size: int) -> None:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total, micro, steps = (self[name] for name in names)
        for name in names:
            if self[name] is not None and self[name] < 1:
                raise UsageError(f"{self.source}: {name} = {self[name]} is not positive")
        if total is None and micro is None:
            if steps is not None:
                raise UsageError(
                    f"{self.source}: {names[2]} alone gives no batch; add {names[0]} or {names[1]}"
                )
            return
        if micro is None:
            steps = steps or 1
            micro = total / (steps * world_size)
        elif steps is None:
            steps = total / (micro * world_size) if total is not None else 1
        total = micro * steps * world_size if total is None else total
        if micro != int(micro) or steps != int(steps) or micro * steps * world_size != total:
            raise UsageError(
                f"{self.source}: train_batch_size {total} is not train_micro_batch_size_per_gpu "
                f"{micro:g} * gradient_accumulation_steps {steps:g} * {world_size} ranks"
            )
        self._values.update(zip(names, (int(total), int(micro), int(steps)), strict=True))


def _decode(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text.encode()).decode("utf-8")
    except (ValueError, UnicodeError):
        return None


def _rename(values: dict[str, Any], old: str, new: str, source: str) -> None:
    if old not in values:
        return
    if new in values:
        raise UsageError(f"{source}: {old!r} and {new!r} are the same key; give one")
    values[new] = values.pop(old)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in table.KEYS:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _is_comment(name: str) -> bool:
    return name.startswith(("_", "#", "//")) or name == "comment"


def _is_on(value: Any) -> bool:
    """Of a switch or a size: whether it asks for something."""
    return value is True or not (value in _OFF or value in (1, "none", ""))


def _section_example(path: str, value: Any) -> str:
    """JSON of the section with the key that `value` is probably meant for."""
    keys = [known for known in table.KEYS if known.startswith(f"{path}.")]
    key = f"{path}.enabled" if f"{path}.enabled" in keys else keys[0]
    try:
        shown = _parse(key, table.KEYS[key], value, "")
    except UsageError:
        shown = table.KEYS[key].default
    for part in reversed(key.split(".")):
        shown = {part: "..." if shown is None else shown}
    return json.dumps(shown)


def _hint(path: str) -> str:
    """The known key that an unknown one is nearest to: at its level, else the only one of such a name."""
    parts = path.split(".")
    known = [name.split(".") for name in (*table.KEYS, *table.REFUSED_SECTIONS)]
    depth = next(
        depth
        for depth in range(len(parts))
        if not any(name[: depth + 1] == parts[: depth + 1] for name in known)
    )
    level = {name[depth] for name in known if name[:depth] == parts[:depth] and len(name) > depth}
    near = difflib.get_close_matches(parts[depth], level, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*parts[:depth], near[0]])!r}?"
    leaves = [name[-1] for name in known]
    near = difflib.get_close_matches(parts[-1], leaves, n=1, cutoff=0.6) if depth == len(parts) - 1 else []
    if near and leaves.count(near[0]) == 1:
        return f"; did you mean {'.'.join(known[leaves.index(near[0])])!r}?"
    return ""


def _container_of(path: str) -> str | None:
    """The key of the table whose value is a mapping that `path` lies in."""
    parts = path.split(".")
    for count in range(1, len(parts)):
        owner = ".".join(parts[:count])
        if owner in table.KEYS and isinstance(table.KEYS[owner].default, dict):
            return owner
    return None


def _parse(path: str, key: table.Key, value: Any, source: str) -> Any:
    kind = key.kind or type(key.default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is None and (key.default is None or dict in kinds):
        return key.default
    if isinstance(value, str) and not ({str} & set(kinds)):  # "5e8" in quotes
        with contextlib.suppress(ValueError):
            value = float(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key.endless and value == math.inf:
        return None
    if number and not (math.isfinite(value) and key.least <= value < key.below):
        below = f" and below {key.below:g}" if math.isfinite(key.below) else ""
        raise UsageError(f"{source}: {path} = {value!r}: a finite number from {key.least:g}{below} is needed")
    if int in kinds and number and value == int(value):
        return int(value)
    if float in kinds and number:
        return float(value)
    if list in kinds and isinstance(value, (list, tuple)):
        if key.numbers is None:
            return list(value)
        if key.numbers and len(value) != key.numbers:
            raise UsageError(f"{source}: {path} = {value!r}: {key.numbers} numbers are needed")
        one = replace(key, default=0.0, kind=float, numbers=None)
        return [_parse(f"{path}[{i}]", one, item, source) for i, item in enumerate(value)]
    if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise UsageError(f"{source}: {path} = {value!r}: {names} is needed")
    if key.choices is not None and value not in key.choices:
        raise UsageError(f"{source}: {path} = {value!r} is not one of {', '.join(key.choices)}")
    return value


def explain(config: DeepSpeedConfig) -> list[str]:
    """One line per given key, the effective batch, and the defaults that people forget."""
    lines = [f"{config.source}: DeepSpeed configuration, as orlop.deepspeed_compat reads it"]
    width = max((len(f.path) for f in config.findings), default=0)
    for finding in sorted(config.findings, key=lambda f: f.path):
        lines.append(f"  {finding.grade}  {finding.path:<{width}}  {finding.value!r}: {finding.text}")
    given = {finding.path for finding in config.findings}
    if config["train_batch_size"]:
        lines.append(
            f"batch: {config['train_batch_size']} = {config['train_micro_batch_size_per_gpu']} rows "
            f"* {config['gradient_accumulation_steps']} micro-batches"
        )
    if "gradient_clipping" not in given:
        lines.append(f"default: gradient_clipping {config['gradient_clipping']} (0 switches it off)")
    count = {grade: sum(f.grade == grade for f in config.findings) for grade in "ABR?"}
    lines.append(
        f"{count['A']} with the same meaning (A), {count['B']} accepted with a note (B), "
        f"{count['R']} switched off (R), {count['?']} unknown (?)"
    )
    return lines
