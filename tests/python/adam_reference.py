"""One Adam step element by element, in the formula's own order, from libm's fmaf and numpy's fp32."""

from __future__ import annotations

import copy
import ctypes
import math

import numpy as np
import torch

_libm = ctypes.CDLL("libm.so.6")
_libm.fmaf.restype = ctypes.c_float
_libm.fmaf.argtypes = [ctypes.c_float] * 3
_fma = np.vectorize(lambda a, b, c: np.float32(_libm.fmaf(float(a), float(b), float(c))), otypes=[np.float32])


class Reference:
    """Masters and moments of one parameter, as fp32 arrays (numel)."""

    def __init__(self, weights: torch.Tensor):
        self.p = weights.detach().float().flatten().numpy().copy()
        self.m = np.zeros_like(self.p)
        self.v = np.zeros_like(self.p)
        self.steps = 0

    def step(self, grad: torch.Tensor, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, maximize=False):
        self.steps += 1
        f32 = np.float32
        beta1, beta2 = betas
        step_size = f32(lr / (1.0 - beta1**self.steps))
        correction = f32(math.sqrt(1.0 - beta2**self.steps))
        g = grad.detach().float().flatten().numpy() * f32(-1.0 if maximize else 1.0)
        p = self.p * f32(1.0 - lr * weight_decay)
        self.m = _fma(f32(1.0 - beta1), g - self.m, self.m)
        self.v = _fma(f32(1.0 - beta2) * g, g, f32(beta2) * self.v)
        self.p = p - step_size * (self.m / (np.sqrt(self.v) / correction + f32(eps)))


def rounded(masters, dtype: torch.dtype) -> torch.Tensor:
    """The weights of fp32 masters: in bf16 the upper half of the bits after adding half a unit, in fp16 the nearest,
    or even."""
    masters = torch.as_tensor(masters)
    if dtype == torch.bfloat16:
        return (masters.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(dtype)
    return masters.to(dtype)


def masters_of_written(weights: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    """What fp32 masters are when somebody has written these weights (cpu tensors): the weights themselves where they
    are others now; in bf16 with what each master had below them, none where that is negative beside a zero."""
    if weights.dtype != torch.bfloat16:
        return torch.where(rounded(masters, weights.dtype) == weights, masters, weights.float())
    high = weights.view(torch.int16).int()
    magnitude = ((high & 0x7FFF) << 16) + masters.contiguous().view(torch.int16)[..., ::2].int()
    return ((high & 0x8000) << 16 | magnitude.clamp(min=0)).view(torch.float32)


def parameters_of_both_equal_torch(device: str, accumulation: int, hidden: bool) -> None:
    """orlop.AdamW and torch.optim.AdamW on the same recorded gradients, summed and clipped: after 100 steps the
    fp32 weights differ by at most 1e-6 + 1e-5 of their value; norms by at most 1e-5 of theirs."""
    import orlop

    torch.manual_seed(0)
    ours = torch.nn.ModuleList([torch.nn.Linear(33, 17), torch.nn.Linear(130, 65)]).to(device)
    theirs = copy.deepcopy(ours)
    optimizer = orlop.AdamW(ours.parameters(), lr=1e-3, module=ours if hidden else None)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        for _ in range(accumulation):
            targets = [torch.randn(p.shape, generator=generator).to(device) for p in ours.parameters()]
            for model in (ours, theirs):
                sum((p * t).sum() for p, t in zip(model.parameters(), targets, strict=True)).backward()
        norm = float(optimizer.clip_grad_norm_(1.0))
        expected = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
        assert abs(norm - expected) <= 1e-5 * expected, (step, norm, expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        if hidden:
            optimizer.synchronize()  # the loss reads the weights without a forward of the module
    optimizer.synchronize()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
