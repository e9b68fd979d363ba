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
_PEER_TIMEOUT_SECONDS = 1  # that it waits for the answers of other processes
_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 1 << 22  # bytes of an answer


def query_status(address: str = "") -> str:
    """All that it says of the communicators here and of who does not answer; "" where nobody listens.

    `address` is HOST:PORT, without one what NCCL_RAS_ADDR says, or NCCL's own.
    """
    host, _, port = (address or os.environ.get("NCCL_RAS_ADDR") or f"localhost:{PORT}").rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_SECONDS) as connection:
            connection.sendall(f"TIMEOUT {_PEER_TIMEOUT_SECONDS}\n".encode())
            if connection.recv(16).strip().upper() != b"OK":
                return ""
            connection.sendall(b"VERBOSE STATUS\n")
            while len(answer) < _MOST_BYTES and (received := connection.recv(1 << 16)):
                answer += received
    except (OSError, ValueError):  # what has come so far is worth reading
        pass
    return answer.decode("utf-8", errors="replace")


def write(path: Path) -> None:
    """Puts down what it says now, where it says something."""
    if answer := query_status():
        files.write_text(path, answer)
