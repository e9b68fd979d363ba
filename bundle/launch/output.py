"""What ranks print, as every launcher shows it: behind the node and the rank that printed it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import IO

# How long the last words of a rank may take to arrive when it has ended.
_LAST_SECONDS = 5.0


def label(node_rank: int, rank: int) -> str:
    """What stands before a line of a rank."""
    return f"[{node_rank}/{rank}]"


@contextmanager
def labelled(stream: IO[bytes] | None, before: str) -> Iterator[None]:
    """Prints the lines of a stream behind `before`, as they come; nothing where there is no stream."""
    if stream is None:
        yield
        return
    thread = Thread(target=_printed, args=(stream, before), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_LAST_SECONDS)


def _printed(stream: IO[bytes], before: str) -> None:
    for line in stream:
        print(before, line.decode("utf-8", errors="replace").rstrip("\n"), flush=True)
