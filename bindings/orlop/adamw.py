"""Door 1: a torch.optim.Optimizer whose states live in host memory, and in what is free on the device."""

from __future__ import annotations

import logging
import os
import weakref

from . import _orlop, errors, torch_support
from .torch_support import torch

from .adam_checks import check_bytes, check_choice, check_hyperparameters, check_known  # isort: skip
from .adam_gradients import GradientSide  # isort: skip
from .adam_slots import SlotSide  # isort: skip
from .adam_state import StateSide  # isort: skip
from .adam_update import UpdateSide  # isort: skip
from .drive_options import state_drives  # isort: skip
from .forward_gate import ForwardGate  # isort: skip
from .gradient_batch import Collector, Unit  # isort: skip
from .offloaded_gradient import OffloadedGradient  # isort: skip
from .older_torch import names_beside  # isort: skip
from .optimizer_slot import Slot  # isort: skip
from .placement import Placement, states_limit  # isort: skip
from .streamed_block import is_managed  # isort: skip

_log = logging.getLogger("orlop")
_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ISSUING_THREADS = 2  # Python's and autograd's
_live: weakref.WeakSet[AdamW] = weakref.WeakSet()


class AdamW(SlotSide, GradientSide, UpdateSide, StateSide, torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with masters, moments and, on a GPU, gradients in host memory or in what is
    free on the GPU.

    A drop-in for torch.optim.AdamW: the same arguments, param_groups and state_dict, in fp32 equal to it
    within rounding. 16-bit parameters have an exact fp32 master: 10 bytes of host memory per bf16 element
    beside the weight itself, 12 per fp16 element, 8 per fp32 element, none for frozen ones.

    Weights may be written between steps: under torch.no_grad(), through `p.data`, or by giving a parameter other `data`
    of its shape. The next step starts there, with the same bits wherever states live; in bf16 what the master has below
    the weight stays, at most half a unit in its last place. (No version counter tells of what is written through
    `p.data` in place: on a GPU, changes of signs or order alone are not seen with states in host memory, nor is any with
    nonfinite="apply", nor in fp16 with states on the GPU.)

    module: hides the update under the next forward. step() returns at once, and each block of `module` waits
        for its own weights when its forward begins; whoever reads weights otherwise calls synchronize().
    gradients: "leave" takes each gradient, while backward runs, to where its states live and sums micro-batches in
        fp32; those of a block (with `module`) go together, with the last of them, those of small blocks once they are
        64 MiB or the backward ends. "stay" leaves `p.grad` alone.
        "auto": leave on a GPU and with `module`, else stay. Among several ranks of torch.distributed they must stay:
        DDP averages them in `p.grad`. No call here is a collective, so that any rank may read states alone. While a
        gradient is away `p.grad` is an OffloadedGradient: clipping, scaling and reading work on it.
    nonfinite: "skip" leaves everything as it is when a gradient holds NaN or Inf, counts it in
        `skipped_steps` and names the parameter; "raise" raises NonFiniteError; "apply" does what torch does.
    moments: "fp32", or "bf16" with stochastic rounding (half the memory).
    states: where masters and moments of parameters on a GPU live, and their update runs; the bits are the same.
        "auto": they begin in host memory; after the first step, whose highest use of GPU memory is known then, those
        that fit beside it move to the GPU, with their gradients, in the order in which a forward uses the weights:
        the update of the first would have nothing to hide under. "host": all in host memory. A number: at most so
        many bytes of states and their gradients on the GPU. `placement()` and repr() show which live where.
    nvme: directories, one per drive, for the states that are not on a GPU: host memory then holds weights, gradients
        and a few slots. Or a mapping with the keys of a run's section `nvme`, and slot and host, the bytes of one
        slot and of all of them. The files go with the optimizer; every process needs directories of its own.
    device_limit: bytes of tensors on a GPU, all of torch's counted, up to which states and fp32 sums of
        micro-batches are kept there; what would exceed it is in host memory. None: what is free, less a reserve of
        1 GiB and a sixteenth of all.
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
        states="auto",
        nvme=None,
        threads=0,
        device_limit=None,
        stream=None,
    ):
        check_choice("gradients", gradients, ("auto", "leave", "stay"))
        check_choice("nonfinite", nonfinite, ("skip", "raise", "apply"))
        check_choice("moments", moments, tuple(_MOMENTS))
        check_bytes("device_limit", device_limit)
        self._module = module
        self._gradients, self._nonfinite, self._moments = gradients, nonfinite, _MOMENTS[moments]
        self._device_limit = device_limit
        self._drives = state_drives(nvme)
        self._placement = Placement(self, states_limit(states))
        self._stream = stream  # set by orlop.wrap: brings the weights of blocks
        self._slots: dict[torch.Tensor, Slot] = {}
        self._links: dict[torch.device, object] = {}
        self._hooks: dict[torch.Tensor, list] = {}
        self._collectors: dict[torch.device, Collector] = {}
        self._units: dict[tuple, Unit] = {}
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
        self._native = self._make_native()
        self._parts = [self._native]  # what outlives this object in its finalizer
        self._adopt(p for group in self.param_groups for p in group["params"] if p.requires_grad)
        if self._drives is not None:
            places = ", ".join(self._drives.nvme.paths)
            _log.info(
                "optimizer states that no GPU has are on drives (%s); the update runs on the CPU", places
            )
        self._ready = True
        if module is not None:
            self._gate = ForwardGate(self, module)
            self._hooks[None] = self._gate.handles
        self._make_units(self._slots.values())
        _live.add(self)
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), self._hooks, self._links, self._parts
        )
        if stream is not None:  # called before the other, which came first; at exit nobody needs the weights
            weakref.finalize(self, _leave_weights, os.getpid(), stream).atexit = False

    @classmethod
    def from_torch(cls, optimizer, **options):
        """An orlop optimizer in the place of a torch.optim.AdamW or Adam: its groups, hyperparameters and
        state. The two share the groups from then on, so that a scheduler over the one drives the other.
        `options` are those of this class that torch lacks."""
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
        optimizer.param_groups = made.param_groups
        optimizer._opt_called = True  # its scheduler warns where it has never been stepped
        return made

    # --- parameters -----------------------------------------------------------------------------

    def add_param_group(self, param_group):
        super().add_param_group(names_beside(param_group))
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
            check_hyperparameters(group, f"group {index}", self.defaults["lr"])
            for position, p in enumerate(group["params"]):
                name = self._name(p, index, position)
                torch_support.check_parameter(p, name)
                if p.requires_grad and is_managed(p) and not self._is_streamed(p):
                    raise errors.UsageError(
                        f"{name} is in a block of a wrapped model, which trains through the optimizer that orlop.wrap "
                        "makes: give that the arguments of this one, orlop.wrap(model, {...}), or freeze it"
                    )
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
            shape = "" if torch_support.is_uninitialized(p) else f" {list(p.shape)}"
            self._names[p] = given[position] if given else f"parameter {position} of group {group}{shape}"
        return self._names[p]

    # --- step -----------------------------------------------------------------------------------

    @torch_support.not_compiled
    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient; returns what `closure` returned.

        Raises the error of an earlier update that failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._module is not None:
            check_known(self._module, self._names)
        self.synchronize()
        if self._stream is not None:
            self._stream.begin_step()
        work = self._gather()
        self.step_was_skipped = self._nonfinite != "apply" and not self._check_finite(work)
        if not self.step_was_skipped and work:
            self._update(work)
            self._placement.after_step()
        return loss

    @torch_support.not_compiled
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
        try:
            if self._stream is not None:
                self._stream.leave_optimizer()
        finally:
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


def _leave_weights(owner, stream):
    """An optimizer that nobody closed is gone: the model keeps its weights."""
    if os.getpid() == owner:
        try:
            stream.leave_optimizer()
        except errors.Error as error:  # nobody calls who could be told
            _log.warning("the weights of an optimizer that is gone: %s", str(error))


def _shut_down(owner, hooks, links, parts):
    """The end of an optimizer, called once: by close(), by the collector or at exit. Not in a fork, which has
    neither its thread nor its memory. Gradients that are away go with it."""
    if os.getpid() != owner:
        return
    for p, handles in hooks.items():
        if p is not None and isinstance(p.grad, OffloadedGradient) and p.grad.is_of(handles):
            p.grad = None
        for handle in handles:
            handle.remove()
    hooks.clear()
    for link in links.values():
        link.close()
    for native in parts:
        native.close()
