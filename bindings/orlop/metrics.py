"""metrics.jsonl: one JSON object per step or evaluation, written whatever the screen shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .text_files import read_bytes, replace_text

FILE_NAME = "metrics.jsonl"


def read_metrics(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Records in order; lines that are none, as an end of the machine may leave, are left out."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return
    for line in read_bytes(path).splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record


def first_eval_loss(run_dir: Path) -> float | None:
    """The held-out loss before the first step, where the run has one."""
    return next((r["eval_loss"] for r in read_metrics(run_dir) if r["step"] == 0 and "eval_loss" in r), None)


class MetricsLog:
    """Appends records; a resumed run first drops what came after its checkpoint. A record that cannot be written, as on a
    full disk, is left out as a whole, and `note` is told of the first: a log does not end the run that it tells of."""

    def __init__(self, run_dir: Path, resumed_step: int, note: Callable[[str], None]):
        self._path = run_dir / FILE_NAME
        kept = [r for r in read_metrics(run_dir) if resumed_step and r["step"] <= resumed_step]
        replace_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (a line at a time, until close)
        self._note = note
        self._has_noted = False

    def write(self, record: dict[str, Any]) -> None:
        rest = (json.dumps(record) + "\n").encode()
        begin = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), begin)
            if not self._has_noted:
                self._note(
                    f"{self._path}: step {record['step']} is left out: {error.strerror}; the run goes on"
                )
            self._has_noted = True

    def close(self) -> None:
        self._file.close()


class NoMetrics:
    """Of the ranks but the first."""

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class StepRecorder:
    """Turns step results and the engine's counters into records."""

    def __init__(self, engine: Any, tokens_before: int):
        self._engine = engine
        self._tokens = tokens_before
        self._last = engine.stats()
        plan = engine.plan
        # Forward once and backward twice; recomputation is not counted.
        self._flops_per_token = 3.0 * plan.forward_flops / plan.tokens_per_step
        self._peak_flop_per_s = plan.matmul_flop_per_s

    @property
    def tokens(self) -> int:
        return self._tokens

    def record(self, result: Any) -> dict[str, Any]:
        stats = self._engine.stats()
        last, self._last = self._last, stats
        self._tokens += result.tokens
        rate = result.tokens / result.seconds if result.seconds > 0 else 0.0
        return {
            "step": result.step,
            "tokens": self._tokens,
            "loss": result.loss,
            "lr": result.learning_rate,
            "grad_norm": result.grad_norm,
            "clip": result.clip,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            **({"nonfinite": result.nonfinite} if result.skipped else {}),
            "labelled_tokens": result.labelled_tokens,
            "tok_per_s": rate,
            "model_flop_per_s": self._flops_per_token * rate,
            # Of the rate of large matmuls that `orlop doctor --measure` found on this machine.
            "mfu": self._flops_per_token * rate / self._peak_flop_per_s if self._peak_flop_per_s else None,
            "ms": {
                "step": 1e3 * result.seconds,
                "optimizer": 1e3 * (stats.optimizer_seconds - last.optimizer_seconds),
            },
            "stall_ms": {
                "optimizer": 1e3 * (stats.optimizer_exposed_seconds - last.optimizer_exposed_seconds),
                "save": 1e3 * (stats.save_held_seconds - last.save_held_seconds),
                "nvme": 1e3 * (stats.swap_wait_seconds - last.swap_wait_seconds),
            },
            "link_bytes": {
                "upload": stats.uploaded_bytes - last.uploaded_bytes,
                "offload": stats.offloaded_bytes - last.offloaded_bytes,
                "nvme_read": stats.nvme_read_bytes - last.nvme_read_bytes,
                "nvme_write": stats.nvme_written_bytes - last.nvme_written_bytes,
            },
            # Of the run and of the day; an update that still runs counts in the next record.
            "nvme_written": stats.nvme_written_bytes,
            "nvme_written_today": stats.nvme_written_today_bytes,
            "tier_bytes": {
                "device": stats.device_peak_bytes,
                "host": stats.host_bytes,
                "nvme": self._engine.plan.nvme_bytes,
            },
        }
