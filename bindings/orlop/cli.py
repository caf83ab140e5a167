"""The command `orlop VERB ...`. Exit codes: 0 ok, 1 error, 2 usage, 3 would not fit, 4 data or checkpoint
invalid, 130 interrupted after saving."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from .errors import Error, UsageError
from .verbs.options import check_known_flags

# Verb -> module in orlop.verbs.
_VERBS = {
    "finetune": "finetune",
    "eval": "evaluate",
    "plan": "plan",
    "export": "export",
    "inspect": "inspect",
    "bench": "bench",
    "doctor": "doctor",
    "plot": "plot",
    "config": "config",
}
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Errors end like every other usage error: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def _build_parser() -> tuple[_Parser, dict[str, object]]:
    from . import __version__

    parser = _Parser(
        prog="orlop",
        allow_abbrev=False,
        description="Trains models that are larger than the accelerator's memory.",
    )
    parser.add_argument("--version", action="version", version=f"orlop {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    modules: dict[str, object] = {}
    for verb, name in _VERBS.items():
        module = importlib.import_module(f".verbs.{name}", __package__)
        sub = verbs.add_parser(verb, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(sub)
        modules[verb] = module
    return parser, modules


def _dispatch(argv: Sequence[str]) -> int:
    parser, modules = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    check_known_flags(unknown)
    args.argv = list(argv)
    return modules[args.verb].run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; every failure is one message on stderr and an exit code."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except Error as error:
        print(f"orlop: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"orlop: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("orlop: interrupted; nothing was saved", file=sys.stderr)
        return _INTERRUPTED
