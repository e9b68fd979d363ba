"""The store where the ranks meet before a process group exists."""

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from bundle.errors import LaunchUnavailable
from bundle.rendezvous import LOOPBACK, Rendezvous


def open_store(rendezvous: Rendezvous, timeout: timedelta) -> Store:
    """Returns the store of this job; torchrun's agent serves it, or else rank 0 does.

    A one-node job's store listens on loopback only: whoever reaches a store can stop the job or worse.
    Raises LaunchUnavailable when the meeting point cannot be reached within `timeout`.
    """
    assert rendezvous.is_rank and rendezvous.port is not None, "only a rank meets other ranks"
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rendezvous.rank == 0 and not served_by_agent
    address, port = rendezvous.address, rendezvous.port
    listening = None
    try:
        if serves and address == LOOPBACK:
            listening = _listen(port)
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


def _listen(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((LOOPBACK, port))
    listening.listen(socket.SOMAXCONN)
    return listening
