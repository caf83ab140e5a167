"""orlop finetune: full fine-tuning of a Hugging Face folder."""

from __future__ import annotations

import argparse

from .options import add_option_flags, config_from_args

SUMMARY = "full fine-tuning of a Hugging Face model under byte budgets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="start N processes on this machine, one per GPU; they share the model",
    )
    add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args)
    if args.gpus is not None and args.gpus != 1:
        from ..launch import start_ranks

        return start_ranks(args.gpus, args.argv)
    from ..training import finetune

    return finetune(config).exit_code
