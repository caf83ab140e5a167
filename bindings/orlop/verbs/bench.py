"""orlop bench: times training steps on random tokens and sets them beside the plan and memory bandwidth;
`orlop bench io` measures a drive (bench_io)."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig, parse_bytes, parse_int
from ..errors import InvalidDataError
from ..progress import format_bytes
from . import bench_io
from .options import add_option_flags, argument, config_from_args

SUMMARY = "time steps of a model on random tokens under the given budgets, or (bench io) a drive"
_NAMES = (
    "model",
    "seq_len",
    "micro_batch",
    "accum",
    "steps",
    "precision",
    "moments",
    "clip",
    "device",
    "device_mem",
    "host_mem",
    "nvme",
    "nvme_mem",
    "nvme_block",
    "nvme_queue_depth",
    "nvme_direct",
    "nvme_engine",
    "nvme_verify",
    "nvme_optimizer_blocks",
    "nvme_param_blocks",
    "nvme_optimizer_share",
    "nvme_param_share",
    "threads",
    "prefetch",
    "resident_blocks",
    "device_optimizer_blocks",
    "activations",
    "wave",
    "reference_ops",
    "seed",
)
_WARMUP_STEPS = 1
_SCALE_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--path", default=".", metavar="DIR", help="bench io: folder on the drive (default: this one)"
    )
    parser.add_argument(
        "--size",
        type=argument(parse_bytes),
        default="256MiB",
        help="bench io: bytes of the temporary file (default %(default)s)",
    )
    parser.add_argument(
        "--pairs",
        type=argument(parse_int, low=1),
        default=7,
        help="bench io: measurements beside fio (default %(default)s)",
    )
    add_option_flags(parser, _NAMES)


def scale_bandwidth() -> float:
    """Bytes per second of a[i] *= c in place, one thread, best of five: a yardstick for host traffic."""
    values = np.ones(_SCALE_BYTES // 4, np.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.multiply(values, np.float32(1.0001), out=values)
        times.append(time.perf_counter() - start)
    return 2 * _SCALE_BYTES / min(times)


def _vocab_size(model_dir: str) -> int:
    path = Path(model_dir) / "config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidDataError(f"{path}: vocab_size: {error}") from None


def _random_batches(config: RunConfig, rng: np.random.Generator, vocab: int) -> list[Any]:
    from .. import _orlop

    count = config.micro_batch * config.seq_len
    batches = []
    for _ in range(config.accum):
        ids = rng.integers(0, vocab, count + 1, dtype=np.int32)
        batches.append(_orlop.MicroBatch(ids[:-1], ids[1:]))
    return batches


def _measure(config: RunConfig) -> dict[str, Any]:
    from .. import _orlop
    from ..engine_config import engine_config

    steps = config.steps or 5
    rng = np.random.default_rng(config.seed)
    vocab = _vocab_size(config.model)
    with _orlop.Engine.open(config.model, engine_config(config, _WARMUP_STEPS + steps)) as engine:
        for _ in range(_WARMUP_STEPS):
            engine.step(_random_batches(config, rng, vocab))
        before = engine.stats()
        times = []
        for _ in range(steps):
            batches = _random_batches(config, rng, vocab)
            start = time.perf_counter()
            engine.step(batches)
            times.append(time.perf_counter() - start)
        after, plan = engine.stats(), engine.plan
        median = statistics.median(times)
        return {
            "device": plan.device,
            "parameters": plan.parameters,
            "tokens_per_step": plan.tokens_per_step,
            "step_seconds": {
                "median": median,
                "min": min(times),
                "max": max(times),
                "planned": plan.step_seconds,
            },
            "tokens_per_second": plan.tokens_per_step / median,
            "model_flop_per_second": 3 * plan.forward_flops / median,
            "optimizer_seconds": (after.optimizer_seconds - before.optimizer_seconds) / steps,
            "optimizer_exposed_seconds": (after.optimizer_exposed_seconds - before.optimizer_exposed_seconds)
            / steps,
            "uploaded_bytes": (after.uploaded_bytes - before.uploaded_bytes) // steps,
            "offloaded_bytes": (after.offloaded_bytes - before.offloaded_bytes) // steps,
            "device_peak_bytes": after.device_peak_bytes,
            "host_bytes": after.host_bytes,
            "scale_bytes_per_second": scale_bandwidth(),
        }


def _print_text(result: dict[str, Any]) -> None:
    step = result["step_seconds"]
    print(
        f"{result['parameters']:,} parameters on {result['device']}, {result['tokens_per_step']} tokens per step"
    )
    print(
        f"step        {step['median']:.3f} s median ({step['min']:.3f}..{step['max']:.3f}), "
        f"planned {step['planned']:.3f} s"
    )
    print(
        f"throughput  {result['tokens_per_second']:,.1f} tok/s, "
        f"{result['model_flop_per_second'] / 1e12:.3f} TFLOP/s of the model (forward once, backward twice)"
    )
    print(
        f"update      {result['optimizer_seconds']:.3f} s on the host, "
        f"{result['optimizer_exposed_seconds']:.3f} s of it exposed"
    )
    print(
        f"per step    uploaded {format_bytes(result['uploaded_bytes'])}, "
        f"offloaded {format_bytes(result['offloaded_bytes'])}"
    )
    print(
        f"memory      device {format_bytes(result['device_peak_bytes'])}, host {format_bytes(result['host_bytes'])}"
    )
    print(f"yardstick   in-place scale {result['scale_bytes_per_second'] / 1e9:.1f} GB/s on one thread")


def run(args: argparse.Namespace) -> int:
    if args.settings[:1] == ["io"]:
        return bench_io.run(args)
    config = config_from_args(args)
    config.require("model")
    result = _measure(config)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_text(result)
    return 0
