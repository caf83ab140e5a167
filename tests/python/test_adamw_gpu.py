"""Door 1 with weights on a CUDA device. Run: pytest -m gpu tests/python/test_adamw_gpu.py"""

from __future__ import annotations

import gc
import os
import time

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch = pytest.importorskip("torch")


import orlop  # noqa: E402
from adam_reference import Reference, masters_of_written, parameters_of_both_equal_torch, rounded  # noqa: E402
from orlop import device_link  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


class Model(torch.nn.Module):
    def __init__(self, width=256, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.out = torch.nn.Linear(width, 8)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def train(model, optimizer, steps, accumulation=1, clip=None, first=0):
    losses = []
    for step in range(first, first + steps):
        for part in range(accumulation):
            x = torch.full(
                (4, 8), 0.1 * (step + 1) + part, device="cuda", dtype=next(model.parameters()).dtype
            )
            loss = (model(x).float() ** 2).mean()
            loss.backward()
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
@pytest.mark.parametrize("gradients", ["auto", "stay"])
@DTYPES
def test_masters_equal_the_formula_bit_for_bit(dtype, gradients, hidden):
    """Case N-09: recorded gradients; after each of many steps the weights are the rounded masters."""
    model = torch.nn.ModuleList([torch.nn.Linear(9, 7), torch.nn.Linear(130, 3)]).to("cuda", dtype)
    params = list(model.parameters())
    references = [Reference(p.cpu()) for p in params]
    optimizer = orlop.AdamW(params, lr=1e-2, gradients=gradients, module=model if hidden else None)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(50):
        targets = [torch.randn(p.shape, generator=generator, device="cuda").to(dtype) for p in params]
        sum((p * t).sum() for p, t in zip(params, targets, strict=True)).backward()
        for target, reference in zip(targets, references, strict=True):
            reference.step(target.cpu(), 1e-2)
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        for p, reference in zip(params, references, strict=True):
            assert torch.equal(optimizer.master(p).flatten(), torch.from_numpy(reference.p))
            assert torch.equal(p.detach().cpu().flatten(), rounded(reference.p, dtype))


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_fp32_equals_torch(accumulation, hidden):
    """100 steps on the same gradients, clipped. A loop whose gradients come from its own weights would compare
    how far apart rounding drives two runs, which for plain PyTorch and fp64 is as far."""
    parameters_of_both_equal_torch("cuda", accumulation, hidden)


def test_every_way_gives_the_same_bits(monkeypatch):
    """Hidden or not, away or not, with and without the driver's stream waits and pinned memory, and with torch's
    copies in the place of our own."""

    torch.use_deterministic_algorithms(True)

    def run(**options):
        model = Model().cuda().to(torch.bfloat16)
        if options.pop("hidden", False):
            options["module"] = model
        optimizer = orlop.AdamW(model.parameters(), lr=1e-3, **options)
        return train(model, optimizer, 20, clip=1.0), [p.detach().clone() for p in model.parameters()]

    try:
        expected = run()
        runs = [run(hidden=True), run(gradients="stay", hidden=True), run(threads=1)]
        for name in ("has_cuda_part", "_driver"):
            monkeypatch.setattr(device_link, name, lambda: None)
            runs += [run(states="host"), run(hidden=True, states="host"), run(hidden=True)]
    finally:
        torch.use_deterministic_algorithms(False)
    for index, (losses, weights) in enumerate(runs):
        if index == 1:  # clipping rounds the bf16 gradients that stay
            assert max(abs(a - b) / a for a, b in zip(expected[0], losses, strict=True)) < 0.01
            continue
        assert losses == expected[0], index
        assert all(torch.equal(a, b) for a, b in zip(weights, expected[1], strict=True)), index


@DTYPES
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "module"])
def test_sums_on_the_device_and_in_host_memory_give_the_same_bits(dtype, hidden):
    """Micro-batches are summed in fp32 and rounded once, wherever that is and however many a step has."""
    torch.use_deterministic_algorithms(True)

    def run(limit):
        model = Model().cuda().to(dtype)
        optimizer = orlop.AdamW(
            model.parameters(), lr=1e-3, device_limit=limit, module=model if hidden else None
        )
        losses = []
        for first, accumulation in enumerate([3, 3, 3, 5, 2, 1, 4, 4]):
            losses += train(model, optimizer, 1, accumulation, clip=1.0, first=first)
        size = 4 * sum(p.numel() for p in model.parameters())
        report = optimizer.memory_report()
        assert report.get("gradient sums", 0) == (size if limit == 0 else 0)
        assert report.get("gradient sums on cuda:0", 0) == (0 if limit == 0 else size)
        return losses, [p.detach().clone() for p in model.parameters()]

    try:
        expected, got = run(0), run(None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert got[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


@pytest.mark.parametrize("states", ["host", "auto"])
def test_step_does_not_wait_for_the_device(states):
    """The stream waits for the weights; the calling thread does not wait for the stream."""
    p = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
    # The check for NaN would need the gradients.
    optimizer = orlop.AdamW([p], lr=0.1, states=states, nonfinite="apply")
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    if optimizer._links[p.device]._driver is None or optimizer._links[p.device].unpinned_bytes:
        pytest.skip("this driver or container lacks pinned memory or stream waits")
    before = p.detach().clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    p.sum().backward()
    begin = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - begin
    changed = p.detach().clone()  # on the stream, after the update
    torch.cuda.synchronize()
    assert seconds < 0.2
    assert not torch.equal(before, changed)
    assert torch.equal(changed, p)


def test_gradients_leave_during_backward():
    """Device memory after backward is that of the weights and little more."""
    model = Model(width=2048, blocks=8).cuda().to(torch.bfloat16)
    optimizer = orlop.AdamW(model.parameters(), states="host")
    model(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated()
    model(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= weights + 2 * 2 * 2048 * 2048


@DTYPES
@pytest.mark.parametrize(
    "write", [lambda p: p[::2].mul_(0.5), lambda p: p.data[7].fill_(0.25)], ids=["seen", "data"]
)
@pytest.mark.parametrize("when", [0, 2])
def test_changed_weights_are_where_the_next_step_starts(dtype, write, when):
    """Case B-09: with and without autograd's version counter, before the first step and after others."""
    p = torch.nn.Parameter(torch.linspace(1, 2, 1000, device="cuda").to(dtype))
    other = torch.nn.Parameter(torch.linspace(1, 2, 3000, device="cuda").to(dtype))
    optimizer = orlop.AdamW([p, other], lr=1e-2, states="host")
    for step in range(when + 1):
        (p.sum() + other.sum()).backward()
        if step < when:
            optimizer.step()
            optimizer.zero_grad()
    before, masters = p.detach().clone(), [optimizer.master(q) for q in (p, other)]
    with torch.no_grad():
        write(p)
    changed = p.detach().clone()
    assert not torch.equal(changed, before)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(p, changed)
    assert torch.equal(optimizer.master(p), masters_of_written(changed.cpu(), masters[0]))
    assert torch.equal(optimizer.master(other), masters[1])
    optimizer.close()


@pytest.mark.parametrize("states", ["host", 1 << 30], ids=["host", "hbm"])
def test_a_mask_over_pruned_weights_leaves_zeros(states):
    """Case B-09: through `p.data`, which no version counter tells of. What is left of a master beside such a zero, half
    of it negative, must not make it a NaN."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(1 << 16, device="cuda").to(torch.bfloat16))
    mask = (torch.arange(p.numel(), device="cuda") % 2).to(p.dtype)
    optimizer = orlop.AdamW([p], lr=1e-2, states=states)
    for _ in range(5):
        (p * torch.randn_like(p)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert p.isfinite().all() and bool((p != 0).any())
        p.data.mul_(mask)
    assert set(optimizer.placement()) == {"host" if states == "host" else str(p.device)}
    assert optimizer.master(p).isfinite().all()
    optimizer.close()


@pytest.mark.parametrize("clip", ["ours", "torch"])
@pytest.mark.parametrize(
    ("scaler_class", "weights"),
    [
        (torch.amp.GradScaler, torch.float32),
        (orlop.GradScaler, torch.float32),
        (orlop.GradScaler, torch.float16),
    ],
    ids=["torch-autocast", "ours-autocast", "ours-fp16"],
)
def test_fp16_with_both_scalers(scaler_class, weights, clip):
    """fp32 weights under autocast, as torch's scaler wants them (it refuses fp16 gradients); ours takes fp16
    weights too. The first scale overflows, so that steps are left out until it fits."""
    model = Model().cuda().to(weights)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-4)
    scaler = scaler_class("cuda", init_scale=2.0**30, growth_interval=1000)
    losses = []
    for _ in range(60):
        with torch.autocast("cuda", torch.float16):
            out = model(torch.ones(4, 8, device="cuda", dtype=weights))
        loss = (out.float() - 3).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip == "ours":
            optimizer.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    assert 1.0 < scaler.get_scale() < 2.0**30, (scaler.get_scale(), losses)
    assert losses[-1] < losses[0], losses


@DTYPES
@pytest.mark.parametrize("file_device", ["cpu", "cuda"])
def test_resume_is_exact(dtype, file_device, tmp_path):
    """Cases C-10, C-24, R-08: from a file of either device; states begin in host memory."""
    model = Model(width=64).cuda().to(dtype)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-3)
    torch.backends.cudnn.deterministic = True
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    expected = train(model, optimizer, 5, first=5)
    saved = torch.load(tmp_path / "state.pt", map_location=file_device, weights_only=True)
    fresh = Model(width=64).cuda().to(dtype)
    fresh.load_state_dict(saved["model"])
    resumed = orlop.AdamW(fresh.parameters(), lr=1e-3)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.state[fresh.inp.weight]["exp_avg"].device.type == "cpu"
    assert train(fresh, resumed, 5, first=5) == expected


def test_model_that_moves_to_the_device_after_the_optimizer():
    model = Model(width=64)
    optimizer = orlop.AdamW(model.parameters(), lr=1e-3)
    model.cuda()
    assert len(train(model, optimizer, 3)) == 3
    assert optimizer._links


def test_twenty_optimizers_leave_nothing_behind():
    """Case R-10: device and host bytes; also an optimizer that ends with copies in flight."""
    from memory_use import resident_bytes

    model = Model(width=1024).cuda()
    after = []
    for _ in range(20):
        optimizer = orlop.AdamW(model.parameters(), module=model)
        train(model, optimizer, 2)
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
        del optimizer
        for p in model.parameters():
            p.grad = None
        gc.collect()
        torch.cuda.synchronize()
        after.append((resident_bytes(), torch.cuda.memory_allocated()))
    assert after[-1][0] <= after[2][0] * 1.01, after
    assert after[-1][1] == after[2][1], after


@pytest.mark.parametrize("wrapped", [False, True], ids=["door1", "door2"])
def test_a_thousand_steps_leave_nothing_behind(wrapped):
    """Case R-10: device bytes after step 1000 are those after step 200, host bytes within 1 %."""
    from memory_use import resident_bytes

    model = Model(width=128).cuda().to(torch.bfloat16)
    if wrapped:
        model, optimizer = orlop.wrap(model, {"lr": 1e-3}, {"limits": {"gpu": 2 * 2 * (128 * 128 + 128)}})
    else:
        optimizer = orlop.AdamW(model.parameters(), lr=1e-3, module=model)
    seen = []
    for first in range(0, 1000, 100):
        train(model, optimizer, 100, accumulation=2, clip=1.0, first=first)
        torch.cuda.synchronize()
        seen.append((resident_bytes(), torch.cuda.memory_allocated()))
    assert seen[-1][0] <= seen[1][0] * 1.01, seen
    assert seen[-1][1] == seen[1][1], seen


def test_forked_workers_leave_the_optimizer_alone():
    """Case B-05: children that inherit pinned memory end without a word."""
    from adamw_pair import run_python

    result = run_python(
        """
        import torch, orlop
        p = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        optimizer = orlop.AdamW([p])
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 16
            def __getitem__(self, i): return torch.tensor(float(i))
        for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
            (p * batch.sum().cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        print(optimizer.steps)
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "8\n", "")


def test_transformers_losses_within_one_percent():
    """A small Llama in bf16 against fp32 masters in plain PyTorch."""
    transformers = pytest.importorskip("transformers")
    from test_adamw_models import MasterAdamW

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip

    def run(make):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
        optimizer = make(model)
        ids = torch.randint(0, 64, (50, 2, 64), generator=torch.Generator().manual_seed(1)).cuda()
        losses = []
        for batch in ids:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run(lambda m: MasterAdamW(m, lr=1e-3))
    for options in (lambda m: {}, lambda m: {"module": m}):
        got = run(lambda m, o=options: orlop.AdamW(m.parameters(), lr=1e-3, **o(m)))
        assert max(abs(a - b) / b for a, b in zip(got, expected, strict=True)) <= 0.01


@pytest.mark.parametrize("states", ["host", "auto"])
@pytest.mark.parametrize("hides", [False, True])
def test_weights_and_gradients_that_the_user_changes(states, hides, monkeypatch):
    """Another order of elements, shape, memory and dtype of a parameter after the optimizer was made, and gradients that
    are edited where they are away: as with torch's own."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict(
            {"conv": torch.nn.Conv2d(4, 4, 3), "embedding": torch.nn.Embedding(16, 4)}
        ).cuda()
        params = [*model.parameters()]
        if ours:
            options = {"states": states, "module": model if hides else None}
            optimizer = orlop.AdamW(model.parameters(), lr=1e-2, **options)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model["embedding"].weight.data = torch.linspace(-1, 1, 80, device="cuda").view(20, 4)
        for step in range(8):
            if step == 2:
                model["conv"].to(memory_format=torch.channels_last)
            if step == 5:
                model["embedding"].weight.data = model["embedding"].weight.detach() * 0.5
            x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(step)).cuda()
            loss = (
                model["conv"](x).square().sum()
                + model["embedding"](torch.arange(20, device="cuda")).sin().sum()
            )
            loss.backward()
            if step == 3:
                for p in params:
                    p.grad.data.clamp_(-0.5, 0.5)
            optimizer.step()
            if ours:
                optimizer.synchronize()
            optimizer.zero_grad()
        moments = [optimizer.state[p]["exp_avg"].cpu().clone() for p in params]
        results.append([p.detach().cpu().clone() for p in params] + moments)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [16, 1024])
def test_blocks_on_streams_of_their_own(width):
    """Gradients leave, and are summed, behind the stream that has written them, whether small ones leave with others
    or large ones by themselves."""
    blocks = 4
    streams = [torch.cuda.Stream() for _ in range(blocks)]

    def run(streams):
        torch.manual_seed(0)
        model = torch.nn.Sequential()
        model.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        model.cuda()
        optimizer = orlop.AdamW(model.parameters(), lr=1e-3, module=model, states="host")
        norms = []
        for step in range(6):
            x = torch.full((4, width), 0.1 * (step + 1), device="cuda")
            for layer, stream in zip(model.layers, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    x = torch.tanh(layer(x))
                    x.register_hook(lambda _: torch.cuda._sleep(1_000_000))  # its gradients come late
                torch.cuda.current_stream().wait_stream(stream)
            x.square().sum().backward()
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return norms, [p.detach().clone() for p in model.parameters()]

    expected, got = run([torch.cuda.current_stream()] * blocks), run(streams)
    assert got[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))
