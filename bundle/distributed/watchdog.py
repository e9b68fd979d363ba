"""Ends a rank that makes no progress, and leaves what a person needs to find out why."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from bundle.errors import ExitCode
from bundle.launch import outcomes

_LINGER_SECONDS = 3.0
# From the end of a patience to the end of the process: looking, writing stacks and records, lingering.
_ENDING_SECONDS = 60
# How often the limit is looked at: it changes with every patience.
_LOOK_SECONDS = 1.0
# Reading a corpus, writing or reading a large checkpoint: all take longer than any collective should.
PATIENCE_SECONDS = 3600


def collectives_seconds(seconds: int) -> int:
    """Returns how long a collective waits where the watchdog allows `seconds`: longer than that ever does.

    The watchdog knows what hangs and how long it may take. A collective would fail inside a patience already,
    and as one failure among others. It may begin before the patience in which another rank hangs.
    """
    return seconds + max(PATIENCE_SECONDS, seconds) + _ENDING_SECONDS


class Watchdog:
    """Ends this process with 6 when `beat` was not called for `seconds`; a context manager.

    Before that it writes the stacks of all threads and torch's record of collectives into `directory`. It has
    to end the process itself: a rank inside a collective runs no Python that an exception could reach.
    """

    def __init__(self, seconds: float, directory: Path, rank: int, local_rank: int) -> None:
        self.seconds, self.directory = seconds, directory
        self.rank, self.local_rank = rank, local_rank
        self._patience = seconds
        self._last = (time.monotonic(), "start")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str) -> None:
        """Says that there is progress and what comes next, such as "step 12"."""
        self._last = (time.monotonic(), doing)

    @contextmanager
    def patience(self, doing: str, seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
        """Allows at least `seconds` for what is done inside, such as "saving step 12"."""
        before = self._patience
        self._patience = max(seconds, before)
        self.beat(doing)
        try:
            yield
        finally:
            self.beat(f"after {doing}")
            self._patience = before

    def __enter__(self) -> Self:
        self.beat("start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(max(0.05, self._left()), _LOOK_SECONDS)):
            if self._left() <= 0:
                self._end()

    def _left(self) -> float:
        return self._last[0] + self._patience - time.monotonic()

    def _end(self) -> None:
        since, doing = self._last
        message = f"no progress for {time.monotonic() - since:.0f} s in {doing}"
        try:
            message += f"; stacks and collectives: {dump(self.directory, self.rank, message)}"
        except OSError as error:  # a hang on a full disk is still a hang
            message += f"; nothing could be written: {error}"
        # Ranks notice one after the other, and the first that ends takes the others with it.
        time.sleep(_LINGER_SECONDS)
        outcomes.conclude(self.rank, self.local_rank, ExitCode.HANG, message)
        os._exit(ExitCode.HANG)


def dump(directory: Path, rank: int, why: str) -> Path:
    """Returns the file with the stacks of all threads; the record of collectives, if any, lies beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    stacks = directory / f"hang-rank-{rank}.txt"
    with stacks.open("w", encoding="utf-8") as file:
        print(why, file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
    if record := flight_record():
        (directory / f"hang-rank-{rank}.flight").write_bytes(record)
    return stacks


def flight_record() -> bytes:
    """Returns torch's record of this process's collectives (a pickle, as its analyzer reads), or nothing."""
    bindings = torch._C._distributed_c10d
    # Gloo's (and every newer group's) recorder, then NCCL's own where the build has only that.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        recorder = getattr(bindings, name, None)
        if recorder is not None:
            # Finding the source lines of the frames takes seconds, and the stacks are in the other file.
            return bytes(recorder(includeStackTraces=False))
    return b""


def show_stacks_on_request() -> None:
    """Makes SIGUSR1 print all stacks on stderr, and a crash in native code print them too."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True, chain=False)
