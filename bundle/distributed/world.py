"""Where the ranks meet: the store before a process group exists, and the group of all ranks itself."""

import gc
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from bundle import files
from bundle.errors import LaunchUnavailable
from bundle.launch import outcomes
from bundle.launch.rendezvous import LOOPBACK, Rendezvous

# In the folder of a launch on one node: where its rank 0 listens.
PORT = "port"


def open_store(rendezvous: Rendezvous, timeout: timedelta) -> Store:
    """Returns the store of this job; torchrun's agent serves it, or else rank 0 does.

    A one-node job's store listens on loopback only: whoever reaches a store can stop the job or worse. Where
    our launcher started it, on a port that rank 0 is given and tells the others: torchrun's MASTER_PORT was
    free when it looked, and may be anybody's by now.
    Raises LaunchUnavailable when the meeting point cannot be reached within `timeout`.
    """
    assert rendezvous.is_rank and rendezvous.port is not None, "only a rank meets other ranks"
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rendezvous.rank == 0 and not served_by_agent
    address, port = rendezvous.address, rendezvous.port
    launch = None if served_by_agent or rendezvous.nodes > 1 else outcomes.directory()
    listening = None
    try:
        if serves and address == LOOPBACK:
            listening = _listen(0 if launch else port)
            port = listening.getsockname()[1]
        if launch and serves:
            files.write_text(launch / PORT, str(port))
        elif launch:
            port = _told(launch / PORT, timeout)
        store = TCPStore(
            address,
            port,
            rendezvous.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            # The store closes it. Left to itself it would listen on every interface.
            master_listen_fd=listening.detach() if listening else None,
        )
    except (OSError, RuntimeError) as error:
        what = "serve" if serves else "reach"
        raise LaunchUnavailable(f"rank {rendezvous.rank} cannot {what} {address}:{port}: {error}") from error
    # A job that torchrun restarts meets in the same store again.
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def initialize(
    rendezvous: Rendezvous, store: Store, collectives: str, timeout: timedelta, device: torch.device
) -> None:
    """Makes the default process group; `collectives` is the backend's name for torch.distributed."""
    dist.init_process_group(
        collectives,
        store=PrefixStore("world", store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
        # An accelerator's group is bound to it at once, so that a barrier does not guess the device.
        device_id=None if device.type == "cpu" else device,
    )


def store() -> Store:
    """Returns the store of the default process group, which has no time limit of a collective."""
    return dist.distributed_c10d._get_default_store()


def destroy() -> None:
    """Ends all process groups after everybody has come here; safe when there is none.

    A process that exits with a group alive may abort while its threads end, which looks like a crash.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def _told(path: Path, timeout: timedelta) -> int:
    """The port that rank 0 wrote down. Raises OSError where there is none within `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (port := files.read(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not say in {path} where it listens")
        time.sleep(0.05)
    return int(port)


def _listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((LOOPBACK, port))
    listening.listen(socket.SOMAXCONN)
    return listening
