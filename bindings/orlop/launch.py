"""--gpus N: one process per GPU of this machine, by mpirun."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from .errors import UsageError

# What a launcher that has started this process tells it.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def without_gpus(argv: Sequence[str]) -> list[str]:
    """The command line of one of the processes."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--gpus":
            next(words, None)
        elif not word.startswith("--gpus="):
            kept.append(word)
    return kept


def start_ranks(gpus: int, argv: Sequence[str]) -> NoReturn:
    """Replaces this process by mpirun with `gpus` processes that run `argv` without --gpus."""
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; it must be at least 1")
    if launcher := next((name for name in _LAUNCHED if name in os.environ), None):
        raise UsageError(
            f"--gpus {gpus} starts the processes itself, but a launcher has started this one "
            f"({launcher} is set); leave out one of the two"
        )
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise UsageError(f"--gpus {gpus} needs mpirun (Debian: openmpi-bin), or start the ranks with srun")
    environment = dict(os.environ)
    # The processes share one machine's memory, which not every container lets them read of each other.
    environment.setdefault("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
    if os.geteuid() == 0:  # mpirun insists on being told twice
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Unbound: each process divides the cores by the number of ranks itself.
    command = [mpirun, "-n", str(gpus), "--oversubscribe", "--bind-to", "none", sys.executable, "-m", "orlop"]
    sys.stdout.flush()
    os.execve(mpirun, [*command, *without_gpus(argv)], environment)
