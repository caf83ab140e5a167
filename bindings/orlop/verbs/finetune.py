"""orlop finetune: full fine-tuning of a Hugging Face folder."""

from __future__ import annotations

import argparse

from .options import add_option_flags, config_from_args

SUMMARY = "full fine-tuning of a Hugging Face model under byte budgets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    from ..training import finetune

    return finetune(config_from_args(args)).exit_code
