"""Draws a trace that bench_step --trace or Engine.write_trace wrote: one lane per queue and thread.

plot_trace.py TRACE.json[.gz] OUT.png [--seconds BEGIN END]
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_lanes(path: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Spans (begin, duration in seconds, name) of every lane."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    lanes: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            lanes[names[event["tid"]]].append((event["ts"] / 1e6, event["dur"] / 1e6, event["name"]))
    return {name: spans for name, spans in lanes.items() if spans}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("BEGIN", "END"))
    args = parser.parse_args()
    lanes = read_lanes(args.trace)
    figure, axes = plt.subplots(figsize=(11, 0.55 * len(lanes) + 1.2))
    for row, spans in enumerate(reversed(lanes.values())):
        axes.broken_barh([(begin, length) for begin, length, _ in spans], (row - 0.38, 0.76), linewidth=0)
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_xlabel("seconds")
    if args.seconds:
        axes.set_xlim(*args.seconds)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
