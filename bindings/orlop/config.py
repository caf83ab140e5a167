"""The configuration of a run: one table of options, from which flags, files and help are made.

Values come from, in rising priority: defaults, a YAML or JSON file, flags. Names are those of the Hugging
Face trainer first, then short ones; dashes and underscores are equal; unknown names are refused with the
nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from .errors import UsageError
from .text_files import decode

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    # One letter as memory tools mean it.
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}

# The most that the native library takes.
MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**63 - 1
_MAX_SEED = 2**64 - 1


def parse_bytes(text: Any) -> int:
    """'193MB', '22GiB', '4g' or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = match.group(2).lower() if match else ""
    if not match or unit not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a number of bytes such as 193MB or 22GiB")
    count = Decimal(match.group(1)) * _BYTE_UNITS[unit]
    if count > _MAX_BYTES:
        raise ValueError(f"{text!r} is above {_MAX_BYTES} bytes")
    return int(count)


def parse_bool(text: Any) -> bool:
    value = str(text).strip().lower()
    if value in ("true", "yes", "on", "1"):
        return True
    if value in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_int(text: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    """Every digit counts; 1e3 is 1000 (YAML 1.1 reads it as a string)."""
    try:
        number = Decimal("nan") if isinstance(text, bool) else Decimal(str(text))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number != number.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    if number < low:
        raise ValueError(f"{text!r} is below {low}")
    if number > high:
        raise ValueError(f"{text!r} is above {high}")
    return int(number)


def parse_float(text: Any) -> float:
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not finite")
    return number


def _positive(text: Any) -> int:
    return parse_int(text, low=1)


def _seed(text: Any) -> int:
    return parse_int(text, high=_MAX_SEED)


def _not_negative(text: Any) -> float:
    value = parse_float(text)
    if value < 0:
        raise ValueError(f"{text!r} is below 0")
    return value


def _above_zero(text: Any) -> float:
    value = parse_float(text)
    if value <= 0:
        raise ValueError(f"{text!r} is not above 0")
    return value


def _ratio(text: Any) -> float:
    value = parse_float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not within 0..1")
    return value


class OneOf:
    """Parses one of `names`, whatever its case."""

    def __init__(self, *names: str):
        self.names = names

    def __call__(self, text: Any) -> str:
        value = str(text).strip().lower()
        if value not in self.names:
            raise ValueError(f"{text!r} is not one of {', '.join(self.names)}")
        return value


def _text(value: Any) -> str:
    """Not empty: as a path that would be the current folder."""
    text = str(value)
    if not text.strip():
        raise ValueError(f"{text!r} is empty; give a value or leave the option out")
    return text


def _path(value: Any) -> str:
    """No shell has replaced the ~ of a file of options, or of KEY=~/dir."""
    return os.path.expanduser(_text(value))


def _paths(value: Any) -> list[str]:
    return [_path(item) for item in value] if isinstance(value, (list, tuple)) else [_path(value)]


@dataclass(frozen=True)
class Option:
    """One key. `aliases[0]` and so on are further spellings; `default` None means: decided later."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    is_list: bool = False
    is_flag: bool = False


_OPTIONS = (
    # Model and data.
    Option("model", _path, None, "Hugging Face folder to start from", ("model_name_or_path",)),
    Option(
        "data",
        _paths,
        None,
        "text or tokens: .txt .md .rst, .jsonl or .ndjson with {text} or {messages}, .tok, or folders of them",
        ("train_file", "dataset"),
        is_list=True,
    ),
    Option(
        "eval_data",
        _paths,
        None,
        "held-out files, likewise",
        ("validation_file", "eval_dataset"),
        is_list=True,
    ),
    Option("output", _path, None, "run folder: checkpoints, log, export", ("output_dir", "out")),
    Option("seq_len", _positive, 512, "tokens per row", ("max_seq_length", "sequence_length", "max_length")),
    Option(
        "train_on",
        OneOf("assistant", "all"),
        "assistant",
        "tokens of {messages} that carry loss",
    ),
    Option("chat_template", _path, None, "Jinja file instead of the model's own template"),
    # Batch and length.
    Option(
        "micro_batch",
        _positive,
        1,
        "rows per micro-batch",
        ("per_device_train_batch_size", "micro_batch_size"),
    ),
    Option("accum", _positive, 1, "micro-batches per step", ("gradient_accumulation_steps",)),
    Option("steps", _positive, None, "optimizer steps; wins over epochs", ("max_steps",)),
    Option(
        "epochs", _above_zero, None, "passes over the data (1 when neither is given)", ("num_train_epochs",)
    ),
    # Optimizer.
    Option("lr", _not_negative, 2e-5, "peak learning rate", ("learning_rate",)),
    Option("beta1", _ratio, 0.9, "decay of the first moment", ("adam_beta1",)),
    Option("beta2", _ratio, 0.999, "decay of the second moment", ("adam_beta2",)),
    Option("eps", _above_zero, 1e-8, "added to the root of the second moment", ("adam_epsilon",)),
    Option("weight_decay", _not_negative, 0.0, "not applied to norms and biases", ("wd",)),
    Option("optim", OneOf("adamw", "adam"), "adamw", "decay decoupled (adamw) or in the gradient (adam)"),
    Option("moments", OneOf("fp32", "bf16"), "fp32", "bf16 with stochastic rounding saves 4 B/param"),
    Option(
        "clip",
        _not_negative,
        1.0,
        "global gradient norm; 0: off, which saves 2 B/param of host memory and, except in fp16, starts "
        "updates inside backward (a gradient that is not finite then leaves only its own block as it was)",
        ("max_grad_norm",),
    ),
    Option(
        "schedule",
        OneOf("cosine", "linear", "constant", "wsd"),
        "cosine",
        "course of the rate",
        ("lr_scheduler_type",),
    ),
    Option("warmup_steps", parse_int, None, "steps of linear warm-up; wins over warmup_ratio"),
    Option("warmup_ratio", _ratio, 0.0, "warm-up as a share of all steps"),
    Option("min_lr_ratio", _ratio, 0.0, "final rate over peak rate"),
    Option("decay_ratio", _ratio, 0.1, "share of the steps in which wsd decays"),
    # Machine.
    Option("precision", OneOf("bf16", "fp16", "fp32"), "bf16", "dtype of compute"),
    Option(
        "grad_wire",
        OneOf("fp32", "bf16"),
        "fp32",
        "dtype of gradients between ranks; bf16: half the bytes, each rank's part is rounded once and summed in fp32",
        ("gradient_wire",),
    ),
    Option("bf16", parse_bool, None, "same as --precision bf16", is_flag=True),
    Option("fp16", parse_bool, None, "same as --precision fp16", is_flag=True),
    Option("device", _text, "auto", "auto, host, cuda or cuda:N"),
    Option("device_mem", parse_bytes, None, "hard budget of device bytes, e.g. 193MB", ("gpu_mem",)),
    Option("host_mem", parse_bytes, None, "hard budget of host bytes, e.g. 20GiB"),
    Option(
        "snapshot_mem",
        parse_bytes,
        0,
        "of the host bytes, for copies that keep updates from waiting for a save, e.g. 2GiB",
    ),
    Option("nvme", _paths, None, "swap directories, one per drive", ("nvme_path",), is_list=True),
    Option("nvme_mem", parse_bytes, None, "hard budget of bytes on the drives"),
    Option("nvme_writes_per_day", parse_bytes, None, "bytes that a machine may write to its drives per day"),
    Option("nvme_block", parse_bytes, 2**20, "bytes of one request to a drive"),
    Option("nvme_queue_depth", _positive, 32, "requests in flight"),
    Option("nvme_direct", parse_bool, True, "past the page cache where possible", is_flag=True),
    Option("nvme_engine", OneOf("auto", "io_uring", "threads"), "auto", "how drives are reached"),
    Option("nvme_verify", OneOf("off", "sample", "full"), "sample", "checksums of what is read"),
    Option("threads", parse_int, 0, "host threads; 0: every usable core"),
    Option("prefetch", parse_int, None, "blocks uploaded ahead of compute", ("prefetch_depth",)),
    Option("resident_blocks", parse_int, None, "blocks whose weights stay on the device", ("resident",)),
    Option("device_optimizer_blocks", parse_int, None, "blocks whose optimizer states live on the device"),
    Option("activations", OneOf("device", "host", "nvme"), None, "where block inputs wait for backward"),
    Option("wave", _positive, None, "micro-batches per wave"),
    Option("nvme_optimizer_blocks", parse_int, None, "last blocks whose optimizer states are on the drives"),
    Option("nvme_param_blocks", parse_int, None, "last blocks whose weights are there, too"),
    Option(
        "nvme_optimizer_share",
        _ratio,
        None,
        "share of those blocks' (alone: all blocks') states that is there",
    ),
    Option("nvme_param_share", _ratio, None, "likewise of their weights"),
    Option("reference_ops", parse_bool, False, "plain loops instead of oneDNN (host)", is_flag=True),
    Option("max_skipped_steps", _positive, 10, "non-finite steps in a row that end the run"),
    Option("seed", _seed, 0, "order of the data and stochastic rounding"),
    # Run.
    Option(
        "resume",
        _path,
        "auto",
        "auto (the complete checkpoint that was written last), must, never, or a step-N folder",
        ("resume_from_checkpoint",),
    ),
    Option(
        "save_every", parse_int, 500, "steps between checkpoints; 0: only when interrupted", ("save_steps",)
    ),
    Option(
        "async_save",
        parse_bool,
        True,
        "checkpoints of save_every are written beside the steps that follow",
        ("async",),
        is_flag=True,
    ),
    Option("keep", _positive, 3, "newest checkpoints to keep", ("save_total_limit",)),
    Option(
        "eval_every", parse_int, 0, "steps between evaluations; 0: before and after only", ("eval_steps",)
    ),
    Option("log_every", _positive, 1, "steps between progress lines", ("logging_steps",)),
    Option("export", parse_bool, True, "write OUTPUT/hf at the end", is_flag=True),
    Option("max_shard_size", parse_bytes, 5 * 2**30, "bytes per exported file"),
    Option("trace", parse_bool, False, "write OUTPUT/trace.json", is_flag=True),
)

OPTIONS: dict[str, Option] = {option.name: option for option in _OPTIONS}

_CANONICAL = {spelling: option.name for option in _OPTIONS for spelling in (option.name, *option.aliases)}


def normalize_key(key: str) -> str:
    return key.strip().lstrip("-").replace("-", "_").lower()


def canonical_name(key: str, source: str = "") -> str:
    """The option that a spelling names; `source` is where it stands."""
    name = normalize_key(key)
    if name in _CANONICAL:
        return _CANONICAL[name]
    near = difflib.get_close_matches(name, _CANONICAL, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    place = f"{source}: " if source else ""
    raise UsageError(f"{place}unknown option {key!r}{hint}")


def parse_value(option: Option, value: Any, source: str) -> Any:
    try:
        return option.parse(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: {option.name}: {error}") from None


class RunConfig:
    """Every option as an attribute; `explicit` holds the names that a file or a flag set."""

    def __init__(self, values: Mapping[str, Any] | None = None):
        self.explicit: set[str] = set()
        self._values = {option.name: option.default for option in _OPTIONS}
        if values:
            self.update(values, "argument")

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def update(self, values: Mapping[str, Any], source: str) -> None:
        """Takes over values under any spelling; None means: not given."""
        seen: dict[str, str] = {}
        for key, value in values.items():
            name = canonical_name(key, source)
            if name in seen:
                raise UsageError(f"{source}: {seen[name]!r} and {key!r} are the same option")
            seen[name] = key
            if value is None:
                continue
            self._values[name] = parse_value(OPTIONS[name], value, source)
            self.explicit.add(name)
        self._settle_precision(seen, source)

    def _settle_precision(self, seen: Iterable[str], source: str) -> None:
        asked = {name for name in ("bf16", "fp16") if name in seen and self._values[name]}
        if "precision" in seen and self._values["precision"]:
            asked.add(self._values["precision"])
        if len(asked) > 1:
            raise UsageError(f"{source}: precision is given as {' and as '.join(sorted(asked))}")
        if asked:
            self._values["precision"] = asked.pop()

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in ("bf16", "fp16")}

    def require(self, *names: str) -> None:
        for name in names:
            if self._values[name] in (None, []):
                raise UsageError(f"--{name.replace('_', '-')} is missing: {OPTIONS[name].help}")


# Keys whose meaning their section gives.
_SECTION_KEYS = {
    "limits": {"gpu": "device_mem", "device": "device_mem", "host": "host_mem", "nvme": "nvme_mem"},
    "nvme": {
        "paths": "nvme",
        "block": "nvme_block",
        "queue_depth": "nvme_queue_depth",
        "direct": "nvme_direct",
        "engine": "nvme_engine",
        "verify": "nvme_verify",
        "optimizer_share": "nvme_optimizer_share",
        "param_share": "nvme_param_share",
    },
}


def _lifted(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) with one level of sections ({optimizer: {lr: 1}}) lifted, so that long files can be grouped."""
    for key, value in values.items():
        if not isinstance(value, Mapping):
            yield str(key), value
            continue
        names = _SECTION_KEYS.get(key, {})
        for inner_key, inner_value in value.items():
            yield str(names.get(inner_key, inner_key)), inner_value


def names_options_only(values: Mapping[str, Any]) -> bool:
    """Whether all keys of a file are options of a run, under any spelling."""
    return all(normalize_key(key) in _CANONICAL for key, _ in _lifted(values))


def flatten(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    return _each_once(_lifted(values), source)


def _each_once(pairs: Iterable[tuple[Any, Any]], source: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"{source}: {key!r} is given twice")
        found[key] = value
    return found


def _read_yaml(text: str, source: str) -> Any:
    import yaml  # only a YAML file needs it

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: str | None) -> Any:
            node = super().compose_mapping_node(anchor)
            _each_once(((key.value, None) for key, _ in node.value if isinstance(key.value, str)), source)
            return node

    return yaml.load(text, Loader)


def read_config_text(path: Path) -> str:
    try:
        return decode(path.read_bytes(), path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def read_config_file(path: Path) -> dict[str, Any]:
    """A YAML or JSON mapping of options, one level of sections allowed, no key twice."""
    text, source = read_config_text(path), str(path)
    try:
        if path.suffix == ".json":
            values = json.loads(text, object_pairs_hook=lambda pairs: _each_once(pairs, source))
        else:
            values = _read_yaml(text, source)
    except UsageError:
        raise
    except Exception as error:  # both parsers have exception trees of their own
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise UsageError(f"{path}: expected a mapping of options, got {type(values).__name__}")
    return flatten(values, source)
