"""orlop.wrap: weights of blocks come and go; training, evaluation and files are those of the plain model."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os

import pytest

torch = pytest.importorskip("torch")

from memory_use import allocated, resident_bytes  # noqa: E402

import orlop  # noqa: E402
from orlop.wrapping import stream_of  # noqa: E402

STEPS = 8
DEVICE = os.environ.get("ORLOP_TEST_DEVICE", "cpu")


class Model(torch.nn.Module):
    def __init__(self, blocks=5, width=24, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 4)
        self.to(DEVICE, dtype)

    def forward(self, x, order=None):
        x = self.inp(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = torch.tanh(self.blocks[index](x)) + x
        return self.out(x)


def batch(step, dtype=torch.float32):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE, dtype)


def plain(model):
    return model, orlop.AdamW(model.parameters(), lr=1e-2, gradients="leave")


def streamed(model):
    """With room for two blocks, which is all that "auto" takes of a host."""
    block = max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)
    config = "auto" if DEVICE == "cpu" else {"limits": {"gpu": 2 * block}}
    return orlop.wrap(model, {"lr": 1e-2}, config=config)


def train(model, optimizer, steps=STEPS, forward=None, between=None, first=0):
    losses = []
    for step in range(first, first + steps):
        x = batch(step, model.inp.weight.dtype)
        loss = (forward(model, x, step) if forward else model(x)).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if between:
            between(model, step)
    return losses


def weights(model):
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same(forward=None, between=None, make=Model):
    """The wrapped run has the bits of the plain one; returns the wrapped model and its optimizer."""
    reference, optimizer = plain(make())
    expected = train(reference, optimizer, forward=forward)
    model, optimizer = streamed(make())
    assert train(model, optimizer, forward=forward, between=between) == expected
    got, wanted = weights(model), weights(reference)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert stream_of(model).resident_blocks() == []
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_with_two_blocks_at_a_time(dtype):
    """Case N-19: offloaded weights change nothing; never more than two blocks are on the device."""
    model, _ = assert_same(make=lambda: Model(dtype=dtype))
    assert stream_of(model).peak_blocks == 2
    assert all(p.untyped_storage().nbytes() == 0 for p in model.blocks.parameters())


def test_a_block_is_one_storage_for_life():
    """Its parameters lie in it as torch's allocator would have placed them."""
    model, optimizer = streamed(Model())
    addresses = {}
    for _ in range(2):
        for index, block in enumerate(model.blocks):
            with orlop.gathered(block):
                storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
                assert len(storages) == 1
                places = [(p.data_ptr() - min(storages), p.nbytes) for p in block.parameters()]
                assert all(begin % 512 == 0 for begin, _ in places)
                assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(sorted(places)))
                assert addresses.setdefault(index, places) == places
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("resident", range(6))
def test_same_bits_for_every_budget(resident):
    """Spare device memory keeps blocks; the result does not depend on it."""
    block = 4 * (24 * 24 + 24)
    expected = train(*plain(Model()))
    limit = 5 * block if resident == 5 else (resident + 2) * block
    model, optimizer = orlop.wrap(Model(), {"lr": 1e-2}, config={"limits": {"gpu": limit}})
    assert train(model, optimizer) == expected
    at_rest = {5: 5, 4: 5, 3: 5}.get(resident, resident)  # two for streaming and three more are all of them
    assert len(stream_of(model).resident_blocks()) == at_rest
    assert stream_of(model).peak_blocks * block <= limit


@pytest.mark.parametrize(
    "order",
    [
        lambda step: range(5) if step % 4 in (0, 1) else (0, 2, 4),
        lambda step: (0, 1, 1, 2, 1, 3, 4),
        lambda step: reversed(range(5)) if step % 2 else range(5),
        lambda step: (step % 5,),
    ],
    ids=["skipped", "repeated", "reordered", "one"],
)
def test_blocks_in_any_order(order):
    """Cases M-02, M-16: branches that some batches use, a layer that is used three times."""
    assert_same(forward=lambda model, x, step: model(x, order(step)))


