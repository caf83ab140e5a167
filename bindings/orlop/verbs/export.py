"""orlop export: a run's checkpoint -> a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..config import RunConfig, parse_bytes
from ..errors import DoesNotFitError, InvalidDataError, UsageError
from ..text_files import read_json_object
from .options import argument

SUMMARY = "a checkpoint as a Hugging Face folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="source", required=True, metavar="DIR", help="run folder or its step-N")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write; must not exist or be empty"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="the model folder that the run started from, if it moved"
    )
    parser.add_argument(
        "--max-shard-size",
        type=argument(parse_bytes),
        default="5GiB",
        metavar="BYTES",
        help="bytes per file (default %(default)s)",
    )


def _run_folder(source: Path) -> tuple[Path, str]:
    """The run folder and the checkpoint, from either."""
    from .. import _orlop

    if (source / "manifest.json").is_file():
        return source.parent, str(source)
    latest = _orlop.Engine.latest_checkpoint(str(source)) if source.is_dir() else ""
    if not latest:
        raise InvalidDataError(f"{source}: holds no complete checkpoint (step-N with manifest.json)")
    return source, latest


def _run_config(run_dir: Path, model: str | None) -> RunConfig:
    """The options of the run; `model`, where given, instead of its own."""
    path = run_dir / "config.json"
    config = RunConfig()
    config.update(read_json_object(path), str(path))
    config.update({"model": model}, "command line")
    if config.model is None:
        raise InvalidDataError(f"{path}: 'model' is missing; pass --model DIR")
    if not Path(config.model).is_dir():
        where = "--model" if model else f"{path}: model"
        raise InvalidDataError(f"{where} {config.model}: no such folder; pass --model DIR")
    return config


def _open(config: RunConfig) -> Any:
    """An engine with the weights alone, on any machine; where host memory does not hold them, one that has its states
    where the run had them."""
    from .. import _orlop
    from ..engine_config import engine_config

    alone = engine_config(RunConfig({"precision": config.precision, "device": "host", "seq_len": 1}), 1)
    alone.evaluate_only = True
    try:
        return _orlop.Engine.open(config.model, alone)
    except DoesNotFitError:
        if not config.nvme:
            raise
    as_trained = engine_config(config, 1)
    as_trained.checkpoint_dir = ""  # nothing is saved: the run's disk may be full
    return _orlop.Engine.open(config.model, as_trained)


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists and is not an empty folder")
    run_dir, checkpoint = _run_folder(Path(args.source))
    config = _run_config(run_dir, args.model)
    with _open(config) as engine:
        engine.load_checkpoint(checkpoint)
        engine.export_hf(str(out), args.max_shard_size)
    print(f"exported {checkpoint} to {out}")
    return 0
