"""One thing that was looked at: how it is, why that matters, and what to do about it."""

from enum import StrEnum

from bundle.frozen import frozen


class Level(StrEnum):
    """How bad it is; only `fail` makes the environment unfit."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@frozen
class Finding:
    """What was found about `subject`; `fix` is empty where nothing is to be done."""

    subject: str
    level: Level
    cause: str
    fix: str = ""


def ok(subject: str, cause: str) -> Finding:
    """A finding that needs nothing."""
    return Finding(subject, Level.OK, cause)


def warn(subject: str, cause: str, fix: str) -> Finding:
    """A finding that will slow a job down or break some jobs."""
    return Finding(subject, Level.WARN, cause, fix)


def fail(subject: str, cause: str, fix: str) -> Finding:
    """A finding that no job survives."""
    return Finding(subject, Level.FAIL, cause, fix)
