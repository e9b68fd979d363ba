"""The loop that asks for the state of a job: when it ends, and how long it bears a silent cluster."""

from collections.abc import Callable, Sequence

import pytest

from bundle.errors import TargetUnavailable
from bundle.targets.states import JobState, find_exit_code, yield_polled_states

QUEUED, RUNNING = JobState("PENDING", "waits", None), JobState("RUNNING", "", None)
DONE, AWAY = JobState("FAILED", "code 7", 7), TargetUnavailable("no answer")


def answer(*answers: JobState | TargetUnavailable) -> Callable[[], JobState]:
    remaining = iter(answers)

    def query() -> JobState:
        state = next(remaining)
        if isinstance(state, TargetUnavailable):
            raise state
        return state

    return query


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr("bundle.targets.states.time.sleep", seconds.append)
    return seconds


def test_states_are_asked_for_until_the_job_has_ended(pauses: list[float]):
    states = list(yield_polled_states(answer(QUEUED, RUNNING, DONE, RUNNING), 3))
    assert states == [QUEUED, RUNNING, DONE] and pauses == [3, 3]
    assert find_exit_code(states) == 7


@pytest.mark.parametrize(
    "answers",
    [[QUEUED, AWAY, AWAY, DONE], [QUEUED, AWAY, AWAY, RUNNING, AWAY, AWAY, DONE]],
)
def test_a_cluster_that_comes_back_in_time_is_asked_again(
    answers: Sequence[JobState | TargetUnavailable],
):
    assert list(yield_polled_states(answer(*answers), 3, patience_seconds=6))[-1] == DONE


def test_a_cluster_that_stays_away_ends_the_wait(pauses: list[float]):
    with pytest.raises(TargetUnavailable):
        list(yield_polled_states(answer(RUNNING, AWAY, AWAY, AWAY, DONE), 3, patience_seconds=6))
    assert pauses == [3, 3, 3]


@pytest.mark.parametrize(("answers", "patience_seconds"), [([AWAY, DONE], 600), ([RUNNING, AWAY, DONE], 0)])
def test_a_cluster_that_never_answered_is_asked_once(
    answers: Sequence[JobState | TargetUnavailable], patience_seconds: float, pauses: list[float]
):
    with pytest.raises(TargetUnavailable):
        list(yield_polled_states(answer(*answers), 3, patience_seconds=patience_seconds))
    assert len(pauses) == len(answers) - 2
