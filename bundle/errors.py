"""The exception types and the exit codes: rooms raise these, `cli` and workers turn them into a status."""

import difflib
import math
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class ExitCode(IntEnum):
    """What a process of ours may end with; nothing else (docs/exit-codes.md)."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    ENVIRONMENT_UNFIT = 3
    PATCHES = 4
    LAUNCH_UNAVAILABLE = 5
    HANG = 6
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class BundleError(Exception):
    """An error with everything a user needs: what is wrong, where, and what to do. All violations at once."""

    code = ExitCode.JOB_FAILED

    def __init__(self, message: str, violations: Sequence[str] = ()) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join([message, *(f"  - {v}" for v in self.violations)]))


class JobFailed(BundleError):
    """The job ran and failed."""


class UsageError(BundleError):
    """The command line or the recipe asks for something impossible."""

    code = ExitCode.USAGE


class EnvironmentUnfit(BundleError):
    """This machine or what is installed on it cannot run the job."""

    code = ExitCode.ENVIRONMENT_UNFIT


class PatchError(BundleError):
    """A patch that the job needs cannot be applied."""

    code = ExitCode.PATCHES


class TargetUnavailable(BundleError):
    """The launch backend cannot be reached or is not installed."""

    code = ExitCode.LAUNCH_UNAVAILABLE


class Preempted(BundleError):
    """The job was told to stop and has written a checkpoint: start it again."""

    code = ExitCode.PREEMPTED


def format_validation_errors(error: "ValidationError") -> list[str]:
    """Return the violations of a document, such as "packages.torch: Input should be a valid string", by key.

    Keys come from others: each is cut to 200 characters and has no control character.
    """
    lines = []
    for violation in error.errors(include_url=False):
        key = ".".join(map(str, violation["loc"]))[:200].encode("unicode_escape").decode()
        lines.append(f"{key}: {violation['msg']}")
    return lines


def format_value(value: object) -> str:
    """Return a value as a message quotes it: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_count(amount: int, noun: str) -> str:
    """Return an amount and its noun in words, such as "1 row" or "2 rows"."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def format_bytes(amount: float | None) -> str:
    """Return a number of bytes for people: "178.4 GiB", "64.0 MiB", "no limit"; None is unknown."""
    if amount is None:
        return "an unknown size"
    if amount == math.inf:
        return "no limit"
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if amount >= 2**power:
            return f"{amount / 2**power:.1f} {unit}"
    return f"{amount:.0f} B"


def find_nearest(name: str, known: Collection[str], *, most: int = 2, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are spelled most like `name`, the likeliest first.

    `cutoff` is from 0 (all names) to 1 (equal names).
    """
    return difflib.get_close_matches(name[:100], sorted(known), n=most, cutoff=cutoff)


def format_suggestion(names: Sequence[str]) -> str:
    """Return the end of a message that names them: "; did you mean a or b?", or an empty string."""
    return f"; did you mean {' or '.join(names)}?" if names else ""
