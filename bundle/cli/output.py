"""Standard output and error whose reader may go away: no reason to end, least of all for a training run."""

import errno
import io
import os
import sys
from typing import Any, TextIO

from bundle.errors import JobFailed

# A pipe that nobody reads any more, a terminal that is gone.
_NO_READER = (errno.EPIPE, errno.EIO)


class OutputLost(JobFailed):
    """What a command was asked to print could not be written, as on a full disk."""


class Outlet(io.FileIO):
    """A file descriptor that turns into /dev/null when it cannot be written to any more.

    Raises OutputLost at that moment, unless nobody reads it or it `may_fail`.
    """

    may_fail = False

    def write(self, data: Any, /) -> int:
        """The number of bytes that are done with."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno not in _NO_READER:
                self._lost(error)
            return len(memoryview(data).cast("B"))

    def _lost(self, error: OSError) -> None:
        name = {1: "standard output", 2: "standard error"}.get(self.fileno(), str(self.fileno()))
        message = f"{name} cannot be written: {error.strerror}"
        if not self.may_fail:
            raise OutputLost(message)
        if self.fileno() != 2:
            print(f"mcore-bundle: {message}; what follows is not shown", file=sys.stderr)


def guard() -> None:
    """Puts an Outlet under both standard streams; errors may get lost, what was asked for may not."""
    sys.stdout, sys.stderr = _guarded(sys.stdout, 1), _guarded(sys.stderr, 2)
    _may_fail(sys.stderr)


def may_fail() -> None:
    """Has the command go on where standard output cannot be written: its results are elsewhere."""
    _may_fail(sys.stdout)


def _may_fail(stream: TextIO) -> None:
    outlet = getattr(stream.buffer, "raw", None)
    if isinstance(outlet, Outlet):
        outlet.may_fail = True


def _guarded(stream: Any, number: int) -> TextIO:
    if stream is None:  # closed by whoever started us
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  as long as the process
    return io.TextIOWrapper(
        io.BufferedWriter(Outlet(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.isatty() or number == 2,
        write_through=stream.write_through,
    )
