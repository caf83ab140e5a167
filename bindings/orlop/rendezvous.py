"""Where the ranks that torchrun has started meet: rank 0 listens, and says where by torchrun's store."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from .errors import CommunicatorError, UsageError
from .launch import listen_at_first, place_of

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# With these the ranks meet by MPI, unless torchrun's agent stands between.
_MPI = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_JOIN_TIME = timedelta(seconds=300)
# Addresses that no machine has: the way to them is the way to other networks.
_ELSEWHERE = ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9)))

_kept: list[Any] = []  # the store, which other ranks still read when this one has joined


def prepare_rendezvous() -> None:
    """Sets ORLOP_RENDEZVOUS, and on rank 0 ORLOP_RENDEZVOUS_FD, where torchrun has started this process as
    one of several and they are not set. All ranks call it before they join; the native library does."""
    environment = os.environ
    if "ORLOP_RENDEZVOUS" in environment or not all(name in environment for name in _TORCHRUN):
        return
    if "TORCHELASTIC_RUN_ID" not in environment and any(name in environment for name in _MPI):
        return
    rank, world_size = environment["RANK"], environment["WORLD_SIZE"]
    if world_size == "1":
        return
    store = _open_store()
    key = f"orlop/rendezvous/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        if rank == "0":
            listener = _listen()
            store.set(key, place_of(listener))
            environment["ORLOP_RENDEZVOUS"] = place_of(listener)
            environment["ORLOP_RENDEZVOUS_FD"] = str(listener.detach())
            _kept.append(store)
        else:
            environment["ORLOP_RENDEZVOUS"] = store.get(key).decode()
    except RuntimeError as error:
        raise CommunicatorError(
            f"rank {rank} of {world_size} has not heard by torchrun's store at "
            f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']} where rank 0 listens: {error}"
        ) from None


def _open_store() -> Any:
    """The store of the default process group where the script has made one, else torchrun's."""
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise UsageError(
            "the environment is that of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), but PyTorch, by "
            f"which its ranks find each other, cannot be imported ({error}): pip install torch, or set "
            "ORLOP_RENDEZVOUS=host:port to an address of rank 0's machine"
        ) from None
    try:
        if distributed.is_initialized():
            store = distributed.distributed_c10d._get_default_store()
        else:
            store, _, _ = next(distributed.rendezvous("env://", timeout=_JOIN_TIME))
    except (RuntimeError, ValueError) as error:
        raise CommunicatorError(
            f"torchrun's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
        ) from None
    return distributed.PrefixStore("orlop", store)


def _own_addresses(ways: Any) -> list[tuple[socket.AddressFamily, str]]:
    """Of this machine, on the ways to others (family, address)."""
    found = []
    for family, address in ways:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # looks the way up; nothing is sent
                found.append((family, probe.getsockname()[0]))
        except OSError:
            continue
    return found


def _listen() -> socket.socket:
    """A socket that listens at the address by which the way to MASTER_ADDR begins, or, where that stays on
    this machine and other machines have ranks, the way to other networks."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    world_size = os.environ["WORLD_SIZE"]
    several_machines = os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise CommunicatorError(f"MASTER_ADDR '{host}': {error}") from None
    own = _own_addresses((family, address) for family, _, _, _, address in infos)
    if several_machines:
        own = [
            (family, address)
            for family, address in own + _own_addresses(_ELSEWHERE)
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        ]
    try:
        return listen_at_first(own)
    except OSError as reason:
        raise CommunicatorError(
            f"rank 0 has no address on the way to MASTER_ADDR '{host}' where the other ranks could reach it "
            f"({reason}); set ORLOP_RENDEZVOUS=host:port to one"
        ) from None
