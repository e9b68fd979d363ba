"""Restarts in place where the verdict says that a restart may help, at most a number of times."""

import logging
from collections.abc import Callable

from bundle.launch.process import LaunchFailed
from bundle.launch.verdict import is_restartable_in_place

_log = logging.getLogger(__name__)


def run_with_restarts(
    start: Callable[[], None], most_restarts: int, get_progress: Callable[[], object]
) -> None:
    """Call `start`, and call it again where its verdict says that a restart may help.

    Restart at most `most_restarts` times in a row without progress; `get_progress` names the state that a
    restart continues from. Do not restart while other nodes may still run the launch that ended here. New
    ranks would meet their ranks, which wait for those that are gone. Raise LaunchFailed.
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
            if failure.is_stopped or not remaining or not is_restartable_in_place(failure.verdict):
                raise
            if failure.verdict.silent:
                _log.warning("not restarting: no report from %s", ", ".join(failure.verdict.silent))
                raise
            remaining -= 1
            _log.warning("%s", failure)
            _log.warning("restarting (restarts left: %d; a new checkpoint resets the count)", remaining)
