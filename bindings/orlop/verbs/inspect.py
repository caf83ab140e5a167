"""orlop inspect: what is in a model folder, checkpoint, safetensors or token file."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidDataError, UsageError
from ..progress import format_bytes
from ..text_files import read_json_object

SUMMARY = "list tensors or tokens of a model, checkpoint or data file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder, .safetensors, .safetensors.index.json or .tok")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--checksum", action="store_true", help="add the SHA-256 of every tensor's bytes")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file, checked against the file's length, and where data starts."""
    length = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if length < 8 or header_bytes > length - 8:
            raise InvalidDataError(
                f"{path}: header of {header_bytes} bytes announced, the file has {length} bytes: truncated "
                "or not safetensors"
            )
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise InvalidDataError(f"{path}: header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InvalidDataError(f"{path}: header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + header_bytes


def _file_tensors(path: Path, checksum: bool) -> Iterator[dict[str, Any]]:
    header, data_start = _read_header(path)
    length = path.stat().st_size
    with open(path, "rb") as file:
        for name, entry in header.items():
            try:
                begin, end = (int(x) for x in entry["data_offsets"])
                shape, dtype = [int(x) for x in entry["shape"]], str(entry["dtype"])
            except (KeyError, TypeError, ValueError):
                raise InvalidDataError(
                    f"{path}: tensor {name}: dtype, shape or data_offsets is wrong"
                ) from None
            if not 0 <= begin <= end <= length - data_start:
                raise InvalidDataError(
                    f"{path}: tensor {name}: bytes {begin}..{end} lie outside the {length - data_start} bytes of data"
                )
            tensor = {"name": name, "dtype": dtype, "shape": shape, "bytes": end - begin, "file": path.name}
            if checksum:
                file.seek(data_start + begin)
                tensor["sha256"] = _hash(file, end - begin)
            yield tensor


def _hash(file: Any, count: int) -> str:
    digest = hashlib.sha256()
    while count > 0:
        block = file.read(min(count, 1 << 22))
        if not block:
            raise InvalidDataError(f"{file.name}: ended {count} bytes early")
        digest.update(block)
        count -= len(block)
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.name.endswith(".safetensors.index.json"):
        names = read_json_object(path).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise InvalidDataError(f"{path}: 'weight_map' must be an object of tensor names and file names")
        return sorted({path.parent / name for name in names.values()})
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.safetensors"))


def _describe_weights(path: Path, checksum: bool) -> dict[str, Any]:
    files = _weight_files(path)
    if not files:
        raise InvalidDataError(f"{path}: no .safetensors file in this folder")
    tensors = [tensor for file in files for tensor in _file_tensors(file, checksum)]
    result: dict[str, Any] = {
        "kind": "weights",
        "files": [str(file) for file in files],
        "total_bytes": sum(t["bytes"] for t in tensors),
        "tensors": tensors,
    }
    manifest = path / "manifest.json"
    if manifest.is_file():
        result |= {"kind": "checkpoint", "manifest": read_json_object(manifest)}
    return result


def _describe_tokens(path: Path) -> dict[str, Any]:
    from .. import _orlop

    summary = _orlop.describe_token_file(str(path))
    fields = ("tokens", "documents", "vocab_size", "bits_per_token", "has_loss_mask", "hash_matches")
    return {"kind": "tokens", "files": [str(path)], **{name: getattr(summary, name) for name in fields}}


def _print_text(info: dict[str, Any]) -> None:
    if info["kind"] == "tokens":
        for key, value in info.items():
            print(f"{key}: {value}")
        return
    width = max((len(t["name"]) for t in info["tensors"]), default=0)
    for tensor in info["tensors"]:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        line = (
            f"{tensor['name']:<{width}}  {tensor['dtype']:<5} {shape:>14}  {format_bytes(tensor['bytes']):>9}"
        )
        print(line + (f"  {tensor['sha256']}" if "sha256" in tensor else ""))
    print(
        f"{len(info['tensors'])} tensors, {format_bytes(info['total_bytes'])} in {len(info['files'])} files"
    )
    if "manifest" in info:
        print(f"checkpoint of step {info['manifest'].get('step')}")


def run(args: argparse.Namespace) -> int:
    path = Path(args.path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    info = _describe_tokens(path) if path.suffix == ".tok" else _describe_weights(path, args.checksum)
    if args.json:
        print(json.dumps(info, indent=2))
    else:
        _print_text(info)
    return 0
