"""torch's GradScaler with a floor, and an end for runs that no smaller scale can cure."""

from __future__ import annotations

from . import errors
from .offloaded_gradient import OffloadedGradient
from .torch_support import torch


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, for any optimizer; gradients of orlop.AdamW are checked where they are.

    min_scale: the scale never falls below it. max_failures: after so many overflows in a row at that floor
    update() raises NonFiniteError naming the first bad parameter and whether weight or gradient is bad.

    fp16 parameters, whose gradients torch's scaler refuses to unscale in fp16, train too where orlop.AdamW has
    taken the gradients: they are scaled in fp32 when the update reads them.
    """

    def __init__(self, device="cuda", init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5,
                 growth_interval=2000, enabled=True, *, min_scale=1.0, max_failures=10):  # fmt: skip
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if not 0 < min_scale <= init_scale:
            raise errors.UsageError(
                f"GradScaler: min_scale {min_scale} is not in (0, init_scale {init_scale}]"
            )
        self.min_scale, self.max_failures, self.failures = float(min_scale), int(max_failures), 0
        self._optimizers = []

    def unscale_(self, optimizer):
        if self._enabled and optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        halves = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.dtype == torch.float16
        ]
        allow_fp16 = allow_fp16 or all(isinstance(gradient, OffloadedGradient) for gradient in halves)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def update(self, new_scale=None):
        if not self._enabled:
            return
        overflow = any(
            bool(flag)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        )
        bad = self._first_bad() if overflow else ""
        self._optimizers.clear()
        super().update(new_scale)
        at_floor = float(self._scale) < self.min_scale or (float(self._scale) == self.min_scale and overflow)
        if float(self._scale) < self.min_scale:
            self._scale.fill_(self.min_scale)
        self.failures = self.failures + 1 if overflow and at_floor else 0
        if self.failures >= self.max_failures:
            raise errors.NonFiniteError(
                f"the gradients overflowed {self.failures} times in a row at the smallest loss scale, "
                f"{self.min_scale}: {bad}"
            )

    def _first_bad(self):
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for position, p in enumerate(group["params"]):
                    if p.grad is None:
                        continue
                    names = getattr(optimizer, "_names", {})
                    name = names.get(p) if names else None
                    name = name or f"parameter {position} of group {index}"
                    if not bool(torch.isfinite(p.detach()).all()):  # of weights that are away: where they are
                        return f"the weight of {name} itself is not finite"
                    if not bool(torch.isfinite(p.grad).all()):
                        return f"the gradient of {name} is not finite, its weight is"
        return "the gradients are finite again"

    def state_dict(self):
        return {**super().state_dict(), "failures": self.failures} if self._enabled else {}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.failures = state_dict.get("failures", 0)
