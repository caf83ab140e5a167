"""Small random models and tokenizers that the tests share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

# Before the first library with OpenMP comes in. Teams wait without spinning: with more threads than cores, and two
# runtimes in one process, spinning takes most of the time of a tiny model.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 320


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """A byte-level BPE tokenizer, trained on a few sentences, with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the heavy stores lie in the lowest deck of the ship"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHATML,
        "model_max_length": 128,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def build_model(folder: Path, kind: str, tied: bool, seed: int = 0) -> Path:
    """A random transformers model of a few ten thousand parameters, saved as fp32 with a tokenizer."""
    import torch
    import transformers

    shared = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=128,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **shared,
        )
    else:
        classes = {
            "llama": transformers.LlamaConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
        }
        config = classes[kind](
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            max_position_embeddings=128,
            **shared,
        )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, which would test nothing
                parameter.normal_(std=0.02)
    transformers.utils.logging.disable_progress_bar()  # which a test would find in what its command prints
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def blocks_leave_one_by_one(request, monkeypatch):
    """The gradients of these small blocks leave as those of large ones do, each block's by themselves; on a GPU as it
    comes, which for small ones is together."""
    if request.node.get_closest_marker("gpu") is not None:
        return
    with contextlib.suppress(ImportError):  # without PyTorch there are no doors
        from orlop import gradient_batch

        monkeypatch.setattr(gradient_batch, "_LEAST_BYTES", 1)


@pytest.fixture
def away(monkeypatch):
    """All parameters are treated as those of a device."""
    from host_link import all_away

    with all_away(monkeypatch):
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """model_dir(kind, tied) -> folder, each made once."""
    made: dict[tuple[str, bool], Path] = {}

    def get(kind: str = "llama", tied: bool = True) -> Path:
        if (kind, tied) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{'tied' if tied else 'untied'}")
            made[kind, tied] = build_model(folder, kind, tied)
        return made[kind, tied]

    return get


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A folder with tokenizer files and the vocab_size of a model, but no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    """120 documents of 5 to 60 random tokens."""
    import numpy as np

    import orlop

    rng = np.random.default_rng(7)
    path = tmp_path_factory.mktemp("tokens") / "train.tok"
    writer = orlop.TokenWriter(str(path), VOCAB)
    for _ in range(120):
        # A skewed distribution, so that there is something to learn.
        ids = np.minimum(rng.geometric(0.03, rng.integers(5, 61)), VOCAB) - 1
        writer.append(ids)
    writer.finish()
    return path


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the heavy stores lie in the lowest deck of the ship\n" * 40)
    return path


@pytest.fixture
def own_model(model_dir, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(model_dir("llama"), tmp_path / "model")
