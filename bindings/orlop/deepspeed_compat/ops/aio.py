"""DeepNVMe's aio_handle: orlop.AsyncFile with the getters of its constructor's arguments."""

from __future__ import annotations

from ... import _orlop


class aio_handle(_orlop.AsyncFile):
    """Reads and writes CPU tensors. single_submit, overlap_events and intra_op_parallelism are kept for their
    getters: io_uring has no such split."""

    def __init__(self, block_size=1 << 20, queue_depth=128, single_submit=False, overlap_events=False,
                 intra_op_parallelism=1):  # fmt: skip
        super().__init__(int(block_size), int(queue_depth))
        self._options = (bool(single_submit), bool(overlap_events), int(intra_op_parallelism))
        self._locked: set[int] = set()

    def get_single_submit(self):
        return self._options[0]

    def get_overlap_events(self):
        return self._options[1]

    def get_intra_op_parallelism(self):
        return self._options[2]

    def new_cpu_locked_tensor(self, num_elem, example):
        """A zeroed tensor in locked memory, of the dtype of `example`, until free_cpu_locked_tensor()."""
        tensor = super().new_cpu_locked_tensor(int(num_elem), example)
        self._locked.add(tensor.data_ptr())
        return tensor

    def free_cpu_locked_tensor(self, tensor):
        """False for a tensor that is not one of this handle's."""
        if tensor.data_ptr() not in self._locked:
            return False
        self._locked.remove(tensor.data_ptr())
        super().free_cpu_locked_tensor(tensor)
        return True
