"""What tests of the command share."""

from __future__ import annotations

import json

from orlop.cli import main


def run(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as exit_request:  # argparse, for --help and --version
        code = exit_request.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def finetune(capsys, model, data, out, *extra):
    return run(
        capsys,
        "finetune",
        "--model",
        model,
        "--data",
        data,
        "--output",
        out,
        "--device",
        "host",
        "--seq-len",
        16,
        "--steps",
        2,
        "--save-every",
        0,
        *extra,
    )


def swapping(tmp_path):
    """Options that have some states and weights on a drive."""
    return ("--nvme", tmp_path / "swap", "--nvme-optimizer-blocks", 3, "--nvme-param-blocks", 2)


def losses(run_dir):
    """By step, of the run's log."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}
