"""The status of a job's ranks from NCCL: its service for reliability, availability and serviceability.

From 2.24 each process has such a service, which answers on its node in lines of text
(docs.nvidia.com/deeplearning/ nccl/user-guide/docs/troubleshooting/ras.html). We send the requests of its
client `ncclras`, which need not be installed.
"""

import os
import socket
from pathlib import Path

from bundle import files

PORT = 28028
_PEER_TIMEOUT_SECONDS = 1  # the service's limit for answers of other processes
_SOCKET_TIMEOUT_SECONDS = 5.0
_MAX_NCCL_REPORT_BYTES = 1 << 22  # bytes of an answer


def query_status(address: str = "") -> str:
    """Return the service's report about communicators and silent processes; "" where no service listens.

    `address` is HOST:PORT; the default is NCCL_RAS_ADDR, or else NCCL's own address.
    """
    host, _, port = (address or os.environ.get("NCCL_RAS_ADDR") or f"localhost:{PORT}").rpartition(":")
    answer = b""
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_SOCKET_TIMEOUT_SECONDS
        ) as connection:
            connection.sendall(f"TIMEOUT {_PEER_TIMEOUT_SECONDS}\n".encode())
            if connection.recv(16).strip().upper() != b"OK":
                return ""
            connection.sendall(b"VERBOSE STATUS\n")
            while len(answer) < _MAX_NCCL_REPORT_BYTES and (received := connection.recv(1 << 16)):
                answer += received
    except (OSError, ValueError):  # a part of the answer is useful too
        pass
    return answer.decode("utf-8", errors="replace")


def write(path: Path) -> None:
    """Write the service's current report to a file, where there is one."""
    if answer := query_status():
        files.write_text(path, answer)
