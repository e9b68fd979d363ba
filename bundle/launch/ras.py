"""What NCCL itself says of the ranks of a job: its service for reliability, availability and serviceability.

From 2.24 each process has one that answers on its node, in lines of text (docs.nvidia.com/deeplearning/nccl/
user-guide/docs/troubleshooting/ras.html). What its client `ncclras` asks is asked here, so that no such
program needs to be there.
"""

import os
import socket
from pathlib import Path

from bundle import files

PORT = 28028
_OTHERS_SECONDS = 1  # that it waits for the answers of other processes
_SECONDS = 5.0
_MOST = 1 << 22  # bytes of an answer


def status(address: str = "") -> str:
    """All that it says of the communicators here and of who does not answer; "" where nobody listens.

    `address` is HOST:PORT, without one what NCCL_RAS_ADDR says, or NCCL's own.
    """
    host, _, port = (address or os.environ.get("NCCL_RAS_ADDR") or f"localhost:{PORT}").rpartition(":")
    said = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as asked:
            asked.sendall(f"TIMEOUT {_OTHERS_SECONDS}\n".encode())
            if asked.recv(16).strip().upper() != b"OK":
                return ""
            asked.sendall(b"VERBOSE STATUS\n")
            while len(said) < _MOST and (more := asked.recv(1 << 16)):
                said += more
    except (OSError, ValueError):  # what has come so far is worth reading
        pass
    return said.decode("utf-8", errors="replace")


def write(path: Path) -> None:
    """Puts down what it says now, where it says something."""
    if said := status():
        files.write_text(path, said)
