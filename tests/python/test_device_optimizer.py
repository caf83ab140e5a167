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
        scratch = torch.empty(_orlop.device_optimizer_scratch_bytes(numel), dtype=torch.uint8, device="cuda")
        host = orlop.AdamW([torch.nn.Parameter(weights.clone())], gradients="stay",
                           moments="fp32" if moments == torch.float32 else "bf16")  # fmt: skip
        (p,) = host.param_groups[0]["params"]
        slot = host._slots[p]
        for step in range(1, 5):
            grad = torch.randn(numel, generator=generator).to(dtype)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_square_sums_equal_those_of_the_host(dtype):
    """In one call, in rows of their own; the index of the first NaN or Inf too."""
    sizes = [0, *SIZES]
    native = _orlop.TensorOptimizer(1)
    scratch = torch.empty(_orlop.device_optimizer_scratch_bytes(max(sizes)), dtype=torch.uint8, device="cuda")
    rows = list(reversed(range(len(sizes))))
    for bad in [False, True]:
        values = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in sizes]
        for tensor in values[1:] if bad else []:
            tensor[-1] = math.inf
        found = torch.empty(len(sizes), 2, dtype=torch.float64, device="cuda")
        on_device = [tensor.cuda() for tensor in values]
        _orlop.device_square_sums(
            [(tensor.data_ptr(), DTYPES[dtype], tensor.numel()) for tensor in on_device], rows, found.data_ptr(),
            scratch.data_ptr(), torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        for tensor, row in zip(values, rows, strict=True):
            view = _orlop.GradientView(tensor.data_ptr(), DTYPES[dtype], tensor.numel())
            total, _, first = native.norm([view])
            assert found[row, 0].item() == total
            assert found.view(torch.int64)[row, 1].item() == first


def test_shards_that_cannot_be_updated_are_refused():
    """Before anything is issued, by the name of the plane or of the dtype."""
    try:
        _orlop.device_optimizer_scratch_bytes(1)
    except RuntimeError as error:
        pytest.skip(f"this build has no CUDA part: {error}")
    weights = torch.zeros(8, dtype=torch.bfloat16)
    planes = make_planes(torch.bfloat16, torch.float32, weights)

    def step(planes, grad):
        shard = shard_of(torch.bfloat16, torch.float32, planes, grad)
        _orlop.device_adam_steps([shard], [hyper(1)], 1.0, 0, 0, 0)

    with pytest.raises(orlop.UsageError, match="F32.*BF16"):
        step(planes, torch.zeros(8))
    with pytest.raises(orlop.UsageError, match="lo"):
        step({k: v for k, v in planes.items() if k != "lo"}, weights.clone())
