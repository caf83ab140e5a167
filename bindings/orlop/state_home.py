"""Where the optimizer's states of one parameter live, and who updates them there.

A home keeps masters, moments and the gradient that the next update reads, knows the gradient's norm, and follows
weights that somebody else writes. Both homes give the same bits.
"""

from __future__ import annotations

import torch

from . import _orlop
from .torch_support import DTYPES, flat

MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
# The part of the fp32 master that the weights themselves do not hold, by their dtype.
MASTER_KEY = {torch.bfloat16: "master_lo", torch.float16: "master", torch.float32: None}
PLANE_OF_KEY = {"master_lo": "lo"}
_REST_BYTES = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}


def device_bytes(param: torch.Tensor, moments: torch.dtype) -> int:
    """Of a parameter's states and its gradient on the device, beside its weights."""
    return param.numel() * (2 * moments.itemsize + _REST_BYTES[param.dtype] + param.element_size())


class HostHome:
    """States in the memory of `native`, the host's optimizer. With a link the weights are elsewhere: a compute copy
    of them is kept here (None: it is on drives, too), and the link copies it up and gradients down."""

    on_device = False
    place = "host"

    def __init__(self, native, index: int, param: torch.Tensor, moments: torch.dtype, link, hold: bool):
        self.native, self.index, self.link = native, index, link
        self.dtype, self.numel = param.dtype, param.numel()
        self.planes = {key: self._plane(key, moments, param) for key in MOMENT_KEYS}
        rest = MASTER_KEY[self.dtype]
        if rest is not None:
            kind = torch.int16 if rest == "master_lo" else torch.float32
            self.planes[rest] = self._plane(rest, kind, param)
        self.weights = self._flat_plane("weights", self.dtype) if link else None
        self.gradient = self._plane("gradient", self.dtype, param) if hold else None
        if hold:
            self.target = _orlop.GradientTarget(DTYPES[self.dtype], self.numel, self.gradient.data_ptr())
        if link:  # of the squares of weights: rows of the link's WeightSums
            self.left_sum = _orlop.GradientTarget(DTYPES[self.dtype], self.numel)
            self.found_sum = _orlop.GradientTarget(DTYPES[self.dtype], self.numel)
        self.measured = False  # the sum of the gradient's squares is there, or on its way
        self.sums = None  # the device's that has it, in the target's row; None: the optimizer's thread
        # Event of the last copy from the device; None behind what the optimizer's thread makes.
        self.arrival = None
        # Of the word that says how far its jobs have come.
        self.version_address = native.written_address(index)
        self.job = 0  # version of the last work that was submitted for this tensor
        self.turn = 0  # among the tensors of that work
        self._planes_seen = None  # versions of weights and master at the last update

    def _flat_plane(self, plane: str, dtype: torch.dtype) -> torch.Tensor | None:
        kind = _orlop.DType.F32 if dtype == torch.float32 else _orlop.DType.BF16
        array = self.native.plane(self.index, plane, self.numel, kind)
        return None if array is None else torch.from_numpy(array).view(dtype)

    def _plane(self, key: str, dtype: torch.dtype, param: torch.Tensor) -> torch.Tensor:
        plane = self._flat_plane(PLANE_OF_KEY.get(key, key), dtype)
        return plane.as_strided(param.size(), param.stride())

    # --- weights --------------------------------------------------------------------------------

    def adopt(self, slot) -> None:
        """Takes the weights of a device as what the master is to be."""
        weights = self.link.read_weights(slot.param)
        if weights is not None:
            self.take_weights(slot, weights)
            self.link.leave_weights([self], [slot.param])
        else:  # on drives, which the master follows
            slot.version = slot.param._version

    def take_weights(self, slot, weights: torch.Tensor) -> None:
        """`weights` (numel) in host memory become the compute copy, and what the master is to be."""
        self.native.adopt_weights(self.index, weights.data_ptr())
        if slot.loaded_rest is not None:
            self.planes[MASTER_KEY[self.dtype]].copy_(slot.loaded_rest)
            slot.loaded_rest = None
        slot.version = slot.param._version

    def rest_to_keep(self, rest: torch.Tensor) -> torch.Tensor:
        """Of a loaded master's rest, until weights and rest have met."""
        return rest.detach().clone()

    def follow(self, slot) -> None:
        """Notices weights that lie elsewhere, or were written, since the last update."""
        if self.link:
            lies_elsewhere = not slot.fixed and slot.address != slot.param.data_ptr()
            if lies_elsewhere or slot.version != slot.param._version:
                self.adopt(slot)
            if lies_elsewhere:
                slot.address = slot.param.data_ptr()
            slot.loaded_rest = None
        elif slot.address != slot.param.data_ptr():
            self.native.move_weights(self.index, slot.param.data_ptr(), slot.param.detach())
            slot.address = slot.param.data_ptr()

    def is_written(self) -> bool:
        """Whether fp16 weights or master may have been written in place since the last call, as torch's version
        counters tell; the memory of a user's own parameter may have been written without torch knowing. (Others are
        themselves of the master.)"""
        if self.dtype != torch.float16:
            return False
        if not self.link:
            return True
        version = 0 if self.weights is None else self.weights._version  # on drives nobody else writes them
        versions = version, self.planes["master"]._version
        written, self._planes_seen = versions != self._planes_seen, versions
        return written

    def read_master(self, slot) -> torch.Tensor:
        """(numel) fp32 in host memory, a copy."""
        if not self.link and self.dtype == torch.float16:  # written in place, or not updated yet
            self.native.adopt_weights(self.index, slot.param.data_ptr())
        return torch.from_numpy(self.native.read_master(self.index, self.numel))

    def write_planes(self, values: dict[str, torch.Tensor]) -> None:
        for key, value in values.items():
            self.planes[key].copy_(value)

    def write_master(self, slot, values: torch.Tensor) -> None:
        """`values` (numel) fp32 in host memory; the weights become their rounding."""
        self.native.write_master(self.index, values.numpy())
        if self.link:
            self.link.write_weights(slot)

    def wait_written(self, slot) -> None:
        """What torch's current stream is given from here on finds the weights of the last update."""
        self.link.wait_upload(slot)

    # --- gradient -------------------------------------------------------------------------------

    @staticmethod
    def keep(homes: list[HostHome], grads: list[torch.Tensor], measures: bool) -> None:
        """Each of `grads`, in the weights' layout, becomes the gradient of its home, behind the last job, which may
        still read the one before. All homes have one link, or none. With `measures` and a link the squares are summed
        on the device, or where that has no part of Orlop behind their arrival; else when somebody asks."""
        link, native = homes[0].link, homes[0].native
        if not link:
            for home, grad in zip(homes, grads, strict=True):
                native.wait([home.index])
                home.gradient.copy_(grad)
            return
        sums = link.states if measures and link.states is not None and link.states.is_available else None
        arrival = link.offload(grads, homes, sums)
        for home in homes:
            home.arrival, home.measured, home.sums = arrival, measures, sums
        if measures and sums is None:
            job = native.measure([home.index for home in homes], *link.fence(arrival), arrival)
            for turn, home in enumerate(homes):
                home.job, home.turn = job, turn

    def became_sum(self, job: int) -> None:
        """The optimizer's thread makes the gradient here, out of a sum, and its norm."""
        self.job, self.arrival = job, None
        self.measured, self.sums = True, None

    @property
    def left_last(self):
        """Event behind what last read a gradient on the device."""
        return self.arrival

    def fence(self) -> tuple[int, int]:
        """What the optimizer's thread calls to wait for the gradient: address and argument."""
        return self.link.fence(self.arrival) if self.link else (0, 0)

    def arrived(self) -> torch.Tensor:
        """The gradient, complete."""
        if self.arrival is not None:
            self.arrival.synchronize()
        else:
            self.native.wait([self.index])
        return self.gradient

    def gradient_beside_weights(self) -> torch.Tensor:
        """The gradient where the weights are, in the order of torch's current stream."""
        self.link.wait_arrival(self.arrival)
        return self.gradient

    def squares(self, slot) -> tuple[float, bool]:
        if self.measured and self.sums is not None:
            total, bad = self.sums.read_sums()[self.target.row]
        elif self.measured:
            total, bad = self.native.measured(self.index)
        else:
            if slot.is_away or slot.copied:
                self.arrived()
            total, bad, _ = self.native.norm([self.view(slot.gradient_to_use())])
        return total, bad < 0

    def view(self, values: torch.Tensor) -> _orlop.GradientView:
        return _orlop.GradientView(values.data_ptr(), DTYPES[values.dtype], self.numel)

    def forget_gradient(self) -> None:
        self.measured = False


