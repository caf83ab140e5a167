"""Training files -> one token file in the run folder, made once per content."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import _orlop
from ..errors import InvalidDataError, UsageError
from ..text_files import hash_bytes
from .documents import TOKEN_SUFFIX, list_files, read_documents
from .tokenize import ModelTokenizer

_FORMAT = b"orlop-data-1"  # changes when the same files would give another token file


@dataclass(frozen=True)
class PreparedData:
    """path: the token file. key: changes with files, tokenizer and template."""

    path: Path
    key: str
    tokens: int
    documents: int


def _content_key(files: Sequence[Path], tokenizer: ModelTokenizer) -> str:
    digest = hashlib.sha256(_FORMAT)
    digest.update(tokenizer.fingerprint().encode())
    for path in files:
        digest.update(path.suffix.encode() + b"\0" + hash_bytes(path, without=codecs.BOM_UTF8))
    return digest.hexdigest()[:16]


def _write(files: Sequence[Path], tokenizer: ModelTokenizer, path: Path) -> None:
    writer = _orlop.TokenWriter(
        str(path), tokenizer.vocab_size, loss_mask=True, tokenizer_file=str(tokenizer.path)
    )
    learned = 0
    for document in tokenizer.encode(read_documents(files)):
        writer.append(document.ids, document.learn)
        learned += int(document.learn.sum())
    if learned == 0:
        names = ", ".join(str(file) for file in files[:3]) + (" ..." if len(files) > 3 else "")
        raise InvalidDataError(
            f"{names}: no token to learn from; the files hold no text, or no assistant turn"
        )
    writer.finish()


def _describe(path: Path, key: str) -> PreparedData:
    summary = _orlop.describe_token_file(str(path))
    if not summary.hash_matches:
        raise InvalidDataError(f"{path}: its contents do not match the hash in its header")
    return PreparedData(path, key, summary.tokens, summary.documents)


def prepare(
    paths: Sequence[str], cache_dir: Path, model_dir: str, train_on: str, chat_template: str | None
) -> PreparedData:
    """The token file for these files. A single .tok file is taken as it is."""
    files = list_files(paths)
    token_files = [path for path in files if path.suffix == TOKEN_SUFFIX]
    if token_files:
        if len(files) > 1:
            raise UsageError(
                f"{token_files[0]}: a token file must be the only data file, {len(files)} were given"
            )
        return _describe(files[0], hash_bytes(files[0]).hex()[:16])
    tokenizer = ModelTokenizer(model_dir, train_on, chat_template)
    key = _content_key(files, tokenizer)
    path = cache_dir / f"{key}{TOKEN_SUFFIX}"
    if path.is_file():
        with contextlib.suppress(InvalidDataError):  # a damaged one is made again
            return _describe(path, key)
    cache_dir.mkdir(parents=True, exist_ok=True)
    _write(files, tokenizer, path)
    return _describe(path, key)
