"""Files that somebody else has written: their text, or the JSON object in them; and files of a run that are replaced as
a whole. Errors name the file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InvalidDataError, IoError

_HASH_PIECE = 1 << 20


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidDataError(f"{path}: cannot be read: {error.strerror}") from None


def read_bytes(path: Path) -> bytes:
    with _reading(path):
        return path.read_bytes()


def hash_bytes(path: Path, without: bytes = b"") -> bytes:
    """SHA-256 of the file, after `without` where it begins so. Memory does not grow with the file."""
    digest = hashlib.sha256()
    with _reading(path), open(path, "rb") as file:
        piece = file.read(_HASH_PIECE).removeprefix(without)
        while piece:
            digest.update(piece)
            piece = file.read(_HASH_PIECE)
    return digest.digest()


def decode(data: bytes, path: Path, offset: int = 0) -> str:
    """Without a byte order mark, which is none of the text. `offset`: of the data in the file."""
    try:
        return data.decode("utf-8").removeprefix("" if offset else "\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{path}: not UTF-8 text at byte {offset + error.start}") from None


def read_lines(path: Path) -> Iterator[str]:
    """The text between line feeds. Memory does not grow with the file."""
    offset = 0
    with _reading(path), open(path, "rb") as file:
        for line in file:
            yield decode(line, path, offset)
            offset += len(line)


def read_text(path: Path) -> str:
    return decode(read_bytes(path), path)


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidDataError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidDataError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def replace_text(path: Path, text: str) -> None:
    """The old file or the new one is there at any moment."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise IoError(f"{path}: cannot be written: {error.strerror}") from None
