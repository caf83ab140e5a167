"""What tests of the command share."""

from __future__ import annotations

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
