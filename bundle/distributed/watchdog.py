"""Ends a rank that makes no progress, and writes the files that show why."""

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

from bundle.distributed import rank_snapshot
from bundle.errors import ExitCode, JobFailed
from bundle.launch import hang, outcomes

_LINGER_SECONDS = 3.0
# Seconds from the end of a patience to the end of the process: noticing, writing files, lingering.
_MAX_EXIT_DELAY_SECONDS = 60
# Seconds between two checks of the limit, which changes with every patience.
_CHECK_INTERVAL_SECONDS = 1.0
# Reading a corpus, writing or reading a large checkpoint: all take longer than any collective should.
EXTENDED_PATIENCE_SECONDS = 3600


def compute_collective_timeout(seconds: int) -> int:
    """Return the timeout of a collective where the watchdog allows `seconds`; it is always longer.

    The watchdog knows what hangs and how long it may take. A collective with a shorter timeout would fail
    within a patience, and as one failure among others. It may begin before the patience in which another rank
    hangs.
    """
    return seconds + max(EXTENDED_PATIENCE_SECONDS, seconds) + _MAX_EXIT_DELAY_SECONDS


class Watchdog:
    """Ends this process with 6 when `report_progress` was not called for `seconds`; a context manager.

    Before that it writes the stacks of all threads, torch's record of collectives and the state of this rank
    into `directory`. The other ranks of the node do the same, whatever their own limit. It has to end the
    process itself: a rank inside a collective runs no Python that an exception could reach.
    """

    def __init__(self, seconds: float, directory: Path, rank: int, local_rank: int) -> None:
        self.seconds, self.directory = seconds, directory
        self.rank, self.local_rank = rank, local_rank
        self._patience = seconds
        self._last = (time.monotonic(), "start")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def report_progress(self, doing: str) -> None:
        """Record that there is progress, and what comes next, such as "step 12"."""
        self._last = (time.monotonic(), doing)

    @contextmanager
    def extend_patience(self, doing: str, seconds: float = EXTENDED_PATIENCE_SECONDS) -> Iterator[None]:
        """Allow at least `seconds` for the work of the block, such as "saving step 12"."""
        earlier_patience = self._patience
        self._patience = max(seconds, earlier_patience)
        self.report_progress(doing)
        try:
            yield
        finally:
            self.report_progress(f"after {doing}")
            self._patience = earlier_patience

    def __enter__(self) -> Self:
        self.report_progress("start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(max(0.05, self._get_seconds_left()), _CHECK_INTERVAL_SECONDS)):
            if self._get_seconds_left() <= 0 or outcomes.is_node_hang_announced():
                outcomes.request_hang_snapshots()
                self._dump_hang_and_exit()

    def _get_seconds_left(self) -> float:
        return self._last[0] + self._patience - time.monotonic()

    def _dump_hang_and_exit(self) -> None:
        since, doing = self._last
        seconds = time.monotonic() - since
        message = f"no progress for {seconds:.0f} s in {doing}"
        try:
            message += f"; stacks and collectives: {dump_hang(self.directory, self.rank, doing, seconds)}"
        except (OSError, JobFailed) as error:  # a hang on a full disk is still a hang
            message += f"; writing stacks failed: {error}"
        # Ranks notice one after the other, and the first that ends takes the others with it.
        time.sleep(_LINGER_SECONDS)
        outcomes.report_end(self.rank, self.local_rank, ExitCode.HANG, message)
        os._exit(ExitCode.HANG)


def dump_hang(directory: Path, rank: int, doing: str, seconds: float) -> Path:
    """Write the stacks of all threads and return their file.

    The snapshot of the rank and torch's records of collectives are written to the same directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stacks = directory / f"hang-rank-{rank}.txt"
    with stacks.open("w", encoding="utf-8") as file:
        print(f"no progress for {seconds:.0f} s in {doing}", file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
    records = rank_snapshot.read_flight_records()
    for record, name in zip(records, ("flight", "gloo.flight"), strict=False):
        (directory / f"hang-rank-{rank}.{name}").write_bytes(record)
    hang.write(directory, rank_snapshot.take_snapshot(rank, doing, seconds, records))
    return stacks


def show_stacks_on_request() -> None:
    """Make SIGUSR1 print all stacks on stderr, and a crash in native code print them too."""
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True, chain=False)
