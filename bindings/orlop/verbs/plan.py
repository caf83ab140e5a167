"""orlop plan: what a run will need and take, from config.json alone."""

from __future__ import annotations

import argparse

from ..config import parse_int
from .options import add_option_flags, argument, config_from_args

SUMMARY = "memory and time of a run, without running it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--evaluate", action="store_true", help="of orlop eval, which holds the weights alone"
    )
    parser.add_argument(
        "--ranks",
        type=argument(parse_int, low=1),
        default=1,
        metavar="N",
        help="for each of N processes on this machine (default 1)",
    )
    add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    from .. import _orlop
    from ..engine_config import engine_config

    config = config_from_args(args)
    config.require("model")
    native = engine_config(config, config.steps or 1)
    native.evaluate_only = args.evaluate
    report = _orlop.plan(config.model, native, args.ranks)
    print(report.to_json() if args.json else report.to_text())
    return 0
