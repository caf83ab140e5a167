"""Writes tiny random models and what transformers computes with them, in fp32 on the CPU.

    python make_golden.py OUT

For every case OUT/<case> becomes a Hugging Face folder with reference.safetensors beside it:
    <batch>.tokens, .labels, .positions, .cu_seqlens   int32; labels are shifted, -100 is ignored
    <batch>.row_loss                                   (rows) -log p(label), 0 where ignored
    <batch>.grad.<parameter>                           of the mean loss over the labelled rows
for the batches `plain` (two sequences of equal length) and `packed` (documents of unequal length that do
not see each other), and rope.cos, rope.sin (positions, head_dim / 2) where the model rotates.
Exits with 77 when torch or transformers is missing.
"""

import pathlib
import shutil
import sys

OUT = pathlib.Path(sys.argv[1])
shutil.rmtree(OUT, ignore_errors=True)

try:
    import torch
    import transformers
    from safetensors.torch import save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

VOCAB = 131
IGNORED = -100
BATCHES = {"plain": [24, 24], "packed": [29, 1, 18]}

LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(
    vocab_size=VOCAB,
    n_positions=40,
    n_embd=48,
    n_layer=2,
    n_head=4,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def llama(**changes):
    return transformers.LlamaConfig(**(LLAMA | changes))


CASES = {
    "llama": llama(tie_word_embeddings=False),
    "llama_tied": llama(tie_word_embeddings=True),
    "llama_mha": llama(num_key_value_heads=6),
    "llama_bias": llama(attention_bias=True, mlp_bias=True),
    "llama_head_dim": llama(head_dim=16),
    "llama3_rope": llama(head_dim=16, rope_parameters=LLAMA3_ROPE),
    "linear_rope": llama(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=40),
    "qwen2": transformers.Qwen2Config(**LLAMA, tie_word_embeddings=False),
    "qwen2_tied": transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": transformers.Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(**GPT2),
    "gpt2_untied": transformers.GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=80
    ),
}


def make_model(config):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases must not be one and zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def make_batch(lengths):
    """Tokens, labels shifted inside each document, positions; a fifth of the labels is ignored."""
    documents = [torch.randint(0, VOCAB, (n,)) for n in lengths]
    labels = [torch.cat([d[1:], torch.tensor([IGNORED])]) for d in documents]
    for document_labels in labels:
        document_labels[torch.rand(len(document_labels)) < 0.2] = IGNORED
    return documents, labels


def reference(model, name, lengths):
    """Documents run one by one: the definition of block-diagonal attention."""
    documents, labels = make_batch(lengths)
    row_loss = torch.cat(
        [
            torch.nn.functional.cross_entropy(
                model(input_ids=tokens[None]).logits[0].float(),
                wanted,
                reduction="none",
                ignore_index=IGNORED,
            )
            for tokens, wanted in zip(documents, labels, strict=True)
        ]
    )
    all_labels = torch.cat(labels)
    model.zero_grad()
    (row_loss.sum() / (all_labels >= 0).sum()).backward()
    tensors = {
        "tokens": torch.cat(documents),
        "labels": all_labels,
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }
    tensors = {key: value.to(torch.int32) for key, value in tensors.items()}
    tensors["row_loss"] = row_loss.detach()
    for key, parameter in model.named_parameters():
        tensors["grad." + key] = parameter.grad.clone()
    return {f"{name}.{key}": value.contiguous() for key, value in tensors.items()}


def rope_tables(model):
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return {}
    positions = torch.arange(model.config.max_position_embeddings)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return {"rope.cos": cos[0, :, :half].contiguous(), "rope.sin": sin[0, :, :half].contiguous()}


for index, (case, config) in enumerate(CASES.items()):
    torch.manual_seed(1000 + index)
    model = make_model(config)
    folder = OUT / case
    model.save_pretrained(folder)
    tensors = rope_tables(model)
    for name, lengths in BATCHES.items():
        tensors |= reference(model, name, lengths)
    count = sum(p.numel() for p in model.parameters())
    save_file(tensors, folder / "reference.safetensors", metadata={"parameters": str(count)})
    print(f"{case}: {count} parameters")
