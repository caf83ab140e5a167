"""Documents -> token ids and a loss mask, with the tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..config import parse_int
from ..errors import InvalidDataError, UsageError
from ..text_files import read_bytes, read_json_object, read_text
from .chat_template import ChatTemplate
from .documents import Document

_BATCH = 256  # documents that are encoded in one call


def _check_utf8(text: str, source: str) -> str:
    """JSON may spell halves of surrogate pairs, which no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidDataError(
            f"{source}: holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no text"
        ) from None
    return text


@dataclass(frozen=True)
class TokenizedDocument:
    """ids (n) int32 and learn (n) bool: whether the token is to be predicted."""

    ids: np.ndarray
    learn: np.ndarray


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A special token is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class ModelTokenizer:
    """Tokenizer, chat template and special tokens of one model folder.

    Texts get the special tokens that the tokenizer itself adds and one end-of-sequence token; every token
    carries loss. Conversations are rendered by the chat template; tokens of assistant turns carry loss
    unless train_on is "all".
    """

    def __init__(self, model_dir: str, train_on: str = "assistant", chat_template: str | None = None):
        self._dir = Path(model_dir)
        self._train_on = train_on
        self._chat_template_choice = chat_template
        path = self._dir / "tokenizer.json"
        if not path.is_file():
            raise InvalidDataError(
                f"{path}: missing; text needs the tokenizer of the model (or pass .tok files)"
            )
        self.path = path
        self._bytes = read_bytes(path)
        try:
            self._tokenizer = Tokenizer.from_buffer(self._bytes)
        except Exception as error:  # the package raises bare Exception
            raise InvalidDataError(f"{path}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(self._dir / "tokenizer_config.json")
        model = _read_json(self._dir / "config.json")
        vocab_size = model.get("vocab_size", self._tokenizer.get_vocab_size())
        self.vocab_size = self._model_number("vocab_size", vocab_size, 1)
        self.eos_id = self._find_eos(model)

    def _model_number(self, key: str, value: Any, low: int) -> int:
        try:
            return parse_int(value, low)
        except ValueError as error:
            raise InvalidDataError(f"{self._dir / 'config.json'}: {key}: {error}") from None

    def _find_eos(self, model: dict[str, Any]) -> int | None:
        text = _token_text(self._config.get("eos_token"))
        if text is not None:
            return self._tokenizer.token_to_id(text)
        ids = model.get("eos_token_id")
        first = next(iter(ids), None) if isinstance(ids, list) else ids
        return None if first is None else self._model_number("eos_token_id", first, 0)

    @cached_property
    def _template(self) -> ChatTemplate:
        special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(self._config.get(name))) is not None
        }
        return ChatTemplate(self._template_source(), special)

    def _template_source(self) -> str:
        if self._chat_template_choice is not None:
            path = Path(self._chat_template_choice)
            if not path.is_file():
                raise UsageError(f"--chat-template {path}: no such file")
            return read_text(path)
        path = self._dir / "chat_template.jinja"
        if path.is_file():
            return read_text(path)
        source = self._config.get("chat_template")
        if isinstance(source, list):  # named templates
            named = (entry for entry in source if isinstance(entry, dict))
            source = next((t.get("template") for t in named if t.get("name") == "default"), None)
        if not isinstance(source, str):
            raise InvalidDataError(
                f"{self._dir}: data has 'messages', but the model has no chat template; "
                "pass --chat-template FILE"
            )
        return source

    def fingerprint(self) -> str:
        """Changes whenever the same documents may give other tokens."""
        digest = hashlib.sha256(self._bytes)
        digest.update(repr((self._train_on, self.eos_id, self.vocab_size)).encode())
        if self._chat_template_choice is not None:
            digest.update(self._template_source().encode())
        else:
            digest.update(repr(self._config.get("chat_template")).encode())
            template = self._dir / "chat_template.jinja"
            digest.update(template.read_bytes() if template.is_file() else b"")
        return digest.hexdigest()

    def _encode_text(self, encoding: Encoding) -> TokenizedDocument:
        ids = list(encoding.ids)
        if self.eos_id is not None and (not ids or ids[-1] != self.eos_id):
            ids.append(self.eos_id)
        return TokenizedDocument(np.array(ids, np.int32), np.ones(len(ids), bool))

    def _encode_chat(self, document: Document) -> TokenizedDocument:
        try:
            rendered = self._template.render(document.messages)
            spans = rendered.assistant_spans() if self._train_on == "assistant" else None
        except ValueError as error:
            raise InvalidDataError(f"{document.source}: {error}") from None
        text = _check_utf8(rendered.text, document.source)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        learn = np.ones(len(ids), bool)
        if spans is not None:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            learn[:] = False
            for start, end in spans:
                learn |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)
        return TokenizedDocument(ids, learn)

    def encode(self, documents: Iterable[Document]) -> Iterator[TokenizedDocument]:
        """One result per document, in order."""
        documents = iter(documents)
        while batch := list(islice(documents, _BATCH)):
            texts = [_check_utf8(d.text, d.source) for d in batch if d.text is not None]
            encodings = iter(self._tokenizer.encode_batch_fast(texts))
            for document in batch:
                if document.text is not None:
                    result = self._encode_text(next(encodings))
                else:
                    result = self._encode_chat(document)
                self._check_ids(result.ids, document.source)
                yield result

    def _check_ids(self, ids: np.ndarray, source: str) -> None:
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise InvalidDataError(
                f"{source}: token id {int(ids.max())} is beyond the model's vocabulary of "
                f"{self.vocab_size} (config.json: vocab_size); tokenizer and model do not belong together"
            )