def last_at_work(homes: list[HostHome]) -> HostHome:
    """The one that the optimizer's thread is done with last: jobs run in order, and each takes its tensors in turn."""
    last = homes[0]
    for home in homes:
        if home.job > last.job or (home.job == last.job and home.turn > last.turn):
            last = home
    return last


class DeviceHome:
    """States on the device beside the weights, which are themselves part of the master; the gradient never leaves.

    Weights that somebody writes in place are taken as optimizers of CPU tensors take theirs: the rest of a bf16
    master stays, at most half a unit in the last place of the weight that was written (none below a zero, where it
    would be a NaN); fp16 weights that are no longer the rounded master become the master.
    """

    on_device = True

    def __init__(self, slot, link):
        param, moments = slot.param, slot.moments
        self.link, self.dtype, self.numel = link, param.dtype, param.numel()
        self.target = _orlop.GradientTarget(DTYPES[self.dtype], self.numel)  # leaves for nowhere
        self.target.row = slot.home.target.row
        self.bytes = device_bytes(param, moments)
        self.planes = {key: empty_as(param, moments) for key in MOMENT_KEYS}
        self.shard = _orlop.AdamShard(
            compute_dtype=DTYPES[self.dtype], moment_dtype=DTYPES[moments], grad_dtype=DTYPES[self.dtype],
            numel=self.numel,
        )  # fmt: skip
        self.shard.exp_avg, self.shard.exp_avg_sq = (self.planes[key].data_ptr() for key in MOMENT_KEYS)
        if self.dtype == torch.bfloat16:
            self.planes["master_lo"] = empty_as(param, torch.int16)
            self.shard.lo = self.planes["master_lo"].data_ptr()
        elif self.dtype == torch.float16:
            self.planes["master"] = empty_as(param, torch.float32)
            self.shard.master = self.planes["master"].data_ptr()
        self.gradient: torch.Tensor | None = None
        self._written_on = 0  # torch's stream that has written it
        self.measured = False  # the sum of its squares is on its way to the row
        self.left_last = None  # event of the last update, which has read the gradient
        self._lies_at(slot)

    def _lies_at(self, slot) -> None:
        slot.address = slot.param.data_ptr()
        if self.dtype == torch.float32:
            self.shard.master = slot.address
        else:
            self.shard.param = slot.address

    # --- weights --------------------------------------------------------------------------------

    def follow(self, slot) -> None:
        """Notices weights that lie elsewhere, or were written, since the last update."""
        param = slot.param
        if slot.address == param.data_ptr() and slot.version == param._version:
            return
        self._lies_at(slot)
        slot.version, slot.loaded_rest = param._version, None
        if self.dtype == torch.float16:
            weights, master = flat(param), flat(self.planes["master"])
            master.copy_(torch.where(weights != master.half(), weights.float(), master))

    def read_master(self, slot) -> torch.Tensor:
        """(numel) fp32 in host memory, a copy."""
        if self.dtype == torch.bfloat16:
            weights = flat(slot.param).cpu().view(torch.int16).int()
            magnitude = ((weights & 0x7FFF) << 16) + flat(self.planes["master_lo"]).cpu().int()
            return ((weights & 0x8000) << 16 | magnitude.clamp_(min=0)).view(torch.float32)
        return flat(self.planes["master"] if self.dtype == torch.float16 else slot.param).cpu().clone()

    def write_master(self, slot, values: torch.Tensor) -> None:
        """`values` (numel) fp32 in host memory; the weights become their rounding."""
        if self.dtype == torch.bfloat16:
            one_nan = torch.full_like(values, float("nan"))
            bits = torch.where(values.isnan(), one_nan, values).view(torch.int32)
            high = ((bits + 0x8000) >> 16).to(torch.int16)
            flat(self.planes["master_lo"]).copy_(bits.view(torch.int16)[::2])
            flat(slot.param).copy_(high.view(torch.bfloat16))
            return
        if self.dtype == torch.float16:
            flat(self.planes["master"]).copy_(values)
        flat(slot.param).copy_(values)

    write_planes = HostHome.write_planes

    def wait_written(self, slot) -> None:
        """What torch's current stream is given from here on finds the weights of the last update."""
        if self.left_last is not None:
            self.link.states.wait(self.left_last)

    # --- gradient -------------------------------------------------------------------------------

    @staticmethod
    def keep(homes: list[DeviceHome], grads: list[torch.Tensor], measures: bool) -> None:
        """Each of `grads`, in the weights' layout, which nobody else writes, is the gradient of its home. Norms are
        summed when somebody asks, those of all gradients that wait for it in one go."""
        states = homes[0].link.states
        stream = states.current_stream()
        for home, grad in zip(homes, grads, strict=True):
            if home.gradient is not None:
                home._let_go()
            home.gradient, home._written_on, home.measured = grad, stream, False
        states.unmeasured.update(dict.fromkeys(homes))

    def hold(self, gradient: torch.Tensor) -> torch.Tensor:
        """Keeps what norm or update reads, a gradient in the weights' layout, until it is forgotten."""
        if gradient is not self.gradient:
            self._let_go()
            self.gradient, self._written_on = gradient, self.link.states.current_stream()
        return gradient

    def _let_go(self) -> None:
        if self.gradient is not None:
            self.link.states.let_go(self.gradient, self._written_on, self.left_last)
        self.gradient = None

    def arrived(self) -> torch.Tensor:
        """The gradient, in the order of torch's current stream."""
        return self.gradient

    gradient_beside_weights = arrived

    def squares(self, slot) -> tuple[float, bool]:
        if not self.measured:
            measure_on_device([slot])
        total, bad = self.link.states.read_sums()[self.target.row]
        return total, bad < 0

    def forget_gradient(self) -> None:
        self.measured = False
        if self.gradient is not None:
            self._let_go()
            self.link.states.unmeasured.pop(self, None)


def measure_on_device(slots: list) -> None:
    """Issues the norms of gradients as they stand: of these slots, whose homes are on devices, and of all that are
    kept on the same ones."""
    for slot in slots:
        home = slot.home
        home.hold(slot.gradient_to_use())
        home.link.states.unmeasured[home] = None
    for states in {slot.home.link.states for slot in slots}:
        homes = list(states.unmeasured)
        states.unmeasured.clear()
        states.square_sums([home.target for home in homes], [home.gradient.data_ptr() for home in homes])
        for home in homes:
            home.measured = True


def empty_as(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(param.size(), param.stride(), dtype=dtype, device=param.device)
