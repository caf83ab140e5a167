"""DeepSpeed's monitors: values by tag over the number of samples."""

from __future__ import annotations

import csv
from pathlib import Path

from .. import errors


class CsvMonitor:
    """OUTPUT/JOB/TAG.csv with a line per event, as DeepSpeed's csv_monitor."""

    def __init__(self, output_path: str, job_name: str):
        self.folder = Path(output_path or "csv_monitor") / job_name
        self.folder.mkdir(parents=True, exist_ok=True)

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        for tag, value, samples in events:
            path = self.folder / f"{tag.replace('/', '_')}.csv"
            new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(["step", tag.rsplit("/", 1)[-1]])
                writer.writerow([samples, value])


class TensorBoardMonitor:
    def __init__(self, output_path: str, job_name: str):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise errors.UsageError(
                f"tensorboard.enabled needs tensorboard ({error}): pip install tensorboard"
            ) from None
        self.writer = SummaryWriter(str(Path(output_path or "runs") / job_name))

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        for tag, value, samples in events:
            self.writer.add_scalar(tag, value, samples)
        self.writer.flush()


def make_monitors(config) -> list:
    """Those that the configuration enables."""
    kinds = {"csv_monitor": CsvMonitor, "tensorboard": TensorBoardMonitor}
    return [
        kind(config[f"{name}.output_path"], config[f"{name}.job_name"])
        for name, kind in kinds.items()
        if config[f"{name}.enabled"]
    ]
