"""One parameter as the optimizer sees it: its planes in host memory and its gradient, wherever it is."""

from __future__ import annotations

import math

import torch

from . import _orlop, errors
from .gradient_sum import DeviceSum, HostSum, make_sum
from .offloaded_gradient import OffloadedGradient
from .torch_support import DTYPES, flat, in_layout_of

MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
# The part of the fp32 master that the weights themselves do not hold, by their dtype.
MASTER_KEY = {torch.bfloat16: "master_lo", torch.float16: "master", torch.float32: None}
_PLANE_OF_KEY = {"master_lo": "lo"}


class Slot:
    """The states of one parameter. `link` moves data of parameters on a device; None on the host."""

    def __init__(self, native, index: int, param: torch.Tensor, name: str, moments, link, hold: bool):
        self.native, self.index, self.param, self.name, self.link = native, index, param, name, link
        self.device, self.dtype = param.device, param.dtype
        self.numel = param.numel()
        self.address = param.data_ptr()
        self.version = param._version  # of the weights, when this optimizer last wrote or read them
        self.planes = {key: self._plane(key, moments) for key in MOMENT_KEYS}
        if MASTER_KEY[self.dtype]:
            self.planes[MASTER_KEY[self.dtype]] = self._plane(MASTER_KEY[self.dtype], torch.float32)
        self.host_weights = self._flat_plane("weights", self.dtype) if link else None
        self.host_gradient = self._flat_plane("gradient", self.dtype) if hold else None
        self.measures = True  # whether every step asks for the norm
        self.planes_seen = None  # versions of weights and master in host memory at the last update
        self.job = 0  # version of the last work that was submitted for this tensor
        self.loaded_rest = None  # a loaded master's rest, until weights and rest have met
        self.stand_in: OffloadedGradient | None = None
        self.sum: HostSum | DeviceSum | None = None  # made when a second micro-batch comes
        self.left_last = None  # event of the last copy to host memory
        self.count, self.expected = 0, 1
        self._forget()
        if link:
            self.adopt_weights()

    # --- planes ---------------------------------------------------------------------------------

    def _flat_plane(self, plane: str, dtype: torch.dtype) -> torch.Tensor:
        kind = _orlop.DType.F32 if dtype == torch.float32 else _orlop.DType.BF16
        array = self.native.plane(self.index, plane, self.numel, kind)
        return torch.from_numpy(array).view(dtype)

    def _plane(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        dtype = torch.int16 if key == "master_lo" else dtype
        flat_plane = self._flat_plane(_PLANE_OF_KEY.get(key, key), dtype)
        return flat_plane.as_strided(self.param.size(), self.param.stride())

    def adopt_weights(self) -> None:
        """Takes the weights of a device as what the master is to be."""
        weights = self.link.read_weights(self.param)
        self.native.adopt_weights(self.index, weights.data_ptr())
        if self.loaded_rest is not None:
            self.planes[MASTER_KEY[self.dtype]].copy_(self.loaded_rest)
        self.version = self.param._version

    def follow_weights(self) -> None:
        """Notices weights that lie elsewhere, or were written, since the last update."""
        if self.link:
            if self.version != self.param._version:
                self.adopt_weights()
            self.loaded_rest = None
        elif self.address != self.param.data_ptr():
            self.native.move_weights(self.index, self.param.data_ptr(), self.param.detach())
            self.address = self.param.data_ptr()

    def is_written(self) -> bool:
        """Whether host weights or master may have been written in place since the last call, as torch's version
        counters tell; the memory of a user's own parameter may have been written without torch knowing."""
        if not self.link or MASTER_KEY[self.dtype] is None:
            return True
        versions = self.host_weights._version, self.planes[MASTER_KEY[self.dtype]]._version
        written, self.planes_seen = versions != self.planes_seen, versions
        return written

    def wrote_weights(self) -> None:
        """The update changes the weights behind autograd's back: say so, as any in-place write does."""
        torch.autograd.graph.increment_version(self.param)
        self.version = self.param._version

    # --- gradient -------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.stand_in = None
        self.expected = self.count or self.expected  # micro-batches of the last step
        self.count = 0  # micro-batches in it
        self.factor = 1.0
        self.has_left = True  # the copy in host memory, or on its way there, is all of it
        self.square_sum: tuple[float, bool] | None = None  # of a gradient that has left
        self.measured = False  # the optimizer's thread sums the squares of what is in host memory
        self.copied = False  # an equal copy of the plain `p.grad` is in host memory
        self.arrival = None  # event of the copy in flight

    def before_accumulation(self) -> None:
        """Backward is about to add to `p.grad`, which must then be empty or a plain tensor."""
        if self.stand_in is None:
            return
        if self.param.grad is not self.stand_in:  # dropped or replaced by the user
            self._forget()
        elif self.factor != 1.0:
            self.restore_gradient(self.stand_in)
        else:
            self.param.grad = None

    def take_gradient(self) -> None:
        """Moves `p.grad` to host memory, or adds it to the sum of earlier micro-batches. That sum leaves with the
        micro-batch that was the last one in the step before; should another one come, it leaves again."""
        grad = self.param.grad
        if grad is None or grad is self.stand_in:
            return
        if grad.dtype != self.dtype or grad.layout != torch.strided:
            return  # stays where it is
        grad = flat(in_layout_of(grad.detach(), self.param))
        self.square_sum, self.measured = None, False
        self._add(grad)
        self.count += 1
        if self.count == self.expected:
            self.settle()
        self.stand_in = OffloadedGradient.make(self.param, self)
        self.param.grad = self.stand_in

    def _add(self, grad: torch.Tensor) -> None:
        if self.count == 0:
            if self.expected > 1 and self.sum is not None and self.sum.on_device:
                self.sum.start_with(grad)
                self.has_left = False
            else:
                self.copy_to_host(grad)
                self.measure()
            return
        if self.sum is None:
            self.sum = make_sum(self)
        if self.count == 1 and self.has_left:
            self.sum.start()
        self.sum.add(grad)
        self.has_left = False

    def settle(self) -> None:
        """The gradient as it stands is on its way to host memory."""
        if not self.has_left:
            self.sum.leave()
            self.has_left = True

    def copy_gradient(self) -> None:
        """Copies the plain `p.grad` of a device for the update, and leaves it there."""
        self.copy_to_host(flat(in_layout_of(self.param.grad.detach(), self.param)))
        self.measure()
        self.copied = True

    def copy_to_host(self, grad: torch.Tensor) -> None:
        """Behind the last job, which may still read what is overwritten."""
        if self.link:
            self.arrival = self.left_last = self.link.offload(grad, self)
            return
        self.native.wait([self.index])
        self.host_gradient.copy_(grad)

    def measure(self) -> None:
        if not self.link or not self.measures:  # summed when somebody asks
            return
        view = self.view_of(self.host_gradient)
        self.job = self.native.measure(self.index, view, *self.fence(), self.arrival)
        self.measured = True

    def fence(self) -> tuple[int, int]:
        """What the optimizer's thread calls to wait for the gradient: address and argument."""
        return self.link.fence(self.arrival) if self.link else (0, 0)

    def drop_gradient(self) -> None:
        if self.is_away:
            self.param.grad = None
        if self.stand_in is not None or self.copied:
            self._forget()

    @property
    def is_away(self) -> bool:
        return self.stand_in is not None and self.param.grad is self.stand_in

    def _arrived(self) -> torch.Tensor:
        """The gradient (numel) in host memory, before `factor`, complete."""
        self.settle()
        if self.arrival is not None:
            self.arrival.synchronize()
        else:
            self.native.wait([self.index])
        return self.host_gradient

    def view(self) -> tuple[_orlop.GradientView, torch.Tensor]:
        """The gradient that an update reads, and the tensor that owns its memory."""
        if self.is_away or self.copied:
            self.settle()
            owner = self.host_gradient
        else:
            owner = in_layout_of(self.param.grad.detach(), self.param)
        return self.view_of(owner), owner

    def view_of(self, values: torch.Tensor) -> _orlop.GradientView:
        return _orlop.GradientView(values.data_ptr(), DTYPES[values.dtype], self.numel)

    def squares(self) -> tuple[float, bool]:
        """Sum of the squares of the gradient before `factor`, and whether all of it is finite."""
        if self.square_sum is not None and self.is_away:
            return self.square_sum
        if self.is_away:
            self.settle()
        if self.measured:
            total, bad = self.native.measured(self.index)
        else:
            if self.is_away or self.copied:
                self._arrived()
            total, bad, _ = self.native.norm([self.view()[0]])
        self.square_sum = (total, bad < 0)
        return self.square_sum

    # What OffloadedGradient asks. A stand-in that is no longer in `p.grad` has lost its gradient.

    def _check_current(self, gradient: OffloadedGradient) -> None:
        if gradient is not self.stand_in:
            raise errors.UsageError(
                f"this gradient of {self.name} is of an earlier backward and was overwritten or dropped"
            )

    def read_gradient(self, gradient: OffloadedGradient) -> torch.Tensor:
        self._check_current(gradient)
        value = self._arrived().to(device=self.device, dtype=torch.float32, copy=True)
        if self.factor != 1.0:
            value *= self.factor
        return value.to(self.dtype).as_strided(self.param.size(), self.param.stride())

    def restore_gradient(self, gradient: OffloadedGradient) -> torch.Tensor:
        value = self.read_gradient(gradient)
        if self.param.grad is gradient:
            self.param.grad = value
        self._forget()
        return value

    def scale_gradient(self, gradient: OffloadedGradient, factor: float) -> None:
        self._check_current(gradient)
        self.factor *= factor

    def gradient_norm(self, gradient: OffloadedGradient) -> float:
        self._check_current(gradient)
        return math.sqrt(self.squares()[0]) * abs(self.factor)

    def gradient_is_finite(self, gradient: OffloadedGradient) -> bool:
        self._check_current(gradient)
        return self.squares()[1] and math.isfinite(self.factor)
