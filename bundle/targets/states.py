"""The questions that every target answers about a job, and the loop that asks until the job has ended."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from bundle.errors import TargetUnavailable

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 600  # for a cluster that does not answer


class JobState(NamedTuple):
    """The state of a job, the reason for it, and the exit code of a job that has ended.

    `output` is the file that a batch system writes the job's output to, where it has one.
    """

    name: str
    reason: str
    code: int | None
    output: Path | None = None

    @property
    def has_ended(self) -> bool:
        return self.code is not None


class ListedJob(NamedTuple):
    """A job in a target's list: its name there, its state in the target's words, and its run directory."""

    name: str
    state: str
    has_ended: bool
    directory: Path


class TargetNotConfigured(TargetUnavailable):
    """The error that this machine has no client of a target, or that no cluster is configured for it."""


class Target(Protocol):
    """A module that starts jobs and answers questions about a job by the name that it gave the job."""

    def list_jobs(self) -> Iterable[ListedJob]: ...
    def query_state(self, name: str) -> JobState: ...
    def read_log(self, name: str) -> str: ...
    def follow(self, name: str) -> Iterator[str]: ...
    def wait(self, name: str) -> int: ...
    def request_stop(self, name: str) -> None: ...


def yield_polled_states(
    query: Callable[[], JobState], seconds: float, *, patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[JobState]:
    """Yield the state of a job every `seconds` until the job has ended.

    A cluster that has answered once may be silent for `patience_seconds`. Raise what `query` raises at the
    first call, or after that time.
    """
    has_answered, silent_seconds = False, 0.0
    while True:
        try:
            state = query()
        except TargetUnavailable as error:
            if not has_answered or silent_seconds >= patience_seconds:
                raise
            if not silent_seconds:
                _log.warning("%s. Retrying for up to %d s", error, patience_seconds)
            silent_seconds += seconds
        else:
            has_answered, silent_seconds = True, 0.0
            yield state
            if state.has_ended:
                return
        time.sleep(seconds)


def find_exit_code(states: Iterable[JobState]) -> int:
    """Return the exit code in the last of these states, which belongs to a job that has ended."""
    *_, last = states
    assert last.code is not None, "the last state is that of a job that has ended"
    return last.code
