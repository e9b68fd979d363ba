"""A node whose ranks have not started, because the other nodes are not there: what it says, and how long."""

import sys
import time
from pathlib import Path

from bundle.rendezvous import Rendezvous

_FIRST_WORD_SECONDS = 10.0


class Waiting:
    """The wait of one node of several for the others; a node that is alone waits for nobody."""

    def __init__(self, meeting: Rendezvous, folder: Path, limit: float) -> None:
        self._meeting, self._folder, self._limit = meeting, folder, limit
        self._began = time.monotonic()
        self._next_word = _FIRST_WORD_SECONDS
        self._over = meeting.nodes == 1

    @property
    def over(self) -> bool:
        """Whether this node's ranks have been started: torchrun makes their logs once all nodes have met."""
        self._over = self._over or any(self._folder.glob("*/attempt_*"))
        return self._over

    @property
    def too_long(self) -> bool:
        """Whether the others had their time."""
        return not self.over and self._seconds > self._limit

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> None:
        """Says on stderr what is waited for; every time after twice the time before."""
        if not self.over and self._seconds > self._next_word:
            print(f"mcore-bundle: {self}", file=sys.stderr, flush=True)
            self._next_word *= 2

    def __str__(self) -> str:
        m, others = self._meeting, self._meeting.nodes - 1
        return (
            f"node {m.node_rank} of {m.nodes} waits for the other {others} at {m.address}:{m.port}, for "
            f"{self._seconds:.0f} of at most {self._limit:.0f} s: start this command on each, with "
            f"--node-rank 0 to {others}, and see that the port of node 0 can be reached"
        )