def test_accumulation():
    """Cases N-03, N-21."""

    def run(make):
        model, optimizer = make(Model())
        for step in range(8):
            model(batch(step)).square().mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    a, b = run(plain), run(streamed)
    assert all(torch.allclose(a[name], b[name], atol=1e-6, rtol=1e-5) for name in a)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """Case M-05: both kinds, the bits of the run without."""

    def forward(model, x, _):
        x = model.inp(x)
        x.requires_grad_() if x.is_leaf else None
        for block in model.blocks:
            x = torch.tanh(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)) + x
        return model.out(x)

    assert_same(forward=forward)


def test_evaluation_and_exceptions_between_steps():
    """Case M-03: a pass that is stopped in the middle leaves nothing on the device."""

    def between(model, step):
        if step % 3 != 2:
            return
        model.eval()
        with torch.no_grad():
            model(batch(0))
        handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
        for context in (torch.no_grad(), contextlib.nullcontext()):
            with pytest.raises(ZeroDivisionError), context:
                model(batch(0))
        handle.remove()
        assert stream_of(model).resident_blocks() == []
        model.train()

    assert_same(between=between)


def test_block_that_calls_another():
    """Its own weights stay while the other runs, in both passes."""

    class Caller(torch.nn.Module):
        def __init__(self, other):
            super().__init__()
            self.before, self.after = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
            self.other = [other]  # no submodule

        def forward(self, x):
            return self.after(torch.tanh(self.other[0](torch.tanh(self.before(x)))))

    class Calling(Model):
        def __init__(self):
            super().__init__()
            self.blocks[2] = Caller(self.blocks[4])

    assert_same(make=Calling)
    assert_same(make=Calling, forward=lambda model, x, step: model(x, range(4)))


def test_two_backwards_through_one_graph():
    def both(make):
        model, optimizer = make(Model())
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return optimizer.gradient(model.blocks[2].weight)

    torch.testing.assert_close(both(streamed), both(plain))


def test_frozen_and_unfrozen_blocks():
    """Cases M-01, R-14: frozen blocks have no states; one unfreezes later."""

    def forward(model, x, step):
        model.blocks[1].requires_grad_(step >= 4)
        return model(x)

    def make():
        model = Model()
        model.blocks[:3].requires_grad_(False)
        return model

    model, optimizer = assert_same(forward=forward, make=make)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimizer.memory_report()["moments"] == 8 * trainable


def test_inference_needs_no_optimizer():
    """Case R-13: forward only, no states at all."""
    model, optimizer = orlop.wrap(Model())
    assert optimizer is None
    with torch.no_grad():
        assert torch.equal(model(batch(0)), Model()(batch(0)))


def test_weight_reports_itself_while_it_is_away():
    """Cases M-06, M-11: shape, dtype, device and count are true; arithmetic is an error that names it."""
    model, _ = streamed(Model())
    for (name, p), (_, q) in zip(model.named_parameters(), Model().named_parameters(), strict=True):
        assert (p.shape, p.dtype, p.device, p.numel(), p.stride()) == (
            q.shape,
            q.dtype,
            q.device,
            q.numel(),
            q.stride(),
        )
        assert isinstance(p, torch.nn.Parameter)
        if name.startswith("blocks"):
            for use in (lambda p: p * 2, lambda p: p.sum(), lambda p: torch.cat([torch.ones(24), p.flatten()]),
                        lambda p: p.mul_(0.5), lambda p: torch.nn.functional.linear(batch(0), p)):  # fmt: skip
                with pytest.raises(orlop.UsageError, match=rf"{name.replace('.', chr(92) + '.')}.*gathered"):
                    use(p)
    assert "host memory" in repr(model.blocks[0].weight)


