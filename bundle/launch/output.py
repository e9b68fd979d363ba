"""The lines that ranks print, with a label of their node and rank, as every launcher shows them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import IO

# The time for the last lines of an ended rank to arrive.
_DRAIN_SECONDS = 5.0


def format_label(node_rank: int, rank: int) -> str:
    """Return the label before a line of a rank."""
    return f"[{node_rank}/{rank}]"


@contextmanager
def forward_lines(stream: IO[bytes] | None, show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with each line of a stream as it comes; do nothing where there is no stream."""
    if stream is None:
        yield
        return
    thread = Thread(target=_read_lines, args=(stream, show), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_DRAIN_SECONDS)


def _read_lines(stream: IO[bytes], show: Callable[[str], None]) -> None:
    for line in stream:
        show(line.decode("utf-8", errors="replace").rstrip("\n"))
