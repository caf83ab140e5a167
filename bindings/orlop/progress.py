"""One progress line: redrawn in place on a terminal, a plain line per step elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def step_line(record: dict[str, Any], total_steps: int, remaining_seconds: float) -> str:
    parts = [
        f"step {record['step']}/{total_steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"norm {record['grad_norm']:.2f}",
        f"{record['tok_per_s']:,.0f} tok/s",
        *([f"mfu {100 * record['mfu']:.0f}%"] if record["mfu"] is not None else []),
        f"device {format_bytes(record['tier_bytes']['device'])}",
        f"host {format_bytes(record['tier_bytes']['host'])}",
        *([f"nvme {format_bytes(record['tier_bytes']['nvme'])}"] if record["tier_bytes"]["nvme"] else []),
        f"eta {format_duration(remaining_seconds)}",
    ]
    if record["skipped"]:
        parts.insert(1, f"skipped: {record['nonfinite']} is not finite")
    return " | ".join(parts)


class Progress:
    """Shows steps; text printed through it never tears the line."""

    def __init__(self, total_steps: int, log_every: int):
        self._total_steps = total_steps
        self._log_every = log_every
        self._started = time.monotonic()
        self._steps_here = 0
        self._live = None
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), auto_refresh=False)
            self._live.start()

    def step(self, record: dict[str, Any]) -> None:
        self._steps_here += 1
        per_step = (time.monotonic() - self._started) / self._steps_here
        line = step_line(record, self._total_steps, per_step * (self._total_steps - record["step"]))
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif record["step"] % self._log_every == 0 or record["step"] == self._total_steps:
            print(line, flush=True)

    def note(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class NoProgress:
    """Of the ranks but the first."""

    def step(self, record: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass
