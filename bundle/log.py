"""What a process tells while it works: Python's logging, below `bundle`, with time, level and rank.

A module writes `_log = logging.getLogger(__name__)`. Who uses the package as a library configures that
logger, or none; the command line and every rank call `start`.
"""

import logging
import os
import sys

from bundle.errors import UsageError

LEVEL_CHOICES = ("debug", "info", "warning", "error")
# How a level reaches the ranks that a command starts; a person may set it as well.
LEVEL_VARIABLE = "MCORE_BUNDLE_LOG_LEVEL"
DEFAULT_LEVEL = "info"


class _CurrentStreamHandler(logging.Handler):
    """Prints on the stream of this moment: a progress bar puts another in its place while it is shown."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        prefix = "mcore-bundle" if rank is None else f"rank {rank}"
        self.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {prefix}: %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        # Of a rank, stdout is what the launcher shows; a command's own stdout is for what it was asked for.
        print(self.format(record), file=sys.stderr if self._rank is None else sys.stdout, flush=True)


def start(rank: int | None = None) -> None:
    """Start logging in this process from the chosen level on; ranks other than 0 log only warnings, errors.

    With `debug` all ranks log everything. Raises UsageError where the environment names no level.
    """
    level = _parse_level(os.environ.get(LEVEL_VARIABLE, DEFAULT_LEVEL), LEVEL_VARIABLE)
    logger = logging.getLogger("bundle")
    logger.handlers = [_CurrentStreamHandler(rank)]
    logger.propagate = False
    quiet = rank not in (None, 0) and level > logging.DEBUG
    logger.setLevel(max(level, logging.WARNING) if quiet else level)


def choose_level(level: str) -> None:
    """Set the log level of this process and of the ranks that it starts. Raises UsageError."""
    _parse_level(level, "--log-level")
    os.environ[LEVEL_VARIABLE] = level
    start()


def _parse_level(level: str, source: str) -> int:
    if level not in LEVEL_CHOICES:
        raise UsageError(
            f"{source}: {level[:40]!r} is not a log level. Choose one of {', '.join(LEVEL_CHOICES)}"
        )
    return int(logging.getLevelName(level.upper()))
