"""The gradients of orlop.AdamW: how they leave, their norm, clipping and scaling."""

from __future__ import annotations

import logging
import math

from . import errors, torch_support
from .torch_support import torch

from .adam_checks import check_hyperparameters, refuse_several_ranks  # isort: skip
from .gradient_batch import Collector, GradientHook, Unit, take  # isort: skip
from .state_home import empty_as, measure_on_device  # isort: skip

_log = logging.getLogger("orlop")
_UNIT_BYTES = 16 << 20  # of gradients that wait for each other where no module tells of blocks


class GradientSide:
    """Part of AdamW, over its `_slots`, `_names` and `param_groups`."""

    def _leaves(self, p):
        return self._gradients == "leave" or (
            self._gradients == "auto" and (self._is_away(p) or self._module is not None)
        )

    def _hook(self, slot):
        p = slot.param
        if p not in self._hooks and p.requires_grad:
            self._hooks[p] = [GradientHook(p)]
        (slot.hook,) = self._hooks.get(p, [None])  # that of a slot before it, where there was one

    def _make_units(self, slots):
        """The parameters of a block, or, where no module tells of blocks, some that follow each other, are taken
        together: with the last of them."""
        part, size = None, 0
        for slot in slots:
            if not self._leaves(slot.param):
                continue
            if self._gate is not None:
                # What is outside of blocks is used before them and behind them: a unit for each module there.
                block = self._gate.unit_of(slot.param)
                part = block or self._names[slot.param].rpartition(".")[0], slot.device
                self._gate.has_slot(slot)
            elif part is None or size >= _UNIT_BYTES or part[1] != slot.device:
                part, size = (len(self._units), slot.device), 0
            size += slot.param.nbytes
            if slot.hook is None:
                continue
            if slot.device not in self._collectors:
                self._collectors[slot.device] = Collector(slot.device)
            if part not in self._units:
                self._units[part] = Unit(self._collectors[slot.device])
            self._units[part].add(slot)

    def _flush(self):
        """Gradients that wait for the rest of their unit are taken as it is."""
        for collector in self._collectors.values():
            collector.finish()

    def _gather(self):
        """(slot, group) of every parameter with a gradient, in the order of the groups."""
        if self._collectors:  # the ranks may have met after the parameters came
            refuse_several_ranks()
        self._flush()
        self._follow_moves()
        late = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p not in self._slots
        ]
        if late:
            self._check_groups(self.param_groups)
            self._adopt(late)
        work = []
        for index, group in enumerate(self.param_groups):
            check_hyperparameters(group, f"group {index}", self.defaults["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                slot = self._slots[p]
                if not slot.is_away:
                    slot.drop_gradient()
                    self._check_gradient(p)
                    if slot.link and self._leaves(p):
                        take([slot])
                    if slot.link and not slot.is_away:
                        slot.lend_gradient()
                slot.settle()
                work.append((slot, group))
        for link in self._links.values():
            link.let_go()
        return work

    def _check_gradient(self, p):
        if p.grad.layout != torch.strided:
            raise RuntimeError(
                f"{self._names[p]} has a sparse gradient, which Adam cannot use; build its module with sparse=False"
            )
        if p.grad.dtype not in torch_support.DTYPES:
            raise TypeError(
                f"the gradient of {self._names[p]} is {p.grad.dtype}; float32, bfloat16 or float16 is needed"
            )
        if self._slots[p].link and p.grad.dtype != p.dtype:
            raise TypeError(
                f"the gradient of {self._names[p]} is {p.grad.dtype}, on a device it is to be {p.dtype} as the weight is"
            )

    def _norm(self, work):
        """(norm, first slot with NaN or Inf or None) over gradients as they stand."""
        square_sum, bad = 0.0, None
        unmeasured = [slot for slot, _ in work if not slot.home.measured]
        measure_on_device([slot for slot in unmeasured if slot.home.on_device])
        plain = [slot for slot in unmeasured if not (slot.home.on_device or slot.is_away or slot.copied)]
        views = [slot.view() for slot in plain]  # with the owners of their memory
        sums = dict(zip(plain, self._native.norms([view for view, _ in views]), strict=True)) if plain else {}
        for slot, _ in work:
            if slot in sums:
                total, nonfinite = sums[slot]
                finite = nonfinite < 0
            else:
                total, finite = slot.squares()
            square_sum += total * slot.factor**2
            if bad is None and not (finite and math.isfinite(slot.factor)):
                bad = slot
        return math.sqrt(square_sum) if square_sum >= 0 else square_sum, bad

    def _check_finite(self, work):
        self.grad_norm, bad = self._norm(work)
        if bad is None:
            return True
        text = f"the gradient of {bad.name} is not finite (norm of all: {self.grad_norm})"
        if self._nonfinite == "raise":
            raise errors.NonFiniteError(text)
        self.skipped_steps += 1
        self.first_bad = text
        if self.skipped_steps in (1, 10, 100, 1000):
            _log.warning("%s; the step was left out, nothing changed (%d so far)", text, self.skipped_steps)
        return False

    # --- for users ------------------------------------------------------------------------------

    @torch_support.not_compiled
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        """Scales all gradients so that their 2-norm is at most `max_norm`; returns the norm before that,
        summed in fp64 in a fixed order. As torch.nn.utils.clip_grad_norm_ over all parameters."""
        if float(norm_type) != 2.0:
            raise errors.UsageError(f"clip_grad_norm_: norm_type {norm_type} is not supported, only 2")
        self.synchronize()
        work = self._gather()
        norm, bad = self._norm(work)
        self.grad_norm = norm
        if bad is not None and error_if_nonfinite:
            raise RuntimeError(f"the norm of the gradients is {norm}: that of {bad.name} is not finite")
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:  # NaN too, as in torch
            self.scale_gradients_(factor)
        return torch.tensor(norm, dtype=torch.float32)

    @torch_support.not_compiled
    @torch.no_grad()
    def scale_gradients_(self, factor):
        """Multiplies all gradients; those that have left, exactly once, in fp32, when they are used."""
        for slot, _ in self._gather():
            if slot.is_away:
                slot.scale_gradient(slot.stand_in, factor)
            else:
                slot.param.grad.mul_(factor)

    def gradient(self, p):
        """A copy of the gradient of `p` as it stands, wherever it is; None without one."""
        if p.grad is None:
            return None
        return p.grad.detach().clone() if not self._slot_of(p).is_away else p.grad.clone()

    @torch_support.not_compiled
    def zero_grad(self, set_to_none=True):
        """As in torch; gradients that have left are dropped."""
        self._flush()
        for slot in self._slots.values():
            if slot.is_away and not set_to_none:
                slot.drop_gradient()
                slot.param.grad = empty_as(slot.param, slot.dtype).zero_()  # the weights may be away
            else:
                slot.drop_gradient()
        super().zero_grad(set_to_none)
