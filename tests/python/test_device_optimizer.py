"""Adam and norms on a CUDA device have the bits of those in host memory. Run: pytest -m gpu tests/python/test_device_optimizer.py"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import orlop  # noqa: E402
from orlop import _orlop  # noqa: E402
from orlop.torch_support import DTYPES  # noqa: E402

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = [1, 7, 8, 4096, 70001, 1 << 20]


def hyper(step, decoupled=True, maximize=False):
    return _orlop.AdamHyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled=decoupled,
                            maximize=maximize, step=step)  # fmt: skip


def shard_of(dtype, moments, planes, grad):
    fp32 = dtype == torch.float32
    addresses = {name: plane.data_ptr() for name, plane in planes.items() if not (fp32 and name == "param")}
    return _orlop.AdamShard(compute_dtype=DTYPES[dtype], moment_dtype=DTYPES[moments], grad_dtype=DTYPES[grad.dtype],
                            numel=grad.numel(), grad=grad.data_ptr(), **addresses)  # fmt: skip


def make_planes(dtype, moments, weights):
    numel = weights.numel()
    planes = {"param": weights, **{m: torch.zeros(numel, dtype=moments) for m in ("exp_avg", "exp_avg_sq")}}
    if dtype == torch.bfloat16:
        planes["lo"] = torch.zeros(numel, dtype=torch.int16)
    else:
        planes["master"] = weights.float()
    return planes


@gpu
@needs_gpu
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_equal_those_of_the_host(dtype, moments, decoupled):
    """Weights, masters and moments, bit for bit, over several steps, with a factor for the gradient."""
    device = torch.cuda.current_device()
    for numel in SIZES:
        generator = torch.Generator().manual_seed(numel)
        weights = torch.randn(numel, generator=generator).to(dtype)
        planes = {k: v.cuda() for k, v in make_planes(dtype, moments, weights.clone()).items()}
        scratch = torch.empty(_orlop.device_adam_scratch_bytes(), dtype=torch.uint8, device="cuda")
        host = orlop.AdamW([torch.nn.Parameter(weights.clone())], gradients="stay",
                           moments="fp32" if moments == torch.float32 else "bf16")  # fmt: skip
        (p,) = host.param_groups[0]["params"]
        slot = host._slots[p]
        for step in range(1, 5):
            grad = torch.randn(numel, generator=generator).to(dtype)
            # Somebody writes weights, beside whatever is left of their masters.
            if step == 4 and dtype != torch.float16:
                p.data[::3] = planes["master" if dtype == torch.float32 else "param"][::3] = 0
            h, factor = hyper(step, decoupled, maximize=step == 3), 0.3 if step == 2 else 1.0
            view = _orlop.GradientView(grad.data_ptr(), DTYPES[dtype], numel)
            slot.home.native.update([_orlop.TensorUpdate(slot.home.index, view, h)], factor, step, [grad])
            slot.home.native.synchronize()
            on_device = grad.cuda()
            _orlop.device_adam_steps(
                [shard_of(dtype, moments, planes, on_device)], [h], factor, scratch.data_ptr(), device,
                torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            torch.cuda.synchronize()
            wanted = {"exp_avg": slot.planes["exp_avg"], "exp_avg_sq": slot.planes["exp_avg_sq"]}
            wanted["master" if dtype == torch.float32 else "param"] = p.detach()
            if dtype == torch.bfloat16:
                wanted["lo"] = slot.planes["master_lo"]
            elif dtype == torch.float16:
                wanted["master"] = slot.planes["master"]
            for name, plane in wanted.items():
                assert torch.equal(planes[name].cpu(), plane), (name, numel, step)
        host.close()


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "dtypes", [*([d] for d in DTYPES), list(DTYPES)], ids=["fp32", "bf16", "fp16", "mixed"]
)
def test_square_sums_equal_those_of_the_host(dtypes):
    """In one call, in rows of their own; the index of the first NaN or Inf too. More tensors than one launch takes,
    empty ones among them and at the end."""
    sizes = [*([0, *SIZES, 16384, 16385] * 20)[:-1], 0, 0]
    native = _orlop.TensorOptimizer(1)
    rows = list(reversed(range(len(sizes))))
    for bad in [False, True]:
        values = [
            torch.randn(n, generator=torch.Generator().manual_seed(i)).to(dtypes[i % len(dtypes)])
            for i, n in enumerate(sizes)
        ]
        for tensor in values[:: 3 if bad else len(values)]:
            tensor[-1:] = math.inf
        found = torch.empty(len(sizes), 2, dtype=torch.float64, device="cuda")
        on_device = [tensor.cuda() for tensor in values]
        targets = [_orlop.GradientTarget(DTYPES[tensor.dtype], tensor.numel()) for tensor in on_device]
        for target, row in zip(targets, rows, strict=True):
            target.row = row
        batch = _orlop.GradientBatch(targets)
        scratch = torch.zeros(batch.scratch_bytes, dtype=torch.uint8, device="cuda")
        batch.square_sums(
            [tensor.data_ptr() for tensor in on_device], found.data_ptr(), scratch.data_ptr(),
            torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        totals, firsts = found[:, 0].tolist(), found.view(torch.int64)[:, 1].tolist()
        for tensor, row in zip(values, rows, strict=True):
            view = _orlop.GradientView(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel())
            total, _, first = native.norm([view])
            assert (totals[row], firsts[row]) == (total, first), (tensor.dtype, tensor.numel())


@gpu
@needs_gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_run_behind_the_stream_that_wrote_them(pinned):
    """Down and up again, each behind another stream that is late; tensors without elements among them."""
    device, late, stream = torch.cuda.current_device(), torch.cuda.Stream(), torch.cuda.Stream()
    written = [torch.zeros(n, device="cuda") for n in (5, 0, 70001)]
    hosts = [torch.zeros(t.numel(), pin_memory=pinned) for t in written]
    back = [torch.zeros_like(t) for t in written]
    _orlop.device_load(device)
    torch.cuda.synchronize()

    def copy(into, tensors, behind):
        pairs = zip(into, tensors, strict=True)
        copies = [(a.data_ptr(), b.data_ptr(), b.nbytes) for a, b in pairs]
        _orlop.device_copies(copies, device, stream.cuda_stream, behind.cuda_stream)

    with torch.cuda.stream(late):
        torch.cuda._sleep(100_000_000)
        for i, tensor in enumerate(written):
            tensor.fill_(i + 1.0)
    copy(hosts, written, late)
    if pinned:
        assert not late.query()  # the call has waited for nobody
    copy(back, hosts, stream)
    stream.synchronize()
    for i, (host, tensor) in enumerate(zip(hosts, back, strict=True)):
        assert torch.equal(host, torch.full_like(host, i + 1.0))
        assert torch.equal(tensor.cpu(), host)


@gpu
@needs_gpu
def test_small_copies_of_any_size_and_alignment():
    """More than one launch takes; every byte arrives, and none beside it is touched."""
    random = torch.Generator().manual_seed(3)
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    sizes = [1, 15, 16, 17, 16383, 16384, 16385, 65535, 65536, 65537]
    sizes += torch.randint(1, 3000, (300,), generator=random).tolist()
    gaps = torch.randint(0, 40, (len(sizes),), generator=random).tolist()
    begins, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        begins.append(end + gap)
        end += gap + size
    values = torch.randint(0, 256, (end,), dtype=torch.uint8, generator=random)
    inside = torch.zeros(end, dtype=torch.bool)
    for begin, size in zip(begins, sizes, strict=True):
        inside[begin : begin + size] = True
    source, host = values.cuda(), torch.full((end,), 7, dtype=torch.uint8, pin_memory=True)
    back = torch.full((end,), 9, dtype=torch.uint8, device="cuda")
    for into, tensor in ((host, source), (back, host)):
        copies = [
            (into.data_ptr() + a, tensor.data_ptr() + a, size) for a, size in zip(begins, sizes, strict=True)
        ]
        _orlop.device_copies(copies, device, stream, stream)
    torch.cuda.synchronize()
    assert torch.equal(host, torch.where(inside, values, torch.tensor(7, dtype=torch.uint8)))
    assert torch.equal(back.cpu(), torch.where(inside, values, torch.tensor(9, dtype=torch.uint8)))


def test_square_sums_of_less_than_nothing_are_refused():
    try:
        _orlop.device_adam_scratch_bytes()
    except RuntimeError as error:
        pytest.skip(f"this build has no CUDA part: {error}")
    values = torch.zeros(8)
    target = _orlop.GradientTarget(_orlop.DType.F32, -1)
    batch = _orlop.GradientBatch([target])
    assert not batch.has_rows
    with pytest.raises(orlop.UsageError, match="gradient 0 has row -1"):
        batch.square_sums([values.data_ptr()], values.data_ptr(), 0, 0, 0)
    target.row = 0
    assert batch.has_rows
    with pytest.raises(orlop.UsageError, match="numel = -1"):
        batch.square_sums([values.data_ptr()], values.data_ptr(), 0, 0, 0)


def test_shards_that_cannot_be_updated_are_refused():
    """Before anything is issued, by the name of the plane or of the dtype."""
    try:
        _orlop.device_adam_scratch_bytes()
    except RuntimeError as error:
        pytest.skip(f"this build has no CUDA part: {error}")
    weights = torch.zeros(8, dtype=torch.bfloat16)
    planes = make_planes(torch.bfloat16, torch.float32, weights)

    def step(planes, grad):
        shard = shard_of(torch.bfloat16, torch.float32, planes, grad)
        _orlop.device_adam_steps([shard], [hyper(1)], 1.0, 0, 0, 0)

    with pytest.raises(orlop.UsageError, match=r"F32.*BF16"):
        step(planes, torch.zeros(8))
    with pytest.raises(orlop.UsageError, match="lo"):
        step({k: v for k, v in planes.items() if k != "lo"}, weights.clone())
