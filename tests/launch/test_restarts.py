"""How often a launch is started again, and for what."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bundle.errors import ExitCode
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.process import LaunchFailed
from bundle.launch.restarts import run_with_restarts
from bundle.launch.verdict import Verdict


def ends(
    kind: FailureKind = FailureKind.KILLED, action: RestartAction = RestartAction.RESTART
) -> LaunchFailed:
    return LaunchFailed(Verdict(ExitCode.JOB_FAILED, kind, "killed", action))


def starts(*raised: LaunchFailed | None) -> tuple[Callable[[], None], list[int]]:
    """What ends as told, in turn, and how often it was called."""
    called: list[int] = []

    def start() -> None:
        error = raised[len(called)]
        called.append(len(called))
        if error is not None:
            raise error

    return start, called


@pytest.mark.parametrize(
    ("most", "calls", "ended"), [(0, 1, False), (1, 2, False), (2, 3, True), (9, 3, True)]
)
def test_a_launch_is_started_again_until_it_ends_well_or_has_been_too_often(most, calls, ended):
    start, called = starts(ends(), ends(), None)
    if ended:
        run_with_restarts(start, most, lambda: None)
    else:
        with pytest.raises(LaunchFailed):
            run_with_restarts(start, most, lambda: None)
    assert len(called) == calls


def test_a_node_does_not_start_again_while_another_may_still_run_what_it_has_ended():
    silent = LaunchFailed(replace(ends().verdict, silent=("gpu08",)))
    start, called = starts(silent, None)
    with pytest.raises(LaunchFailed):
        run_with_restarts(start, 9, lambda: None)
    assert len(called) == 1


def test_a_launcher_that_was_told_to_stop_starts_nothing_again():
    start, called = starts(LaunchFailed(ends().verdict, is_stopped=True), None)
    with pytest.raises(LaunchFailed):
        run_with_restarts(start, 9, lambda: None)
    assert len(called) == 1


def test_a_new_checkpoint_gives_it_all_its_restarts_again():
    start, called = starts(*[ends()] * 6)
    checkpoints = [0, 1, 2, 2, 2]  # the first two restarts got further
    with pytest.raises(LaunchFailed):
        run_with_restarts(start, 1, lambda: checkpoints[min(len(called), 4)])
    assert len(called) == 3


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (FailureKind.EXCEPTION, RestartAction.STOP),
        (FailureKind.REFUSED, RestartAction.STOP),
        (FailureKind.DISK, RestartAction.STOP),
        (FailureKind.DEVICE, RestartAction.RESTART_WITHOUT),
        (FailureKind.LOST_NODE, RestartAction.RESTART_WITHOUT),
        (FailureKind.PREEMPTED, RestartAction.RESTART),
        (FailureKind.STOPPED, RestartAction.RESTART),
        (FailureKind.LAUNCH, RestartAction.RESTART),
    ],
)
def test_what_a_restart_in_place_cannot_mend_ends_at_once(kind, action):
    start, called = starts(ends(kind, action), None)
    with pytest.raises(LaunchFailed):
        run_with_restarts(start, 9, lambda: None)
    assert len(called) == 1