def test_gathered_reads_and_edits():
    """Cases B-09, M-12: initialisation and edits inside gathered() are where the next step starts."""
    model, optimizer = streamed(Model())
    reference, reference_optimizer = plain(Model())
    for m in (model, reference):
        context = orlop.gathered(m, write=True) if m is model else contextlib.nullcontext()
        with context, torch.no_grad():
            torch.manual_seed(5)
            for p in m.parameters():
                p.normal_(0, 0.1)
    assert train(model, optimizer, 3) == train(reference, reference_optimizer, 3)
    for m in (model, reference):  # write is noticed, not only asked for
        context = orlop.gathered([m.blocks[1].weight]) if m is model else contextlib.nullcontext()
        with context, torch.no_grad():
            m.blocks[1].weight.mul_(0.5)
    assert train(model, optimizer, 3, first=3) == train(reference, reference_optimizer, 3, first=3)
    assert stream_of(model).resident_blocks() == []


def test_penalty_on_weights():
    """Case M-13: the gradient of a term in gathered weights is part of the step."""

    def forward(model, x, _):
        with orlop.gathered([p for p in model.parameters() if p.ndim == 2]):
            penalty = sum((p**2).sum() for p in model.parameters() if p.ndim == 2)
        return torch.cat([model(x).flatten(), (0.1 * penalty).sqrt()[None]])

    assert_same(forward=forward)


def test_embedding_used_by_the_head():
    """Cases M-11, N-16: a tied weight lies outside of the blocks and stays."""

    class Tied(Model):
        def __init__(self):
            super().__init__()
            self.inp = torch.nn.Linear(24, 24)
            self.out = torch.nn.Linear(24, 24)
            self.out.weight = self.inp.weight
            self.blocks[3].weight = self.blocks[1].weight

        def forward(self, x):
            x = torch.nn.functional.pad(x, (0, 16))
            return super().forward(x) @ self.inp.weight

    model, _ = assert_same(make=Tied)
    assert model.out.weight is model.inp.weight and model.blocks[3].weight is model.blocks[1].weight


def test_state_dicts_are_complete():
    """Cases C-05, M-15, N-22: whole tensors in mid-training, loaded by the plain model, and the other way."""
    model, optimizer = streamed(Model())
    train(model, optimizer, 3)
    state = copy.deepcopy(model.state_dict())
    assert all(value.numel() > 0 and type(value) is torch.Tensor for value in state.values())
    reference = Model()
    reference.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model(batch(9)), reference(batch(9)))
    fresh, fresh_optimizer = streamed(Model())
    fresh.load_state_dict(state)
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    assert train(fresh, fresh_optimizer, 3, first=3) == train(model, optimizer, 3, first=3)


def test_to_is_a_no_op_with_one_note(caplog):
    """The engine's weights stay; model.to() and half() say so once."""
    from orlop import streamed_parameter

    streamed_parameter._told.clear()
    model, optimizer = streamed(Model())
    before = weights(model)
    model.to(torch.float32).cpu()
    model.blocks.half()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert len([r for r in caplog.records if "stay where they are" in r.message]) == 1
    train(model, optimizer, 1)


