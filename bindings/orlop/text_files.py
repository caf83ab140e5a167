"""Files that somebody else has written: their text, or the JSON object in them; and files of a run that are replaced as
a whole. Errors name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import InvalidDataError, IoError


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidDataError(f"{path}: cannot be read: {error.strerror}") from None


def decode(data: bytes, path: Path) -> str:
    """Without a byte order mark, which is none of the text."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{path}: not UTF-8 text at byte {error.start}") from None


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
