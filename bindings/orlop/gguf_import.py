"""Llama-family GGUF file -> Hugging Face folder (config, bf16 safetensors, tokenizer).

Only the part of GGUF that the demo's model uses: architecture `llama`, byte-level BPE vocabulary.
Needs the package `gguf` for reading and dequantizing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import InvalidDataError

# GGUF name -> Hugging Face name; `{}` is the layer.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# Splits ahead of the byte-level regex, by the GGUF name of the pre-tokenizer.
_PRE_TOKENIZERS = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
}


def hf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, e.g. blk.3.attn_q.weight."""
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise InvalidDataError(f"GGUF tensor {name}: not part of a Llama model")


def rotate_half_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order of llama.cpp (pairs side by side): back to halves, as rotate_half expects."""
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 as uint16, round to nearest even; values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _read_metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _model_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    architecture = meta["general.architecture"]
    if architecture != "llama":
        raise InvalidDataError(f"GGUF architecture {architecture!r}: only 'llama' can be converted")
    hidden = meta["llama.embedding_length"]
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    kind = meta["tokenizer.ggml.pre"]
    if meta["tokenizer.ggml.model"] != "gpt2" or kind not in _PRE_TOKENIZERS:
        raise InvalidDataError(
            f"GGUF tokenizer {meta['tokenizer.ggml.model']!r} with pre-tokenizer {kind!r}: only "
            f"byte-level BPE with one of {sorted(_PRE_TOKENIZERS)} can be converted"
        )
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_PRE_TOKENIZERS[kind], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_bf16_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file from bf16 bit patterns, which numpy has no dtype for."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(bits.shape),
            "data_offsets": [offset, offset + bits.nbytes],
        }
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for bits in tensors.values():
            file.write(bits.data)


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (bf16) and the tokenizer files."""
    import gguf  # only here: the package is needed for nothing else

    reader = gguf.GGUFReader(gguf_file)
    meta = _read_metadata(reader)
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = rotate_half_rows(values, meta[heads[part]])
        tensors[hf_tensor_name(tensor.name)] = bf16_bits(values)
    out_dir.mkdir(parents=True, exist_ok=True)
    config = _model_config(meta, tied="lm_head.weight" not in tensors)
    _write_json(out_dir / "config.json", config)
    _write_json(
        out_dir / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _build_tokenizer(meta).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(meta))
    _write_bf16_safetensors(out_dir / "model.safetensors", tensors)
