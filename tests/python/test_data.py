"""Text and conversations -> token ids and loss masks, against the transformers tokenizer."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import orlop
from conftest import VOCAB, write_tokenizer
from orlop.data.documents import Document, list_files, read_documents
from orlop.data.prepare import prepare
from orlop.data.tokenize import ModelTokenizer
from orlop.errors import InvalidDataError, UsageError
from orlop.text_files import hash_bytes

CHAT = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where do  heavy stores lie?"},
    {"role": "assistant", "content": "In the lowest deck: 12 äß 猫."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "The ship lies steady."},
)
GENERATION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)


def encode_one(tokenizer: ModelTokenizer, document: Document):
    (result,) = tokenizer.encode([document])
    return result


def learned_text(tokenizer_dir, result) -> list[str]:
    """The runs of tokens that carry loss, decoded."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], result.learn.astype(int), [0]))))
    return [
        tokenizer.decode(result.ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)
    ]


@pytest.mark.parametrize(
    "text", ["heavy stores", "  two  spaces\n\n12 345", "äöü 猫\t€", "<|im_end|> inside"]
)
def test_text_ids_equal_transformers_plus_end_of_text(tokenizer_dir, text):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    result = encode_one(ModelTokenizer(str(tokenizer_dir)), Document("x", text=text))
    assert result.ids.tolist() == [*reference(text).input_ids, reference.eos_token_id]
    assert result.learn.all()


def test_chat_ids_equal_transformers(tokenizer_dir):
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    expected = reference.apply_chat_template(list(CHAT), return_dict=True)["input_ids"]
    result = encode_one(ModelTokenizer(str(tokenizer_dir)), Document("x", messages=CHAT))
    assert result.ids.tolist() == expected


def test_loss_falls_on_assistant_turns_with_their_end_mark(tokenizer_dir):
    result = encode_one(ModelTokenizer(str(tokenizer_dir)), Document("x", messages=CHAT))
    assert learned_text(tokenizer_dir, result) == [
        "In the lowest deck: 12 äß 猫.<|im_end|>",
        "The ship lies steady.<|im_end|>",
    ]


def test_train_on_all_learns_every_token(tokenizer_dir):
    result = encode_one(ModelTokenizer(str(tokenizer_dir), train_on="all"), Document("x", messages=CHAT))
    assert result.learn.all()


def test_generation_tags_mark_the_same_tokens_as_transformers(tokenizer_dir, tmp_path):
    import transformers

    template = tmp_path / "template.jinja"
    template.write_text(GENERATION_TEMPLATE)
    reference = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    expected = reference.apply_chat_template(
        list(CHAT), chat_template=GENERATION_TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    result = encode_one(
        ModelTokenizer(str(tokenizer_dir), chat_template=str(template)), Document("x", messages=CHAT)
    )
    assert result.ids.tolist() == expected["input_ids"]
    assert result.learn.astype(int).tolist() == expected["assistant_masks"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        # A leading blank can share a token with the line end before it, which is not the assistant's.
        st.text(
            st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0\ufdd1"), max_size=30
        ).map(str.strip),
        min_size=2,
        max_size=6,
    )
)
def test_any_conversation_learns_exactly_what_the_assistant_says(tokenizer_dir, turns):
    messages = tuple(
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)
    )
    result = encode_one(ModelTokenizer(str(tokenizer_dir)), Document("x", messages=messages))
    said = [text + "<|im_end|>" for text in turns[1::2]]
    assert learned_text(tokenizer_dir, result) == said


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_remedy(tokenizer_dir, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages|length }}: {% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer = ModelTokenizer(str(tokenizer_dir), chat_template=str(template))
    with pytest.raises(InvalidDataError, match="--train-on all"):
        encode_one(tokenizer, Document("chat.jsonl:3", messages=CHAT))


def test_template_errors_name_the_line(tokenizer_dir, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    tokenizer = ModelTokenizer(str(tokenizer_dir), chat_template=str(template))
    with pytest.raises(InvalidDataError, match=r"chat.jsonl:3: .*roles must alternate"):
        encode_one(tokenizer, Document("chat.jsonl:3", messages=CHAT))


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0] + 1 }}", "TypeError: unsupported operand"),
        ("{{ messages.none.at_all }}", "has no attribute 'none'"),
        ("{% if %}", "chat template: Expected an expression"),
    ],
)
def test_any_error_of_a_template_names_the_line(tokenizer_dir, tmp_path, source, part):
    template = tmp_path / "template.jinja"
    template.write_text(source)
    tokenizer = ModelTokenizer(str(tokenizer_dir), chat_template=str(template))
    with pytest.raises(InvalidDataError, match=part) as caught:
        encode_one(tokenizer, Document("chat.jsonl:3", messages=CHAT))
    assert str(caught.value).startswith("chat.jsonl:3: chat template: ")


