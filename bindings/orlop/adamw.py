"""Door 1: a torch.optim.Optimizer whose states live in host memory and whose update runs there."""

from __future__ import annotations

import itertools
import logging
import os
import weakref

from . import _orlop, errors, torch_support
from .torch_support import torch

from .adam_checks import check_choice, check_hyperparameters  # isort: skip
from .adam_gradients import GradientSide  # isort: skip
from .adam_state import StateSide  # isort: skip
from .device_link import DeviceLink  # isort: skip
from .forward_gate import ForwardGate  # isort: skip
from .optimizer_slot import MOMENT_KEYS, Slot  # isort: skip

_log = logging.getLogger("orlop")
_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ISSUING_THREADS = 2  # Python's and autograd's
_live: weakref.WeakSet[AdamW] = weakref.WeakSet()


class AdamW(GradientSide, StateSide, torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with masters, moments and, on a GPU, gradients in host memory.

    A drop-in for torch.optim.AdamW: the same arguments, param_groups and state_dict, in fp32 equal to it
    within rounding. 16-bit parameters have an exact fp32 master: 10 bytes of host memory per bf16 element
    beside the weight itself, 12 per fp16 element, 8 per fp32 element, none for frozen ones.

    module: hides the update under the next forward. step() returns at once, and each block of `module` waits
        for its own weights when its forward begins; whoever reads weights otherwise calls synchronize().
    gradients: "leave" takes each gradient to host memory while backward runs and sums micro-batches there in
        fp32; "stay" leaves `p.grad` alone. "auto": leave on a GPU and with `module`, else stay. While a
        gradient is away `p.grad` is an OffloadedGradient: clipping, scaling and reading work on it.
    nonfinite: "skip" leaves everything as it is when a gradient holds NaN or Inf, counts it in
        `skipped_steps` and names the parameter; "raise" raises NonFiniteError; "apply" does what torch does.
    moments: "fp32", or "bf16" with stochastic rounding (half the memory).
    device_limit: bytes of tensors on a GPU, all of torch's counted, up to which fp32 sums of micro-batches stay
        there; what would exceed it is summed in host memory. None: what is free, less a reserve.
    threads: of the host update; 0 takes OMP_NUM_THREADS, or the physical cores. Beside a GPU two of these are
        left to the threads that issue its work, without which forward and backward wait for the host.
    """

    _decoupled = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        module=None,
        gradients="auto",
        nonfinite="skip",
        moments="fp32",
        threads=0,
        device_limit=None,
        stream=None,
    ):
        check_choice("gradients", gradients, ("auto", "leave", "stay"))
        check_choice("nonfinite", nonfinite, ("skip", "raise", "apply"))
        check_choice("moments", moments, tuple(_MOMENTS))
        self._module = module
        self._gradients, self._nonfinite, self._moments = gradients, nonfinite, _MOMENTS[moments]
        self._device_limit = device_limit
        self._stream = stream  # set by orlop.wrap: brings the weights of blocks
        self._slots: dict[torch.Tensor, Slot] = {}
        self._links: dict[torch.device, DeviceLink] = {}
        self._hooks: dict[torch.Tensor, list] = {}
        self._gate = None
        self._ready = False
        self.steps = 0  # calls of step() that changed something
        self.skipped_steps = 0
        self.step_was_skipped = False  # the last one; the name that Accelerate asks for
        self.first_bad = ""  # what was not finite in the last step that was left out
        self.grad_norm = None  # of the last step or clipping, before clipping
        self._names = {p: name for name, p in module.named_parameters()} if module is not None else {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, defaults)
        self._check_groups(self.param_groups)
        self._threads = threads or self._default_threads()
        self._native = _orlop.TensorOptimizer(self._threads)
        self._parts = [self._native]  # what outlives this object in its finalizer
        self._adopt(p for group in self.param_groups for p in group["params"] if p.requires_grad)
        self._ready = True
        if module is not None:
            self._gate = ForwardGate(self, module)
            self._hooks[None] = self._gate.handles
        _live.add(self)
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), self._hooks, self._links, self._parts
        )

    @classmethod
    def from_torch(cls, optimizer, **options):
        """An orlop optimizer in the place of a torch.optim.AdamW or Adam: its groups, hyperparameters and
        state. `options` are those of this class that torch lacks."""
        if isinstance(optimizer, AdamW):
            return optimizer
        if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
            raise errors.UsageError(
                f"{type(optimizer).__name__} cannot run on host states; torch.optim.AdamW, torch.optim.Adam, "
                "orlop.AdamW and orlop.Adam can"
            )
        first = optimizer.param_groups[0]
        decoupled = first.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        hyper = {key: first[key] for key in ("lr", "betas", "eps", "weight_decay", "maximize")}
        made = (AdamW if decoupled else Adam)(
            [{"params": list(group["params"])} for group in optimizer.param_groups], **hyper, **options
        )
        made.load_state_dict(optimizer.state_dict())
        made.defaults.update({k: v for k, v in optimizer.defaults.items() if k in hyper})
        return made

    # --- parameters -----------------------------------------------------------------------------

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if self._ready:
            try:
                self._check_groups(self.param_groups)
                self._adopt(p for p in self.param_groups[-1]["params"] if p.requires_grad)
            except Exception:
                self.param_groups.pop()
                raise

    def _check_groups(self, groups):
        named = []
        for index, group in enumerate(groups):
            check_hyperparameters(group, f"group {index}")
            for position, p in enumerate(group["params"]):
                name = self._name(p, index, position)
                torch_support.check_parameter(p, name)
                named.append((name, p))
        torch_support.check_disjoint(named)

    def _default_threads(self):
        beside_gpu = self._stream is not None and self._stream.device_link is not None
        beside_gpu = beside_gpu or any(p.is_cuda for group in self.param_groups for p in group["params"])
        if not beside_gpu or os.environ.get("OMP_NUM_THREADS"):
            return 0
        return max(1, _orlop.default_threads() - _ISSUING_THREADS)

    def _name(self, p, group=None, position=None):
        if p not in self._names and group is not None:
            given = self.param_groups[group].get("param_names")
            shape = list(p.shape)
            self._names[p] = given[position] if given else f"parameter {position} of group {group} {shape}"
        return self._names[p]

    def _slot_of(self, p):
        if p not in self._slots:
            raise errors.UsageError(
                "this tensor is frozen or not a parameter of the optimizer: it has no states"
            )
        return self._slots[p]

    def _is_away(self, p):
        """Whether the weights are not the optimizer's own memory, so that they have to be copied."""
        return p.is_cuda or self._is_streamed(p)

    def _is_streamed(self, p):
        return self._stream is not None and self._stream.owns(p)

    def _link_of(self, p):
        """What copies gradients down and weights up; None where the optimizer works on them in place."""
        if self._is_streamed(p):
            return self._stream.link
        if not self._is_away(p):
            return None
        if p.device not in self._links:
            shared = self._stream.device_link if self._stream is not None else None
            self._links[p.device] = shared or DeviceLink(p.device, self._device_limit)
        return self._links[p.device]

    def _adopt(self, params):
        """Makes room for the states of parameters that have none yet, in one piece."""
        params = [p for p in params if p not in self._slots]
        if not params:
            return
        leaves = [self._leaves(p) for p in params]
        if any(leaves) and (ranks := _world_size()) > 1:
            raise errors.UsageError(
                f'gradients="leave" takes gradients before {ranks} ranks have averaged them; '
                'use gradients="stay"'
            )
        specs = [
            _orlop.TensorSpec(
                name=self._names[p],
                dtype=torch_support.DTYPES[p.dtype],
                moment_dtype=torch_support.DTYPES[self._moments],
                numel=p.numel(),
                weights=0 if self._is_away(p) else p.data_ptr(),
                keep_gradient=leave or self._is_away(p),
                seed=len(self._slots) + i,
            )
            for i, (p, leave) in enumerate(zip(params, leaves, strict=True))
        ]
        first = self._native.add(specs, [None if self._is_away(p) else p.detach() for p in params])
        slot_links = [self._link_of(p) for p in params]
        if self._stream is not None and self._stream.device_link is not None:
            self._links.setdefault(self._stream.device_link.device, self._stream.device_link)
        for link in self._links.values():
            link.pin(self._native.ranges())
        for i, (p, link) in enumerate(zip(params, slot_links, strict=True)):
            held = leaves[i] or bool(link)
            slot = Slot(self._native, first + i, p, self._names[p], self._moments, link, held)
            slot.measures = self._nonfinite != "apply"
            if self._is_streamed(p):
                self._stream.home_is(slot)
            self._slots[p] = slot
            if leaves[i]:
                self._hook(p)

    def _follow_moves(self):
        """Parameters that `module.to()` took to another device or dtype get new room, states included."""
        if all(s.device == p.device and s.dtype == p.dtype for p, s in self._slots.items()):
            return
        old, moments = self._native, {}
        for p, slot in self._slots.items():
            slot.drop_gradient()
            if p in self.state:
                moments[p] = {key: slot.planes[key].clone() for key in MOMENT_KEYS}
        params = list(self._slots)
        self._check_groups(self.param_groups)
        self._slots = {}
        for link in self._links.values():
            link.unpin()
        old.close()
        for p in params:
            if p in self.state:
                self.state[p] = {"step": self.state[p]["step"]}
        self._native = self._parts[0] = _orlop.TensorOptimizer(self._threads)
        self._adopt(params)
        for p, saved in moments.items():
            for key, value in saved.items():
                self._slots[p].planes[key].copy_(value)
            self._show_state(p)

    # --- step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient; returns what `closure` returned.

        Raises the error of an earlier update that failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        if self._stream is not None:
            self._stream.forget_holds()
        work = self._gather()
        self.step_was_skipped = self._nonfinite != "apply" and not self._check_finite(work)
        if not self.step_was_skipped and work:
            self._update(work)
        return loss

    def _update(self, work):
        if self._gate is not None:
            rank = self._gate.rank
            work = sorted(work, key=lambda item: rank.get(item[0].param, -1))
        self.steps += 1
        for link in self._links.values():
            link.begin_uploads()
        for factor, run in itertools.groupby(work, key=lambda item: item[0].factor):
            run = list(run)
            updates, owners = [], []
            for slot, group in run:
                slot.follow_weights()
                view, owner = slot.view()
                hyper = self._hyper(slot, group)
                updates.append(_orlop.TensorUpdate(slot.index, view, hyper, *slot.fence(), slot.is_written()))
                owners += [owner, slot.arrival]
            version = self._native.update(updates, factor, self.steps, owners)
            for slot, _ in run:
                slot.job = version
                self.state[slot.param]["step"] += 1
                if slot.link:
                    slot.link.upload(self._native, slot, version)
                slot.wrote_weights()
        if self._stream is not None:
            self._stream.fetch_resident()
        if self._gate is not None:
            self._gate.close([slot for slot, _ in work])
            return
        for link in self._links.values():
            link.make_current_stream_wait()
        if any(slot.link is None for slot, _ in work):
            self.synchronize()

    def _hyper(self, slot, group):
        state = self._show_state(slot.param)
        beta1, beta2 = group["betas"]
        return _orlop.AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
            step=int(state["step"]) + 1,
        )

    def synchronize(self):
        """Waits until every weight of the last step is written; raises what went wrong."""
        self._native.synchronize()
        if self._gate is not None:
            self._gate.open_all()
        if self._stream is not None:
            self._stream.refresh()

    def close(self):
        """Waits for what runs and gives the host memory back, except what a state_dict still holds."""
        self.zero_grad()
        if self._stream is not None:
            self._stream.leave_optimizer()
        self._finalizer()
        self.state.clear()
        self._slots.clear()

    def __deepcopy__(self, memo):
        raise errors.UsageError("an optimizer over host memory cannot be copied; use state_dict()")

    def __reduce_ex__(self, protocol):
        raise errors.UsageError("an optimizer over host memory cannot be pickled; save its state_dict()")


class Adam(AdamW):
    """Adam with the weight decay in the gradient (L2), as torch.optim.Adam; all else as AdamW."""

    _decoupled = False

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, **options
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def live_optimizers():
    """Every AdamW of this process that is not gone or closed."""
    return [optimizer for optimizer in _live if optimizer._finalizer.alive]


def _world_size():
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _shut_down(owner, hooks, links, parts):
    """The end of an optimizer, called once: by close(), by the collector or at exit. Not in a fork, which has
    neither its thread nor its memory."""
    if os.getpid() != owner:
        return
    for handles in hooks.values():
        for handle in handles:
            handle.remove()
    hooks.clear()
    for link in links.values():
        link.close()
    for native in parts:
        native.close()
