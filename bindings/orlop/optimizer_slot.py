"""One parameter as the optimizer sees it: the home of its states, and its gradient, wherever it is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch

from . import _orlop, errors
from .gradient_batch import GradientHook, keep, settle, take_in_backward
from .gradient_sum import DeviceSum, HostSum
from .offloaded_gradient import OffloadedGradient
from .state_home import MASTER_KEY, MOMENT_KEYS, DeviceHome, HostHome
from .torch_support import in_layout_of

_Tensor, _STRIDED = torch.Tensor, torch.strided
_LARGEST_FACTOR = torch.finfo(torch.float32).max


class Slot:
    """A parameter, the home of its states and the gradient of the step under way.

    measures: whether every step asks for the norm. leave_device: what moves the states to host memory.
    """

    # More than a dictionary of attributes that Python keeps fast.
    __slots__ = (
        "__weakref__", "added", "address", "brought_back", "copied", "count", "device", "device_index", "dtype", "expected",
        "factor", "fixed", "has_left", "home", "hook", "is_contiguous", "leave_device", "link", "loaded_rest",
        "made", "measures", "moments", "name", "numel", "param", "reference", "seed", "shape", "square_sum", "stand_in",
        "strides", "sum", "uploaded", "version",
    )  # fmt: skip
    leave_device: Callable[[Slot], None]

    def __init__(self, param: torch.Tensor, name: str, moments: torch.dtype, seed: int, home: HostHome):
        self.param, self.name, self.moments, self.seed = param, name, moments, seed
        self.home: HostHome | DeviceHome = home
        self.link = home.link  # copies between device and host memory; None for parameters on the host
        self.device, self.dtype = param.device, param.dtype
        self.numel = param.numel()
        self.address = param.data_ptr()
        # Of blocks that come and go, orlop.wrap sees to it.
        self.fixed = self.link is not None and self.link.fetches_blocks
        self.shape, self.strides = param.size(), param.stride()
        self.device_index = param.get_device()  # -1: the host
        self.is_contiguous = param.is_contiguous()
        self.reference = weakref.ref(self)
        # Of the weights, when this optimizer last wrote or read them; None once they were written unseen.
        self.version = param._version
        self.measures = True
        self.loaded_rest = None  # a loaded master's rest, until weights and rest have met
        self.stand_in: OffloadedGradient | None = None
        self.made: OffloadedGradient | None = None  # the last stand-in, in use or not
        self.brought_back: weakref.ref | None = None  # the last one whose gradient is a plain `p.grad` again
        self.added: torch.Tensor | None = None  # what autograd adds to the stand-in, until it is taken
        self.hook: GradientHook | None = None  # where gradients leave while backward runs
        self.sum: HostSum | DeviceSum | None = None  # made when a second micro-batch comes
        self.uploaded = None  # event behind the weights of the last update
        self.count, self.expected = 0, 1
        self._forget()
        if self.link:
            home.adopt(self)

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """Moments and the rest of the master where they live, in the parameter's layout."""
        return self.home.planes

    def has_moved(self) -> bool:
        """Whether the parameter has another device, dtype, shape or order of elements than its states."""
        param = self.param
        return (
            param.device != self.device
            or param.dtype is not self.dtype
            or not (self.fixed or (param.size() == self.shape and param.stride() == self.strides))
        )

    def states_to_move(self) -> dict[str, torch.Tensor]:
        """Copies of the moments, and of the rest of a master whose weights are as the last update left them."""
        states = {key: self.planes[key].clone() for key in MOMENT_KEYS}
        rest = MASTER_KEY[self.dtype]
        if rest is not None and self.param.dtype is self.dtype and self.version == self.param._version:
            states[rest] = (self.planes[rest] if self.loaded_rest is None else self.loaded_rest).clone()
        return states

    def follow_weights(self) -> None:
        """Notices weights that lie elsewhere, or were written, since the last update."""
        self.home.follow(self)

    def wrote_weights(self) -> None:
        """The update changes the weights behind autograd's back: say so, as any in-place write does."""
        torch.autograd.graph.increment_version(self.param)
        self.version = self.param._version

    # --- gradient -------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.stand_in = self.added = None
        self.expected = self.count or self.expected  # micro-batches of the last step
        self.count = 0  # micro-batches in it
        self.factor = 1.0
        self.has_left = True  # what the home keeps, or what is on its way there, is all of it
        self.square_sum: tuple[float, bool] | None = None  # of a gradient that has left
        self.copied = False  # the home has an equal copy of the plain `p.grad`
        self.home.forget_gradient()

    def accumulate(self, gradient: OffloadedGradient, other: torch.Tensor) -> None:
        """Backward adds `other` to the stand-in that is in `p.grad`."""
        self._check_current(gradient)
        if self.factor != 1.0:
            self.restore_gradient(self.stand_in).add_(other)
            return
        if other.layout is not torch.strided:
            other = other.to_dense()
        self.added = other.to(self.dtype)
        if self.hook is None:
            take_in_backward([self])

    def forget_dropped(self) -> None:
        """Gives up what was kept of a gradient that the user has dropped or replaced."""
        if self.stand_in is not None and self.param.grad is not self.stand_in:
            self._forget()

    def new_gradient(self) -> torch.Tensor | None:
        """What backward has written since the last one was taken: `p.grad`, or what is to be added to it."""
        if self.added is not None:
            return self.added
        return None if self.is_away else self.param.grad

    def plain_gradient(self) -> torch.Tensor | None:
        """The new gradient in the weights' layout; None if there is none, or one that stays where it is: one of another
        kind, or of weights that have moved, whose states the next step is to move first."""
        grad = self.new_gradient()
        if (
            grad is None
            or grad.dtype is not self.dtype
            or grad.layout is not torch.strided
            or self.has_moved()
        ):
            return None
        return grad if self.keeps_as_it_is(grad) else in_layout_of(grad.detach(), self.param)

    def keeps_as_it_is(self, grad: torch.Tensor) -> bool:
        """Whether its memory is what the home keeps. (Asked for every gradient: in the order of what it costs.)"""
        return (
            type(grad) is _Tensor
            and grad.dtype is self.dtype
            and grad.layout is _STRIDED
            and not grad.requires_grad
            and grad.get_device() == self.device_index
            and self.is_contiguous
            and grad.shape == self.shape
            and not grad.is_neg()
            and grad.is_contiguous()
        )

    def settle(self) -> None:
        """The gradient as it stands is on its way to the home."""
        if not self.has_left:
            settle([self])

    def lend_gradient(self) -> None:
        """Gives the home the plain `p.grad`, which stays where it is."""
        keep([self], [in_layout_of(self.param.grad.detach(), self.param)])
        self.copied = True

    def drop_gradient(self) -> None:
        if self.is_away:
            self.param.grad = None
        if self.stand_in is not None or self.copied:
            self._forget()

    @property
    def is_away(self) -> bool:
        return self.stand_in is not None and self.param.grad is self.stand_in

    def gradient_to_use(self) -> torch.Tensor:
        """What norm and update read: the gradient that the home keeps, or the plain one in the weights' layout."""
        if self.is_away or self.copied:
            self.settle()
            return self.home.gradient
        return in_layout_of(self.param.grad.detach(), self.param)

    def view(self) -> tuple[_orlop.GradientView, torch.Tensor]:
        """The gradient that an update on the host reads, and the tensor that owns its memory."""
        owner = self.gradient_to_use()
        return self.home.view(owner), owner

    def squares(self) -> tuple[float, bool]:
        """Sum of the squares of the gradient before `factor`, and whether all of it is finite."""
        if self.square_sum is not None and self.is_away:
            return self.square_sum
        if self.is_away:
            self.settle()
        self.square_sum = self.home.squares(self)
        return self.square_sum

    # What OffloadedGradient asks. A stand-in that is no longer in `p.grad` has lost its gradient.

    def _check_current(self, gradient: OffloadedGradient) -> None:
        if gradient is not self.stand_in:
            raise errors.UsageError(
                f"this gradient of {self.name} is of an earlier backward and was overwritten or dropped"
            )
        if self.added is not None:
            take_in_backward([self])
            if self.is_away:  # whoever asks has what backward has added to
                self.stand_in = self.made = self.param.grad = gradient

    def read_gradient(self, gradient: OffloadedGradient) -> torch.Tensor:
        """A copy, which is no view of anything."""
        self._check_current(gradient)
        self.settle()
        value = self.home.arrived()
        if self.factor != 1.0:
            value = value.to(device=self.device, dtype=torch.float32, copy=True).mul_(self.factor)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).copy_(
            value
        )

    def restore_gradient(self, gradient: OffloadedGradient) -> torch.Tensor:
        value = self.read_gradient(gradient)
        self.put_back(gradient, value)
        return value

    def put_back(self, gradient: OffloadedGradient, value: torch.Tensor) -> None:
        """`value` becomes the plain `p.grad`, unless the user has dropped this gradient. Whoever has kept it means
        `value` from now on, until a gradient of this parameter leaves again."""
        if self.is_away:
            self.param.grad = value
        gradient._plain, self.brought_back = value, weakref.ref(gradient)
        self.made = None  # serves no more
        self._forget()

    def replace_gradient(self, gradient: OffloadedGradient, value: torch.Tensor) -> None:
        self._check_current(gradient)
        self.put_back(gradient, value)

    def scale_gradient(self, gradient: OffloadedGradient, factor: float) -> None:
        self._check_current(gradient)
        product = self.factor * factor
        # The update takes finite factors alone; where no step checks, others are to be applied: to the gradient.
        if self.measures or abs(product) <= _LARGEST_FACTOR:
            self.factor = product
        else:
            self.restore_gradient(gradient).mul_(factor)

    def gradient_norm(self, gradient: OffloadedGradient) -> float:
        self._check_current(gradient)
        return math.sqrt(self.squares()[0]) * abs(self.factor)

    def gradient_is_finite(self, gradient: OffloadedGradient) -> bool:
        self._check_current(gradient)
        return self.squares()[1] and math.isfinite(self.factor)
