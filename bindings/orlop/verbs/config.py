"""orlop config explain FILE: what every key of a configuration becomes."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError

SUMMARY = "what every key of a configuration becomes (Orlop's own, or DeepSpeed JSON)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["explain"], help="the only action")
    parser.add_argument("file", metavar="FILE", help="YAML or JSON of Orlop, or a DeepSpeed JSON")


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    from ..config import RunConfig, read_config_file
    from ..deepspeed_config import DeepSpeedConfig, explain
    from ..deepspeed_keys import KEYS, REFUSED_SECTIONS
    from ..hjson_reader import read_hjson

    if path.suffix == ".json":
        try:
            values = read_hjson(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        sections = {key.split(".", 1)[0] for key in KEYS} | set(REFUSED_SECTIONS) | {"bfloat16"}
        own = RunConfig().as_dict()
        if any(key in sections and key not in own for key in values):
            print("\n".join(explain(DeepSpeedConfig(values, str(path)))))
            return 0
    config = RunConfig()
    config.update(read_config_file(path), str(path))
    width = max(map(len, config.as_dict()))
    for name, value in config.as_dict().items():
        print(f"  {name:<{width}}  {value!r}  ({path if name in config.explicit else 'default'})")
    return 0