@pytest.mark.parametrize("own", [False, True])
def test_a_template_that_is_no_text_is_named(tokenizer_dir, tmp_path, own):
    model = shutil.copytree(tokenizer_dir, tmp_path / "model")
    template = (model if own else tmp_path) / "chat_template.jinja"
    template.write_bytes(b"{{ \xff }}")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    choice = None if own else str(template)
    with pytest.raises(InvalidDataError, match=r"chat_template.jinja: not UTF-8 text at byte 3"):
        prepare([str(tmp_path / "chat.jsonl")], tmp_path / "cache", str(model), "assistant", choice)


@pytest.mark.parametrize("field", ["vocab_size", "eos_token_id"])
@pytest.mark.parametrize("value", ["abc", -2, 1.5, {}, 2**40, True])
def test_a_number_of_the_model_that_is_none_is_named(tokenizer_dir, tmp_path, field, value):
    model = shutil.copytree(tokenizer_dir, tmp_path / "model")
    (model / "tokenizer_config.json").unlink()  # whose end of text comes first
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB, field: value}))
    with pytest.raises(InvalidDataError, match=rf"config.json: {field}: "):
        ModelTokenizer(str(model))


def test_a_model_needs_a_vocabulary_but_no_end_of_text(tokenizer_dir, tmp_path):
    model = shutil.copytree(tokenizer_dir, tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    for ids, expected in ((None, None), ([], None), ([3, 4], 3), (3, 3)):
        (model / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert ModelTokenizer(str(model)).eos_id == expected
    (model / "config.json").write_text('{"vocab_size": null}')
    with pytest.raises(InvalidDataError, match="vocab_size: None is not a whole number"):
        ModelTokenizer(str(model))


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"txt": "a"}', "has txt"),
        ('{"text": 3}', "needs a string"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": ["a"]}', r"messages\[0\] is not an object"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, part):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(InvalidDataError, match=part) as caught:
        list(read_documents([path]))
    assert "data.jsonl:2" in str(caught.value)


def test_bytes_that_are_no_text_name_the_position(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(InvalidDataError, match="at byte 3"):
        list(read_documents([path]))


def test_a_byte_order_mark_is_none_of_the_text(tokenizer_dir, tmp_path):
    """As editors of Windows begin a file; with it or without, the data are the same."""
    keys = []
    for name, content in (
        ("d.txt", b"heavy stores\r\n"),
        ("d.jsonl", b'{"text": "heavy"}\r\n\r\n{"text": "a"}'),
    ):
        path = tmp_path / name
        tokens = []
        for start in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(start + content)
            tokens.append([document.text for document in read_documents([path])])
            keys.append(prepare([str(path)], tmp_path / "cache", str(tokenizer_dir), "all", None).key)
        assert tokens[0] == tokens[1]
    assert (keys[0], keys[2]) == (keys[1], keys[3])


def test_lines_are_read_and_hashed_one_at_a_time(tmp_path):
    path = tmp_path / "d.jsonl"
    line = json.dumps({"text": "heavy stores " * 3000}) + "\n"
    path.write_text(line * 1000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_documents([path])) == 1000
        hash_bytes(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    path.write_bytes(line.encode() + b'{"text": "\xff"}')
    with pytest.raises(InvalidDataError, match=f"not UTF-8 text at byte {len(line) + 10}"):
        list(read_documents([path]))


def test_folders_are_searched_in_order_and_missing_files_refused(tmp_path):
    for name in ("b.txt", "a.jsonl", "ignored.png"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in list_files([str(tmp_path)])] == ["a.jsonl", "b.txt"]
    with pytest.raises(UsageError, match="no such file"):
        list_files([str(tmp_path / "c.txt")])
    with pytest.raises(InvalidDataError, match="/dev/null: holds no text"):
        list_files(["/dev/null"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidDataError, match="no file ending in"):
        list_files([str(empty)])


def prepare_in(tmp_path, tokenizer_dir, *files):
    return prepare([str(f) for f in files], tmp_path / "cache", str(tokenizer_dir), "assistant", None)


def test_a_prepared_file_holds_the_documents_and_is_made_once(tokenizer_dir, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("heavy stores lie low")
    first = prepare_in(tmp_path, tokenizer_dir, text)
    stamp, whole = first.path.stat().st_mtime_ns, first.path.read_bytes()
    assert prepare_in(tmp_path, tokenizer_dir, text).path.stat().st_mtime_ns == stamp
    ids = encode_one(ModelTokenizer(str(tokenizer_dir)), Document("x", text="heavy stores lie low")).ids
    batch = orlop.BatchConfig(sequence_length=len(ids))
    loaded = orlop.DataLoader(str(first.path), batch, 0, False).next()
    assert loaded.tokens.tolist() == ids.tolist()
    assert loaded.labels.tolist() == [*ids[1:].tolist(), orlop.IGNORED_LABEL]

    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50], b""):
        first.path.write_bytes(damaged)
        assert prepare_in(tmp_path, tokenizer_dir, text).path.read_bytes() == whole
    text.write_text("other words")
    assert prepare_in(tmp_path, tokenizer_dir, text).key != first.key


def test_rows_are_packed_and_documents_kept_apart(tmp_path):
    path = tmp_path / "a.tok"
    writer = orlop.TokenWriter(str(path), 100, loss_mask=True)
    writer.append([1, 2, 3], [False, True, False])
    writer.append(np.array([4, 5, 6, 7], np.uint16), np.array([True] * 4))
    writer.finish()
    batch = orlop.DataLoader(str(path), orlop.BatchConfig(sequence_length=8), 0, False).next()
    ignored = orlop.IGNORED_LABEL
    assert batch.tokens.tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert batch.labels.tolist() == [2, ignored, ignored, 5, 6, 7, ignored, ignored]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8]
    summary = orlop.describe_token_file(str(path))
    assert (summary.tokens, summary.documents, summary.has_loss_mask) == (7, 2, True)
    assert summary.hash_matches


@pytest.mark.parametrize("content", ["", " \n", '{"messages": [{"role": "user", "content": "only asks"}]}'])
def test_data_without_anything_to_learn_is_refused(tokenizer_dir, tmp_path, content):
    path = tmp_path / ("a.jsonl" if content.startswith("{") else "a.txt")
    path.write_text(content)
    with pytest.raises(InvalidDataError, match="no token to learn from"):
        prepare_in(tmp_path, tokenizer_dir, path)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB - 50}))
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(InvalidDataError, match=f"vocabulary of {VOCAB - 50}"):
        encode_one(tokenizer, Document("x", text="the heavy stores lie in the lowest deck of the ship"))


def test_ids_that_do_not_fit_are_refused_not_cut():
    with pytest.raises(UsageError, match=r"tokens\[1\] = 4294967296"):
        orlop.MicroBatch(np.array([1, 2**32]), np.array([2, 3]))
    with pytest.raises(UsageError, match="expected integers"):
        orlop.MicroBatch(np.array([1.5]), np.array([2]))


def test_micro_batches_take_tensors_and_arrays_of_any_integer_type():
    torch = pytest.importorskip("torch")
    tokens = torch.tensor([[1, 2], [3, 4]])
    batch = orlop.MicroBatch(tokens, np.array([2, 3, 4, -100], np.int16), [0, 2, 4])
    assert batch.tokens.tolist() == [1, 2, 3, 4]
    assert batch.labels.tolist() == [2, 3, 4, -100]
    batch.labels[0] = -100
    assert batch.labels.tolist()[0] == -100
