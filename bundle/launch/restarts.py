"""Starting again in place what a restart may mend, as the verdict says, and not without end."""

import logging
from collections.abc import Callable

from bundle.launch.process import LaunchFailed
from bundle.launch.verdict import is_restartable

_log = logging.getLogger(__name__)


def run_with_restarts(
    start: Callable[[], None], most_restarts: int, get_progress: Callable[[], object]
) -> None:
    """Calls `start`, and again when its verdict is that a restart may mend it.

    At most `most_restarts` times in a row in which nothing is gained: `get_progress` is what a restart goes
    on from. Not while other nodes may still run what this one has ended: their ranks would be met, which wait
    for those that are gone. Raises Ended.
    """
    remaining, last_progress = most_restarts, get_progress()
    while True:
        try:
            return start()
        except LaunchFailed as failure:
            remaining, last_progress = (
                (most_restarts if get_progress() != last_progress else remaining),
                get_progress(),
            )
            if not remaining or not is_restartable(failure.verdict):
                raise
            if failure.verdict.silent:
                _log.warning("does not start again: no word from %s", ", ".join(failure.verdict.silent))
                raise
            remaining -= 1
            _log.warning("%s", failure)
            _log.warning("starts again; %d times more unless it gets further", remaining)