def test_torch_optimizer_is_taken_over():
    """Hyperparameters, groups and state of a torch AdamW that has already trained."""
    torch_model = Model()
    theirs = torch.optim.AdamW(torch_model.parameters(), lr=1e-2, weight_decay=0.2)

    def steps(model, optimizer, first):
        for step in range(first, first + 4):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(torch_model, theirs, 0)
    other = copy.deepcopy(torch_model)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.2)
    other_optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    model, optimizer = orlop.wrap(other, other_optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    steps(torch_model, theirs, 4)
    steps(model, optimizer, 4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, torch_model.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_master_and_gradient_within_reach():
    """Case B-08: for weights that are away and for those that stay."""
    model, optimizer = orlop.wrap(Model(dtype=torch.bfloat16), {"lr": 1e-2}, {"limits": {"gpu": 3 * 2 * 600}})
    model(batch(0, torch.bfloat16)).float().square().mean().backward()
    for p in model.parameters():
        assert optimizer.gradient(p).shape == p.shape
        optimizer.set_master(p, torch.full(p.shape, 0.01))
        assert (optimizer.master(p) == torch.tensor(0.01)).all()
    with torch.no_grad():
        assert torch.equal(model.blocks[4].weight, torch.full((24, 24), 0.01, dtype=torch.bfloat16))
        expected = Model(dtype=torch.bfloat16)
        for p in expected.parameters():
            p.fill_(0.01)
        assert torch.equal(model(batch(1, torch.bfloat16)), expected(batch(1, torch.bfloat16)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"config": {"limits": {"gpu": 100}}}, orlop.DoesNotFitError, "two blocks"),
        ({"config": {"limits": {"cpu": 1}}}, orlop.UsageError, "cpu"),
        ({"config": {"zero_optimization": {}}}, orlop.UsageError, "deepspeed_compat"),
        ({"config": 7}, orlop.UsageError, "config"),
        ({"blocks": [torch.nn.Linear(1, 1)]}, orlop.UsageError, "no part"),
        ({"optimizer": 3}, orlop.UsageError, "int"),
        ({"optimizer": {"amsgrad": True}}, orlop.UsageError, "amsgrad"),
    ],
)
def test_mistakes_are_named(arguments, error, text):
    """After a refusal the model is the plain one, which trains as if nothing had been asked."""
    model = Model()
    with pytest.raises(error, match=text):
        orlop.wrap(model, **arguments)
    expected, before = Model(), Model()
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    for m in (model, expected):
        optimizer = orlop.AdamW(m.parameters(), lr=1e-2)
        train(m, optimizer, 2)
    for p, q, r in zip(model.parameters(), expected.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) and not torch.equal(p, r)
    orlop.wrap(model)


def test_wrapped_twice_and_unwrapped():
    model, optimizer = streamed(Model())
    train(model, optimizer, 2)
    expected = weights(model)
    with pytest.raises(orlop.UsageError, match="wrapped already"):
        orlop.wrap(model)
    optimizer.close()
    assert orlop.unwrap(model) is model
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    with pytest.raises(orlop.UsageError, match="not wrapped"):
        orlop.unwrap(model)
    again, optimizer = streamed(model)
    train(again, optimizer, 1)


def test_two_wrapped_models_in_turn():
    """Case B-07."""
    expected = train(*plain(Model())), train(*plain(Model(blocks=2)))
    one, two = streamed(Model()), streamed(Model(blocks=2))
    losses = [], []
    for step in range(STEPS):
        losses[0].extend(train(*one, steps=1, first=step))
        losses[1].extend(train(*two, steps=1, first=step))
    assert losses == expected


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


@pytest.mark.parametrize("wrapped", [False, True], ids=["door1", "door2"])
def test_a_thousand_steps_leave_nothing_behind(wrapped):
    """Case R-10: what is allocated after step 1000 is what was after step 200; two micro-batches a step. Counted by
    the allocators themselves: the resident set also holds what they keep for later, earlier tests' too."""

    def accumulate(model, x, _):
        model(x).square().mean().backward()
        return model(x)

    model, hyper = Model(blocks=2), {"lr": 1e-2, "threads": 1}
    if wrapped:
        model, optimizer = orlop.wrap(model, hyper)
    else:
        optimizer = orlop.AdamW(model.parameters(), module=model, **hyper)
    seen = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for first in (0, 200, 600):
            train(model, optimizer, steps=200 if first == 0 else 400, forward=accumulate, first=first)
            optimizer.synchronize()
            seen.append(allocated())
    finally:
        torch.set_num_threads(threads)
    heap, blocks, tensors = zip(*seen, strict=True)
    assert tensors[-1] == tensors[0], seen
    # One object or one small piece of the heap for each step would be more.
    assert blocks[-1] <= blocks[0] + 400, seen
    assert heap[-1] <= heap[0] + (24 << 10), seen
