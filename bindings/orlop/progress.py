"""One progress line: redrawn in place on a terminal, a plain line per step elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """For what prints of a run: where nobody takes it any more (a pipe or a terminal that is gone, a full disk), that is
    said on stderr, nothing more is printed, and the run goes on."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"orlop: what is printed cannot be written ({error}); the run goes on", file=sys.stderr)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_line(text: str) -> None:
    with shown():
        print(text, flush=True)


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
            with shown():
                self._live.start()

    def step(self, record: dict[str, Any]) -> None:
        self._steps_here += 1
        per_step = (time.monotonic() - self._started) / self._steps_here
        line = step_line(record, self._total_steps, per_step * (self._total_steps - record["step"]))
        if self._live is not None:
            from rich.text import Text

            with shown():
                self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif record["step"] % self._log_every == 0 or record["step"] == self._total_steps:
            print_line(line)

    def note(self, text: str) -> None:
        if self._live is not None:
            with shown():
                self._live.console.print(text, markup=False, soft_wrap=True)
        else:
            print_line(text)

    def close(self) -> None:
        if self._live is not None:
            with shown():
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
