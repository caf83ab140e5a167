"""orlop.wrap over models of transformers, adapters and the compiler; and what is left behind."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from adamw_pair import run_python  # noqa: E402
from memory_use import allocated, resident_bytes  # noqa: E402
from wrap_model import Model, batch, plain, streamed, train  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402


def test_twenty_wrapped_models_leave_nothing_behind():
    """Case R-10."""

    after = []
    for _ in range(20):
        model, optimizer = streamed(Model(blocks=4, width=512))
        train(model, optimizer, 2)
        del model, optimizer
        gc.collect()
        after.append(resident_bytes())
    assert after[-1] <= after[2] + 8 * 2**20, after


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_transformers_losses_within_one_percent(model_dir, kind):
    """50 losses against plain PyTorch, with checkpointing; generation in between; a plain reload has the logits."""
    transformers = pytest.importorskip("transformers")
    from test_adamw_models import train as reference_train

    folder = model_dir(kind, True)
    expected = reference_train(folder, torch.float32, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    model, optimizer = orlop.wrap(model, {"lr": 1e-3})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 64, (50, 2, 24), generator=torch.Generator().manual_seed(11))
    losses = []
    for step, tokens in enumerate(ids):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 10:  # case M-04
            model.eval()
            model.generate(tokens[:, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
            model.train()
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) <= 0.01
    assert stream_of(model).peak_blocks == 2


def test_save_pretrained(model_dir, tmp_path):
    """Case C-05: the plain library's save in mid-training; its reload gives the same logits."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama", True)).train()
    model, optimizer = orlop.wrap(model, {"lr": 1e-2})
    tokens = torch.arange(12)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


def test_lora_over_a_streamed_base(model_dir):
    """Cases M-05, M-06, R-14: the adapter is built after the model was wrapped by name only, base frozen."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def run(wrapped):
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama", True))
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(base, config).train()
        if wrapped:
            model, optimizer = orlop.wrap(model, {"lr": 1e-3})
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(20):
            tokens = torch.randint(0, 32, (1, 16), generator=torch.Generator().manual_seed(step % 4))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    expected, _, _ = run(False)
    got, model, optimizer = run(True)
    assert max(abs(a - b) / b for a, b in zip(got, expected, strict=True)) <= 0.01
    assert optimizer.memory_report()["moments"] == 8 * sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_under_torch_compile(when):
    """Case M-09: each block compiled by itself, before or after the wrap; two blocks at a time as ever."""
    expected = train(*plain(Model()))
    torch._dynamo.reset()
    model = Model()

    def compile_blocks():
        for block in model.blocks:
            block.compile(backend="aot_eager")

    if when == "before":
        compile_blocks()
    model, optimizer = streamed(model)
    if when == "after":
        compile_blocks()
    losses = train(model, optimizer)
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-5)
    assert stream_of(model).peak_blocks <= 2
    assert stream_of(model).resident_blocks() == []


def hidden(model):
    return model, orlop.AdamW(model.parameters(), lr=1e-2, module=model)


@pytest.mark.parametrize("make", [hidden, streamed], ids=["module", "wrap"])
@pytest.mark.parametrize("whole", [False, True], ids=["step", "loop"])
def test_what_is_compiled_holds_nothing_of_the_optimizer(make, whole):
    """A compiled step() of an optimizer is a matter of seconds, not minutes, and a compiled loop has right values."""
    expected = train(*plain(Model(blocks=2)), steps=3)
    torch._dynamo.reset()
    model, optimizer = make(Model(blocks=2))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def forward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def update():
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def loop(x):
        loss = forward(x)
        update()
        return loss

    if whole:
        run = torch.compile(loop, backend=backend)
        losses = [run(batch(step)).item() for step in range(3)]
    else:
        run, losses = torch.compile(update, backend=backend), []
        for step in range(3):
            losses.append(forward(batch(step)).item())
            run()
        assert graphs == []
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=1e-5)


def allocated_after_200_600_and_1000_steps(wrapped):
    def accumulate(model, x, _):
        model(x).square().mean().backward()
        return model(x)

    model, hyper = Model(blocks=2), {"lr": 1e-2, "threads": 1}
    if wrapped:
        model, optimizer = orlop.wrap(model, hyper)
    else:
        optimizer = orlop.AdamW(model.parameters(), module=model, **hyper)
    seen = []
    torch.set_num_threads(1)
    for first in (0, 200, 600):
        train(model, optimizer, steps=200 if first == 0 else 400, forward=accumulate, first=first)
        optimizer.synchronize()
        seen.append(allocated())
    return seen


@pytest.mark.parametrize("wrapped", [False, True], ids=["door1", "door2"])
def test_a_thousand_steps_leave_nothing_behind(wrapped):
    """Case R-10: what is allocated after step 1000 is what was after step 200; two micro-batches a step. Counted by
    the allocators themselves, as the resident set also holds what they keep for later, in a process of its own, as
    what earlier tests have left behind comes and goes."""
    result = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_wrap_models import allocated_after_200_600_and_1000_steps
        print(allocated_after_200_600_and_1000_steps({wrapped}))
        """
    )
    assert result.returncode == 0, result.stderr
    seen = ast.literal_eval(result.stdout)
    heap, blocks, tensors = zip(*seen, strict=True)
    assert tensors[-1] == tensors[0], seen
    # One object or one small piece of the heap for each step would be more.
    assert blocks[-1] <= blocks[0] + 400, seen
    assert heap[-1] <= heap[0] + (24 << 10), seen
