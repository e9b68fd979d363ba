"""Starting again in place what a restart may mend, as the verdict says, and not without end."""

import logging
from collections.abc import Callable

from bundle.launch.process import Ended
from bundle.launch.verdict import mends

_log = logging.getLogger(__name__)


def repeated(start: Callable[[], None], most: int, kept: Callable[[], object]) -> None:
    """Calls `start`, and again when its verdict is that a restart may mend it.

    At most `most` times in a row in which nothing is gained: `kept` is what a restart goes on from. Not while
    other nodes may still run what this one has ended: their ranks would be met, which wait for those that are
    gone. Raises Ended.
    """
    left, before = most, kept()
    while True:
        try:
            return start()
        except Ended as ended:
            left, before = (most if kept() != before else left), kept()
            if not left or not mends(ended.verdict):
                raise
            if ended.verdict.silent:
                _log.warning("does not start again: no word from %s", ", ".join(ended.verdict.silent))
                raise
            left -= 1
            _log.warning("%s", ended)
            _log.warning("starts again; %d times more unless it gets further", left)
