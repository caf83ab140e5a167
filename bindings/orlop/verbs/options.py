"""Flags that several verbs share, made from the table in orlop.config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import OPTIONS, OneOf, RunConfig, canonical_name, read_config_file
from ..errors import UsageError


def _flags(name: str, aliases: tuple[str, ...]) -> list[str]:
    spellings = dict.fromkeys(s for key in (name, *aliases) for s in (key.replace("_", "-"), key))
    return [f"--{spelling}" for spelling in spellings]


def argument(parse: Callable[..., Any], **limits: int) -> Callable[[str], Any]:
    """`parse` as the type of a flag that is no option; what it says of a wrong value is the usage error."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text, **limits)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def add_option_flags(parser: argparse.ArgumentParser, names: tuple[str, ...] | None = None) -> None:
    """CONFIG.yaml, KEY=VALUE and one flag per option (all options when names is None)."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG.yaml | KEY=VALUE",
        help="a YAML or JSON file of options, and single options",
    )
    for option in OPTIONS.values():
        if names is not None and option.name not in names:
            continue
        extra: dict[str, Any] = {"metavar": option.name.upper()}
        if isinstance(option.parse, OneOf):
            extra["metavar"] = "|".join(option.parse.names)
        if option.is_list:
            extra["nargs"] = "+"
        elif option.is_flag:
            extra |= {"nargs": "?", "const": True, "metavar": "true|false"}
        shown = "" if option.default is None else f" (default {option.default})"
        parser.add_argument(
            *_flags(option.name, option.aliases),
            dest=f"option_{option.name}",
            default=None,
            help=option.help.replace("%", "%%") + shown,
            **extra,
        )


def config_from_args(args: argparse.Namespace, base: RunConfig | None = None) -> RunConfig:
    """Files first, then KEY=VALUE, then flags."""
    config = base or RunConfig()
    pairs: dict[str, Any] = {}
    for text in args.settings:
        if "=" in text:
            key, value = text.split("=", 1)
            pairs[key] = value
        elif Path(text).suffix in (".yaml", ".yml", ".json"):
            config.update(read_config_file(Path(text)), text)
        else:
            raise UsageError(f"{text!r} is neither a .yaml or .json file nor KEY=VALUE")
    config.update(pairs, "command line")
    flags = {name: value for name in OPTIONS if (value := getattr(args, f"option_{name}", None)) is not None}
    config.update(flags, "command line")
    return config


def check_known_flags(unknown: list[str]) -> None:
    """Raises for the first flag that no option knows, with the nearest spelling."""
    for text in unknown:
        if text.startswith("-"):
            canonical_name(text.split("=", 1)[0])
            raise UsageError(f"option {text.split('=', 1)[0]!r} does not belong to this verb")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}")
