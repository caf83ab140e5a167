"""orlop eval: held-out loss of a model folder, or of a checkpoint of a run from it."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from .options import add_option_flags, config_from_args

SUMMARY = "loss and perplexity on held-out files"
_NAMES = (
    "model",
    "data",
    "seq_len",
    "train_on",
    "chat_template",
    "micro_batch",
    "accum",
    "precision",
    "device",
    "device_mem",
    "host_mem",
    "threads",
    "prefetch",
    "reference_ops",
    "optim",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--checkpoint", metavar="STEP_DIR", help="a run's step-N folder: its weights instead of the model's"
    )
    add_option_flags(parser, _NAMES)


def run(args: argparse.Namespace) -> int:
    from .. import _orlop
    from ..data.prepare import prepare
    from ..engine_config import engine_config
    from ..training import evaluate, micro_batches

    config = config_from_args(args)
    config.require("model", "data")
    native = engine_config(config, 1)
    # Only an engine that trains can have weights on drives.
    native.evaluate_only = not config.nvme
    with tempfile.TemporaryDirectory(prefix="orlop-eval-") as folder:
        data = prepare(config.data, Path(folder), config.model, config.train_on, config.chat_template)
        batches = micro_batches(config, data)
        with _orlop.Engine.open(config.model, native) as engine:
            if args.checkpoint:
                engine.load_checkpoint(args.checkpoint)
            loss = evaluate(engine, batches, config.accum)
    if args.json:
        print(json.dumps({"loss": loss, "perplexity": math.exp(loss), "tokens": data.tokens}))
    else:
        print(f"loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, {data.tokens:,} tokens")
    return 0
