"""Hjson, as DeepSpeed reads its configuration: JSON with comments, where commas at line ends and quotes
around keys and single-line strings may be missing. A string without quotes is all that follows on its line, commas,
brackets and comments included. Duplicate keys are an error."""

from __future__ import annotations

import json
import re
from typing import Any

from .errors import UsageError

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SINGLE = re.compile(r"'((?:[^'\\\n]|\\.)*)'")
_NAME = re.compile(r"[^\s,:\[\]{}\"']+")
_LITERAL = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[ \t]*(?:[,\]}#\r\n]|//|/\*|\Z))"
)
_LINE = re.compile(r"[^\n]*")
_WORDS = {"true": True, "false": False, "null": None}


class _Reader:
    def __init__(self, text: str, source: str):
        self.text, self.source, self.at = text, source, 0

    def fail(self, what: str):
        line = self.text.count("\n", 0, self.at) + 1
        raise UsageError(f"{self.source}, line {line}: {what}")

    def skip(self) -> str:
        match = _SPACE.match(self.text, self.at)
        if match:
            self.at = match.end()
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def string(self) -> str | None:
        if (text := self.take(_STRING)) is not None:
            try:
                return json.loads(text)
            except ValueError as error:
                self.fail(f"bad string {text}: {error}")
        text = self.take(_SINGLE)
        return None if text is None else text[1:-1]

    def value(self) -> Any:
        first = self.skip()
        if first == "{":
            return self.members()
        if first == "[":
            return self.items()
        if first in ("", ",", ":", "]", "}"):
            self.fail(f"a value is missing before {first!r}")
        if first in "\"'":
            text = self.string()
            if text is None:
                self.fail("a string has no end on its line")
            return text
        text = self.take(_LITERAL)
        if text is None:
            return (self.take(_LINE) or "").strip()
        if text in _WORDS:
            return _WORDS[text]
        return float(text) if re.search("[.eE]", text) else int(text)

    def separator(self, end: str) -> bool:
        """Steps over what parts two entries; True at the end of the container."""
        before = self.at
        following = self.skip()
        if following == ",":
            self.at += 1
            following = self.skip()
        elif following != end and "\n" not in self.text[before : self.at]:
            self.fail(f"expected ',' or {end!r}, found {following!r}")
        if following == end:
            self.at += 1
            return True
        return False

    def members(self) -> dict[str, Any]:
        self.at += 1
        found: dict[str, Any] = {}
        if self.skip() == "}":
            self.at += 1
            return found
        while True:
            if self.skip() == "":
                self.fail("'}' is missing")
            key = self.string() if self.text[self.at] in "\"'" else self.take(_NAME)
            if key is None or self.skip() != ":":
                self.fail(f"expected KEY: VALUE, found {self.text[self.at : self.at + 20]!r}")
            self.at += 1
            if key in found:
                self.fail(f"{key!r} is given twice")
            found[key] = self.value()
            if self.separator("}"):
                return found

    def items(self) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        if self.skip() == "]":
            self.at += 1
            return found
        while True:
            if self.skip() == "":
                self.fail("']' is missing")
            found.append(self.value())
            if self.separator("]"):
                return found


def read_hjson(text: str, source: str) -> dict[str, Any]:
    """The object in `text`, which may begin with a byte order mark; raises UsageError with source and line."""
    reader = _Reader(text.removeprefix("\ufeff"), source)
    if reader.skip() != "{":
        reader.fail("expected an object that begins with '{'")
    try:
        found = reader.members()
    except RecursionError:
        reader.fail("too many brackets inside of each other")
    if reader.skip() != "":
        reader.fail(f"unexpected {reader.text[reader.at : reader.at + 20]!r} after the end")
    return found
