"""deepspeed.ops: the CPU optimizer and asynchronous file access."""

from . import adam, aio

__all__ = ["adam", "aio"]
