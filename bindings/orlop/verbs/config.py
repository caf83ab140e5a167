"""orlop config explain FILE: what every key of a configuration becomes."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "what every key of a configuration becomes (Orlop's own, or DeepSpeed JSON)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["explain"], help="the only action")
    parser.add_argument("file", metavar="FILE", help="YAML or JSON of Orlop, or a DeepSpeed JSON")


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    from ..config import RunConfig, flatten, names_options_only, read_config_file, read_config_text
    from ..deepspeed_config import DeepSpeedConfig, explain
    from ..deepspeed_keys import KEYS, REFUSED_SECTIONS
    from ..hjson_reader import read_hjson

    if path.suffix in (".yaml", ".yml"):
        given = read_config_file(path)
    else:
        values = read_hjson(read_config_text(path), str(path))
        sections = {key.split(".", 1)[0] for key in KEYS} | set(REFUSED_SECTIONS) | {"bfloat16"}
        if not names_options_only(values) and not sections.isdisjoint(values):
            print("\n".join(explain(DeepSpeedConfig(values, str(path)))))
            return 0
        # Of a .json file what finetune reads, which takes no comments.
        given = read_config_file(path) if path.suffix == ".json" else flatten(values, str(path))
    config = RunConfig()
    config.update(given, str(path))
    width = max(map(len, config.as_dict()))
    for name, value in config.as_dict().items():
        print(f"  {name:<{width}}  {value!r}  ({path if name in config.explicit else 'default'})")
    return 0
