"""Renders a conversation with a model's Jinja chat template and finds what the assistant said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters: never part of text, so they can frame a {% generation %} body.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: the assistant's words, as chat templates mark them."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_frame"), [], [], body).set_lineno(line)

    @staticmethod
    def _frame(caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _explain(error: Exception) -> str:
    """A template is a program: beside Jinja's own errors it may raise any."""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return f"chat template: {kind}{error}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class RenderedChat:
    """The text of a conversation; spans are found only when asked for, since not every template can."""

    def __init__(self, template: ChatTemplate, messages: Sequence[dict[str, Any]]):
        self._template = template
        self._messages = messages
        marked = template.render_marked(messages)
        self._marked_spans: list[tuple[int, int]] = []
        parts: list[str] = []
        length = start = 0
        for piece in marked.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
            if piece.startswith(_CLOSE):
                self._marked_spans.append((start, length))
                piece = piece[1:]
            start = length
            parts.append(piece)
            length += len(piece)
        self.text = "".join(parts)

    def assistant_spans(self) -> list[tuple[int, int]]:
        """Character ranges [start, end) of the assistant's words, each with its end-of-turn mark.

        From {% generation %} tags where the template has them; else by rendering ever longer prefixes of
        the conversation, which must be prefixes of the whole text.
        """
        if self._template.marks_generation:
            return self._marked_spans
        spans = []
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render_text(self._messages[:index], add_generation_prompt=True)
            through = self._template.render_text(self._messages[: index + 1])
            if not self.text.startswith(through) or not through.startswith(before):
                raise ValueError(
                    f"the chat template changes earlier turns (at messages[{index}]), so the assistant's "
                    "tokens cannot be found; use --train-on all or a template with {% generation %} tags"
                )
            spans.append((len(before), len(through.rstrip())))
        return spans


class ChatTemplate:
    """A compiled template. `special_tokens`: bos_token and so on, as the template may use them."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self.marks_generation = "endgeneration" in source
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise ValueError(_explain(error)) from None

    def render_marked(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:
            raise ValueError(_explain(error)) from None

    def render_text(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        marked = self.render_marked(messages, add_generation_prompt)
        return marked.replace(_OPEN, "").replace(_CLOSE, "")

    def render(self, messages: Sequence[dict[str, Any]]) -> RenderedChat:
        for index, message in enumerate(messages):
            if _OPEN in message["content"] or _CLOSE in message["content"]:
                raise ValueError(f"messages[{index}].content holds a Unicode noncharacter (U+FDD0, U+FDD1)")
        return RenderedChat(self, messages)
