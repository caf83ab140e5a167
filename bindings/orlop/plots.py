"""Draws metrics.jsonl: loss, throughput, memory per tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import InvalidDataError, UsageError
from .metrics import FILE_NAME, read_metrics

_BLUE, _ORANGE, _GREEN, _GREY = "#3b6ea5", "#d1752f", "#4f8a5b", "#9a9a9a"


def _plot_loss(axes: Any, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color=_BLUE, lw=1.2, label="training")
    if evals:
        axes.plot(
            [r["step"] for r in evals],
            [r["eval_loss"] for r in evals],
            "o-",
            color=_ORANGE,
            ms=5,
            lw=1.2,
            label="held out",
        )
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)


def _plot_throughput(axes: Any, steps: list[dict[str, Any]]) -> None:
    axes.plot([r["step"] for r in steps], [r["tok_per_s"] for r in steps], color=_GREEN, lw=1.2)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)


def _plot_memory(axes: Any, steps: list[dict[str, Any]]) -> None:
    x = [r["step"] for r in steps]
    for tier, color in (("device", _BLUE), ("host", _GREY)):
        axes.plot(x, [r["tier_bytes"][tier] / 1e6 for r in steps], color=color, lw=1.6, label=tier)
    axes.set_ylabel("memory (MB)")
    axes.set_yscale("log")
    axes.legend(frameon=False)


def plot_run(run_dir: Path, out: Path) -> Path:
    """Writes a PNG of three panels over the steps. Returns its path."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install matplotlib") from None

    records = list(read_metrics(run_dir))
    steps = [r for r in records if "loss" in r]
    evals = [r for r in records if "eval_loss" in r]
    if not steps:
        raise InvalidDataError(f"{run_dir / FILE_NAME}: holds no step")
    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True)
    _plot_loss(panels[0], steps, evals)
    _plot_throughput(panels[1], steps)
    _plot_memory(panels[2], steps)
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    figure.suptitle(run_dir.resolve().name)
    figure.savefig(out, dpi=120)
    return out
