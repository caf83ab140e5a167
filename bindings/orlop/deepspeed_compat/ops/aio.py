"""DeepNVMe's aio_handle over orlop's asynchronous file access."""

from __future__ import annotations

import ctypes

import torch

from ... import _orlop, errors


class aio_handle:
    """Reads and writes CPU tensors. single_submit, overlap_events and intra_op_parallelism are kept for their
    getters: io_uring has no such split."""

    def __init__(self, block_size=1 << 20, queue_depth=128, single_submit=False, overlap_events=False,
                 intra_op_parallelism=1):  # fmt: skip
        self._file = _orlop.AsyncFile(int(block_size), int(queue_depth))
        self._options = (bool(single_submit), bool(overlap_events), int(intra_op_parallelism))
        self._in_flight: list[torch.Tensor] = []
        self._locked: dict[int, int] = {}

    def get_block_size(self):
        return self._file.block_bytes

    def get_queue_depth(self):
        return self._file.queue_depth

    def get_single_submit(self):
        return self._options[0]

    def get_overlap_events(self):
        return self._options[1]

    def get_intra_op_parallelism(self):
        return self._options[2]

    def get_alignment(self):
        return self._file.alignment

    def _span(self, buffer):
        if not isinstance(buffer, torch.Tensor) or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise errors.UsageError("aio_handle: a contiguous CPU tensor is needed")
        return buffer.data_ptr(), buffer.numel() * buffer.element_size()

    def pread(self, buffer, filename, validate, async_, file_offset=0):
        done = self._file.pread(*self._span(buffer), str(filename), validate, async_, file_offset)
        self._keep(buffer, async_)
        return done

    def pwrite(self, buffer, filename, validate, async_, file_offset=0):
        done = self._file.pwrite(*self._span(buffer), str(filename), validate, async_, file_offset)
        self._keep(buffer, async_)
        return done

    def _keep(self, buffer, in_flight):
        if in_flight:
            self._in_flight.append(buffer)

    def read(self, buffer, filename, validate=False, file_offset=0):
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer, filename, validate=False, file_offset=0):
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def sync_pread(self, buffer, filename, file_offset=0):
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer, filename, file_offset=0):
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer, file, file_offset=0):
        if isinstance(file, int):
            self._keep(buffer, True)
            return self._file.async_pread_fd(*self._span(buffer), file, file_offset)
        return self.pread(buffer, file, False, True, file_offset)

    def async_pwrite(self, buffer, file, file_offset=0):
        if isinstance(file, int):
            self._keep(buffer, True)
            return self._file.async_pwrite_fd(*self._span(buffer), file, file_offset)
        return self.pwrite(buffer, file, False, True, file_offset)

    def wait(self):
        """Number of asynchronous calls that have ended since the last wait()."""
        count = self._file.wait()
        self._in_flight.clear()
        return count

    def new_cpu_locked_tensor(self, num_elem, example):
        """A zeroed tensor in locked memory, of the dtype of `example`, until free_cpu_locked_tensor()."""
        size = int(num_elem) * example.element_size()
        address = self._file.new_cpu_locked_tensor(size)
        memory = (ctypes.c_char * size).from_address(address)
        memory.owner = self._file
        tensor = torch.frombuffer(memory, dtype=example.dtype)
        self._locked[tensor.data_ptr()] = address
        return tensor

    def free_cpu_locked_tensor(self, tensor):
        """False for a tensor that is not one of this handle's."""
        address = self._locked.pop(tensor.data_ptr(), None)
        if address is None:
            return False
        self._file.free_cpu_locked_tensor(address)
        return True
