"""Reads training files: plain text (one document a file), jsonl with {text} or {messages}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidDataError, UsageError
from ..text_files import read_lines, read_text

_TEXT_SUFFIXES = {".txt", ".md", ".rst"}
_JSON_LINES_SUFFIXES = {".jsonl", ".ndjson"}
# Whose text is not what they are about.
_TABLE_SUFFIXES = {".json", ".csv", ".tsv"}
TOKEN_SUFFIX = ".tok"
_ROLES_NEED = ("role", "content")


@dataclass(frozen=True)
class Document:
    """Either a text or a conversation. `source` is FILE or FILE:LINE, for messages."""

    source: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


def list_files(paths: Sequence[str]) -> list[Path]:
    """The files to read, in the order given; folders are searched, in order of names."""
    files: list[Path] = []
    known = _TEXT_SUFFIXES | _JSON_LINES_SUFFIXES | {TOKEN_SUFFIX}
    for text in paths:
        path = Path(text)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in known)
            if not inside:
                raise InvalidDataError(f"{path}: no file ending in {', '.join(sorted(known))} in this folder")
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():  # a device or a pipe: data are read more than once
            raise InvalidDataError(
                f"{path}: holds no text: it is neither a file nor a folder; write the data into a file first"
            )
        else:
            raise UsageError(f"{path}: no such file or folder")
    return files


def _check_messages(messages: Any, source: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise InvalidDataError(f"{source}: 'messages' must be a non-empty list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidDataError(f"{source}: messages[{index}] is not an object")
        for field in _ROLES_NEED:
            if not isinstance(message.get(field), str):
                raise InvalidDataError(f"{source}: messages[{index}].{field} must be a string")
    return tuple(messages)


def _parse_line(line: str, source: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidDataError(f"{source}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise InvalidDataError(f"{source}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidDataError(f"{source}: expected an object, got {type(record).__name__}")
    if "messages" in record:
        return Document(source, messages=_check_messages(record["messages"], source))
    if isinstance(record.get("text"), str):
        return Document(source, text=record["text"])
    found = ", ".join(sorted(record)) or "nothing"
    raise InvalidDataError(f"{source}: needs a string 'text' or a list 'messages', has {found}")


def read_documents(files: Sequence[Path]) -> Iterator[Document]:
    """Documents in the order of files and lines; empty ones are left out."""
    for path in files:
        if path.suffix in _TABLE_SUFFIXES:
            raise InvalidDataError(
                f"{path}: {path.suffix} files are not read; write one object with 'text' or 'messages' per line (.jsonl)"
            )
        if path.suffix not in _JSON_LINES_SUFFIXES:
            text = read_text(path)
            if text.strip():
                yield Document(str(path), text=text)
            continue
        for number, line in enumerate(read_lines(path), start=1):
            if not line.strip():
                continue
            document = _parse_line(line, f"{path}:{number}")
            if document.messages is not None or document.text.strip():
                yield document
