"""orlop plot: a run's curves as PNG."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "loss, throughput and memory per tier of a run as PNG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="run folder with metrics.jsonl")
    parser.add_argument("--out", metavar="FILE", help="default RUN/plot.png")


def run(args: argparse.Namespace) -> int:
    from ..plots import plot_run

    run_dir = Path(args.run_dir)
    print(plot_run(run_dir, Path(args.out) if args.out else run_dir / "plot.png"))
    return 0
