"""--gpus N: one process per GPU of this machine, started and watched by this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from .errors import CommunicatorError, UsageError

# What a launcher that has started this process tells it.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_INTERRUPTED = 130
# After the first failure the others find out by themselves; who has not ended by then is killed.
_GRACE_SECONDS = 25.0
_PR_SET_PDEATHSIG = 1


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a run to stop: Ctrl-C, a scheduler, and the end of its terminal, which nohup has it ignore."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([] if ignores_hangup else [signal.SIGHUP]))


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


def start_ranks(gpus: int, argv: Sequence[str]) -> int:
    """Runs `gpus` processes of `argv` without --gpus, the ranks of one run, to their end. Returns the exit
    code of the first that failed, 128 + the signal for one that a signal ended, 0 when none failed."""
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; it must be at least 1")
    if launcher := next((name for name in _LAUNCHED if name in os.environ), None):
        raise UsageError(
            f"--gpus {gpus} starts the processes itself, but a launcher has started this one "
            f"({launcher} is set); leave out one of the two"
        )
    command = [sys.executable, "-m", "orlop", *without_gpus(argv)]
    sys.stdout.flush()
    with _arriving_signals() as wait_for_signals:
        ranks = _Ranks()
        try:
            ranks.start(gpus, command)
            return ranks.watch(wait_for_signals)
        finally:
            ranks.kill()


@contextlib.contextmanager
def _arriving_signals() -> Iterator[Callable[[float | None], bytes]]:
    """Gives a function that waits, so many seconds at most, and returns the numbers of the signals that have
    arrived: the end of a child, and what asks this process to stop."""
    numbers = (signal.SIGCHLD, *stop_signals())
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def wait(seconds: float | None) -> bytes:
        return reader.recv(4096) if select.select([reader], [], [], seconds)[0] else b""

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def listen_at_first(addresses: Iterable[tuple[int, str]]) -> socket.socket:
    """A socket that listens at the first of (family, address) where one can, at a port that is free. Raises the last
    OSError where none can."""
    reason = OSError("no way leads there")
    for family, address in addresses:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((address, 0))
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            reason = error
    raise reason


def _listen_on_this_machine() -> socket.socket:
    try:
        return listen_at_first(((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")))
    except OSError as reason:
        raise CommunicatorError(f"the ranks cannot meet on this machine: {reason}") from None


def place_of(listener: socket.socket) -> str:
    """host:port, as ORLOP_RENDEZVOUS has it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


class _Ranks:
    """The processes of one run, by rank."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._failed = 0  # the exit code of the first that failed

    def start(self, count: int, command: Sequence[str]) -> None:
        prctl = ctypes.CDLL(None).prctl
        parent = os.getpid()

        def end_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with _listen_on_this_machine() as listener:
            for rank in range(count):
                told = {
                    "RANK": rank,
                    "WORLD_SIZE": count,
                    "LOCAL_RANK": rank,
                    "LOCAL_WORLD_SIZE": count,
                    "ORLOP_RENDEZVOUS": place_of(listener),
                }
                if rank == 0:
                    told["ORLOP_RENDEZVOUS_FD"] = listener.fileno()
                self._running[rank] = subprocess.Popen(
                    command,
                    env=os.environ | {name: str(value) for name, value in told.items()},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(listener.fileno(),) if rank == 0 else (),
                    preexec_fn=end_with_parent,  # between fork and exec, nothing else can
                    start_new_session=True,  # the terminal's Ctrl-C comes once, by this process
                )

    def watch(self, wait_for_signals: Callable[[float | None], bytes]) -> int:
        end: float | None = None  # when those who still run are killed
        while self._running:
            for number in wait_for_signals(None if end is None else max(0.0, end - time.monotonic())):
                if number != signal.SIGCHLD:
                    self._send(signal.Signals(number))
            if self._reap() and end is None:
                end = time.monotonic() + _GRACE_SECONDS
            if end is not None and time.monotonic() >= end and self._running:
                names = ", ".join(map(str, self._running))
                print(
                    f"orlop: still running after {_GRACE_SECONDS:.0f} s, killed: rank {names}",
                    file=sys.stderr,
                )
                self.kill()
        return self._failed

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def _reap(self) -> bool:
        """Takes in who has ended. True when one of them has failed; a rank that was asked to stop, and has
        saved, has not."""
        failed = False
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[rank]
            failed = failed or code not in (0, _INTERRUPTED)
            if code < 0:
                print(f"orlop: rank {rank} was ended by {_signal_name(-code)}", file=sys.stderr)
                code = 128 - code
            # The others fail with 1 when one does, and may end before it.
            if self._failed == 0 or (self._failed == 1 and code not in (0, 1)):
                self._failed = code
        return failed


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
