"""What comes to the device and goes together: the weights of a block, and the place of each in it."""

from __future__ import annotations

from sys import getrefcount

import torch

from . import errors
from .streamed_parameter import StreamedParameter, present
from .torch_support import flat

_ALIGNMENT = 512  # bytes, of parameters in their block
# How many tensors share a storage, and how much of torch shares a tensor; an older torch does not tell.
_storage_uses = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses = getattr(torch.Tensor, "_use_count", None)


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether a wrapped model brings it to the device and lets it go."""
    entry = getattr(parameter, "_orlop_entry", None)
    return entry is not None and type(parameter) is not entry.kind


class Entry:
    """One parameter: its place in the block's storage on the device, and its home: `host` (numel) in host memory, or
    `drives`. Neither is used while the optimizer has its states on the device, where the weights then stay."""

    def __init__(self, parameter: torch.nn.Parameter, name: str):
        self.parameter, self.name = parameter, name
        self.kind, self.present = type(parameter), present(type(parameter))
        self.bytes = parameter.numel() * parameter.element_size()
        self.shape, self.stride = parameter.size(), parameter.stride()
        # The parameter's own memory, or the optimizer's copy where there is one, after which the first goes.
        self.host: torch.Tensor | None = flat(parameter.data).cpu()
        self.drives, self.index = None, -1  # DriveWeights that have room for it, and which of theirs it is
        self.on_device = False  # weights and states
        self.slot = None
        self.version = parameter._version
        self.flat = None

    @property
    def is_on_drives(self) -> bool:
        return self.drives is not None and not self.on_device

    @property
    def has_home(self) -> bool:
        return self.host is not None or self.is_on_drives

    def move_to(self, drives) -> None:
        """The home is on drives from now on; the host memory goes."""
        index = drives.index_of(self.parameter)
        drives.write(index, self.host)
        self.drives, self.index, self.host = drives, index, None

    def home(self) -> torch.Tensor:
        """The weights (numel) in host memory: the home itself, or a copy of what is on drives."""
        if not self.is_on_drives:
            return self.host
        return self.drives.read(self.index, torch.empty(self.parameter.numel(), dtype=self.parameter.dtype))

    def lie_in(self, storage: torch.UntypedStorage, offset: int) -> None:
        """The parameter's place for good: `offset` bytes into the storage."""
        parameter = self.parameter
        place = torch.empty(0, dtype=parameter.dtype, device=storage.device).set_(
            storage, offset // parameter.element_size(), self.shape, self.stride
        )
        torch.Tensor.data.__set__(parameter, place)
        self.flat = flat(place)  # (numel), with a version counter of its own
        parameter._orlop_entry = self

    def uses(self) -> int:
        """How often torch, or for what has no gradient anybody, refers to the parameter, beside Python's object."""
        with torch._C.DisableTorchFunctionSubclass():
            uses = _tensor_uses(self.parameter) - 1
        return uses if self.parameter.requires_grad else uses + getrefcount(self.parameter)

    @property
    def is_in_graph(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return _tensor_uses(self.parameter) > 1

    def outdate(self) -> None:
        """To autograd the weights have changed: a graph that still needs them has come too late, and says so."""
        followed = self.slot is not None and self.slot.version == self.parameter._version
        torch._C._increment_version(self.parameter)
        self.version = self.parameter._version
        if followed:
            self.slot.version = self.version

    def host_view(self) -> torch.Tensor:
        """The weights in host memory, in the parameter's shape; what is being written is waited for."""
        self.wait()
        # Apart from the home to autograd, which may be told to add what has a gradient.
        return self.home().detach().as_strided(self.parameter.size(), self.parameter.stride())

    @torch.no_grad()
    def write_host(self, value: torch.Tensor) -> None:
        """Home and master become `value`."""
        self.wait()
        laid = torch.empty(self.parameter.numel(), dtype=self.parameter.dtype)
        laid.as_strided(self.parameter.size(), self.parameter.stride()).copy_(
            value.expand(self.parameter.size())
        )
        if self.slot is not None:
            self.slot.home.take_weights(self.slot, laid)
        elif self.is_on_drives:
            self.drives.write(self.index, laid)
        else:
            self.host.copy_(laid)
        if self.is_on_drives:
            self.drives.forget_readings()

    def wait(self) -> None:
        """The home is written."""
        if self.slot is not None and self.has_home:
            self.slot.home.native.wait([self.slot.home.index])

    def leave_optimizer(self) -> None:
        """Weights that are on the device for the sake of their states get a home again."""
        slot, self.slot = self.slot, None
        if self.on_device:
            slot.home.wait_written(slot)
            self.on_device = False
            here = flat(self.parameter).cpu()
            if self.drives is not None:
                self.drives.write(self.index, here)
            else:
                self.host = here

    def take_back(self) -> None:
        """Home and master become what is on the device now. (Where the states are there, the optimizer sees it.)"""
        if self.has_home:
            self.write_host(self.parameter.detach().cpu())
        self.version = self.parameter._version

    def keep_written(self, stale: bool, write: bool) -> None:
        """Home and master become what somebody wrote on the device since it was opened or taken back; with `write`,
        whatever is there. `stale`: an update may have passed by, after which the home is newer than the device."""
        version = self.parameter._version
        if self.parameter.data_ptr() != self.flat.data_ptr():
            return self.bring_back(stale)
        if not write and self.version == version:
            return
        followed = (
            self.slot is not None and self.slot.version > self.version
        )  # the optimizer has seen or changed it
        if not (followed and stale):
            if write or not followed or version != self.slot.version:
                self.take_back()
        elif version != self.slot.version:
            self.lose_write()

    def bring_back(self, stale: bool) -> None:
        """Others have pointed the parameter at memory of their own, as set_() does: what is there comes to its place."""
        value = torch.Tensor.data.__get__(self.parameter)
        if (value.shape, value.device) != (self.shape, self.flat.device):
            raise errors.UsageError(
                f"{self.name}: what it was set to, of shape {tuple(value.shape)} on {value.device}, cannot take the "
                f"place of {tuple(self.shape)} on {self.flat.device}, for which orlop.wrap keeps room; "
                "orlop.unwrap(model) first"
            )
        self.lie_in(self.flat.untyped_storage(), self.flat.storage_offset() * self.flat.element_size())
        if stale:
            self.lose_write()
        torch.Tensor.data.__get__(self.parameter).copy_(value)
        self.take_back()

    def lose_write(self) -> None:
        self.version = self.parameter._version
        raise errors.UsageError(
            f"{self.name} was written where it is older than the optimizer's last step, so that the write is "
            "lost; call synchronize() of the optimizer between step() and such a write"
        )


class Block:
    """Parameters that come and go together: one storage on the device, filled or empty."""

    def __init__(self, index: int, module: torch.nn.Module, entries: list[Entry], device: torch.device):
        self.index, self.module, self.entries = index, module, entries
        self.bytes = sum(entry.bytes for entry in entries)
        offsets, self._room = [], 0  # as if torch's allocator had given each parameter out by itself
        for entry in entries:
            offsets.append(self._room)
            self._room += -(-entry.bytes // _ALIGNMENT) * _ALIGNMENT
        self._offsets = offsets
        self._lie_in(torch.UntypedStorage(self._room, device=device))
        self._own_uses = self._storage_uses()
        self.exposed = False  # somebody beside graphs may share the storage
        self.empty()
        self.here = False
        self.stale = False  # here, but an update has changed the home since
        self.update = None  # home and version of the last write of its last update
        self.resident = False  # never leaves
        self.reading = None  # of what is on drives, ahead of its use
        self.arrived = None  # event of a copy that the compute stream has not waited for
        self.active = 0  # calls of its forward that have begun and not ended
        self.callers: set[int] = set()  # blocks whose forward calls it
        self.sections = 0  # of gathered() that are open
        # For a graph that may read it without a word, until that is gone or to the next step.
        self.kept = False
        self.attributes = None  # of its modules: set with its hooks
        self._shows_graph = False  # whether it can be seen that such a graph is gone

    def _lie_in(self, storage: torch.UntypedStorage) -> None:
        self.storage, self._address = storage, storage._cdata
        for entry, offset in zip(self.entries, self._offsets, strict=True):
            entry.lie_in(storage, offset)

    def _storage_uses(self) -> int:
        return _storage_uses(self._address) if _storage_uses is not None else 0

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the block's storage."""
        try:
            return tensor.untyped_storage()._cdata == self._address
        except RuntimeError:  # it has none
            return False

    def uses(self) -> tuple[int, int]:
        """What refers to the storage and to the parameters."""
        return self._storage_uses(), sum(entry.uses() for entry in self.entries) if _tensor_uses else 0

    def look_at_uses(self, before: tuple[int, int], may_be_in_graph: bool) -> None:
        """What has come since `before` stays valid: others that share the storage keep it, a graph the block."""
        storage, parameters = self.uses()
        self.exposed |= _storage_uses is None or storage > before[0]
        if parameters > before[1] or (may_be_in_graph and _tensor_uses is None):
            self.keep()

    def keep(self) -> None:
        """It stays for a graph of which nothing tells when its backward begins."""
        if not self.resident:
            self.kept, self._shows_graph = True, self._is_in_graph()

    def _is_in_graph(self) -> bool:
        return _tensor_uses is not None and any(entry.is_in_graph for entry in self.entries)

    @property
    def is_needed(self) -> bool:
        """Whether something may use it where it is."""
        if self.kept and self._shows_graph and not self._is_in_graph():
            self.kept = False
        return self.kept or self.sections > 0 or self.active > 0

    def keep_no_more(self) -> None:
        """At a step: a graph that outlives it has old weights."""
        if self.kept:
            self.kept = False
            for entry in self.entries:
                entry.outdate()

    def open(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Room for the weights: where they go (numel), and the homes (numel) in host memory that they come from.
        Autograd is not told: to it the weights never left."""
        if self.storage.nbytes() != self._room:
            self.storage.resize_(self._room)
        into, homes = [], []
        for entry in self.entries:
            parameter = entry.parameter
            parameter.__class__ = entry.present
            entry.version = parameter._version
            if entry.host is not None:
                into.append(entry.flat)
                homes.append(entry.host)
        return into, homes

    @property
    def is_on_drives(self) -> bool:
        """Whether some of its weights are."""
        return any(entry.is_on_drives for entry in self.entries)

    def empty(self) -> None:
        """The device's memory goes. Where others have a part of it that they may read, it is theirs from now on, as it
        is, and the block gets another storage: graphs that are alive keep theirs, too."""
        if self.exposed and (_storage_uses is None or self._storage_uses() > self._own_uses):
            for entry in self.entries:
                entry.parameter.__class__ = entry.kind
            self._lie_in(torch.UntypedStorage(self._room, device=self.storage.device))
        self.exposed = False
        for entry in self.entries:
            entry.parameter.__class__ = StreamedParameter
        self.storage.resize_(0)
