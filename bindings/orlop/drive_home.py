"""The home of states on drives."""

from __future__ import annotations

import torch

from .home_tensor import HomeTensor
from .state_home import MASTER_KEY, MOMENT_KEYS, PLANE_OF_KEY, HostHome
from .torch_support import flat

_ZERO_BYTES = 1 << 20


class DriveHome(HostHome):
    """States on the drives of `native`; weights and the gradient are where HostHome has them."""

    place = "nvme"

    def __init__(self, native, index: int, param: torch.Tensor, moments: torch.dtype, link, hold: bool):
        self.param_size, self.param_stride = param.size(), param.stride()
        self.dtypes = dict.fromkeys(MOMENT_KEYS, moments)
        if (rest := MASTER_KEY[param.dtype]) is not None:
            self.dtypes[rest] = torch.int16 if rest == "master_lo" else torch.float32
        self.is_blank = True  # moments are zero
        super().__init__(native, index, param, moments, link, hold)

    def _plane(self, key: str, dtype: torch.dtype, param: torch.Tensor) -> torch.Tensor:
        if key not in self.dtypes:
            return super()._plane(key, dtype, param)
        return HomeTensor.make(self, key, dtype, param)

    def is_written(self) -> bool:
        self.is_blank = False
        return super().is_written()

    def rest_to_keep(self, rest: torch.Tensor) -> torch.Tensor:
        return self.planes[MASTER_KEY[self.dtype]]

    def take_weights(self, slot, weights: torch.Tensor) -> None:
        if slot.loaded_rest is not None:
            slot.loaded_rest = slot.loaded_rest.clone()  # from the drive, before new weights change it
        super().take_weights(slot, weights)

    def read_plane(self, key: str) -> torch.Tensor:
        """A copy, in the parameter's layout."""
        values = torch.empty(self.numel, dtype=self.dtypes[key])
        name = PLANE_OF_KEY.get(key, key)
        self.native.read_state(self.index, name, 0, values.data_ptr(), values.nbytes)
        return values.as_strided(self.param_size, self.param_stride)

    def write_planes(self, values: dict[str, torch.Tensor]) -> None:
        """Planes become these tensors, those of a piece one after the other, so that each piece moves once."""
        laid = {key: self._laid(key, value) for key, value in values.items()}
        self.is_blank = False
        first = 0
        while first < self.numel:
            count = self.native.piece_numel(self.index, first)
            for key, plane in laid.items():
                part = plane[first : first + count]
                name = PLANE_OF_KEY.get(key, key)
                self.native.write_state(self.index, name, first, part.data_ptr(), part.nbytes)
            first += count
        for key in laid:
            torch.autograd.graph.increment_version(self.planes[key])

    def zero_plane(self, key: str) -> None:
        if self.is_blank and key in MOMENT_KEYS:
            return
        zeros = torch.zeros(max(1, _ZERO_BYTES // self.dtypes[key].itemsize), dtype=self.dtypes[key])
        name = PLANE_OF_KEY.get(key, key)
        for first in range(0, self.numel, zeros.numel()):
            part = zeros[: self.numel - first]
            self.native.write_state(self.index, name, first, part.data_ptr(), part.nbytes)
        torch.autograd.graph.increment_version(self.planes[key])

    def _laid(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """(numel) of the plane's dtype in host memory, in the order of the parameter's memory."""
        value = value.detach().to(device="cpu", dtype=self.dtypes[key]).expand(self.param_size)
        if value.stride() != self.param_stride:
            value = torch.empty_strided(self.param_size, self.param_stride, dtype=value.dtype).copy_(value)
        return flat(value)
