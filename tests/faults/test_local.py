"""Runs of two ranks on this machine that meet a fault, and go on when they are started again."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import pytest

from bundle.launch import outcomes
from tests.command import finish, start_training
from tests.faults.harness import (
    INTERVAL,
    RECIPE,
    SECONDS,
    find_processes,
    find_verdict,
    has_checkpoint,
    read_pids,
    wait_for,
)
from tests.training.verdicts import find_resumed_steps, read_verdict

pytestmark = pytest.mark.faults
# Every Python of a launch runs it: SIGRTMIN is an error of the program, SIGUSR2 takes ever more memory.
_HANDLERS = """\
import signal
def fail(*_):
    raise ArithmeticError("an error of this rank")
def grow(*_):
    taken = []
    while True:
        taken.append(b"x" * (1 << 24))
signal.signal(signal.SIGRTMIN, fail)
signal.signal(signal.SIGUSR2, grow)
"""


class Launch(NamedTuple):
    """A launch whose ranks train."""

    process: Popen[str]
    directory: Path
    ranks: list[int]
    cgroup: Path

    @property
    def agent(self) -> int:
        return int((self.directory / "logs/node-0/1" / outcomes.AGENT_PID_FILE).read_text())


def send(number: signal.Signals, rank: int | None = None) -> Callable[[Launch], None]:
    """Return what sends a signal to a rank, or to the launcher."""
    return lambda launch: os.kill(launch.process.pid if rank is None else launch.ranks[rank], number)


def kill_agent(launch: Launch) -> None:
    os.kill(launch.agent, signal.SIGKILL)


def exhaust_memory(launch: Launch) -> None:
    (launch.cgroup / "cgroup.procs").write_text(str(launch.ranks[1]))
    os.kill(launch.ranks[1], signal.SIGUSR2)


FAULTS: dict[str, tuple[Callable[[Launch], None], int, dict[str, Any], str]] = {
    "a rank is killed (SIGKILL)": (
        send(signal.SIGKILL, 1), 1, {"kind": "killed", "rank": 1, "action": "restart"}, "SIGKILL",
    ),
    "a rank raises an error": (
        send(signal.SIGRTMIN, 1), 1, {"kind": "exception", "rank": 1, "action": "stop"}, "ArithmeticError",
    ),
    "a rank is stopped (SIGSTOP)": (
        send(signal.SIGSTOP, 1), 6, {"kind": "hang", "rank": 1, "action": "restart"}, "SIGSTOP",
    ),
    "torchrun, which started the ranks, is killed": (
        kill_agent, 1, {"kind": "killed", "rank": None, "action": "restart"}, "torchrun",
    ),
    "the launcher is killed": (send(signal.SIGKILL), -signal.SIGKILL, {}, ""),
    "preemption (SIGTERM to the launcher)": (
        send(signal.SIGTERM), 75, {"kind": "preempted", "rank": None, "action": "restart"}, "at step",
    ),
    "a rank has no more memory in its cgroup": (
        exhaust_memory, 1, {"kind": "host memory", "rank": 1, "action": "restart"}, "memory",
    ),
}  # fmt: skip


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Popen[str]]]:
    """Start the run of the test."""
    started: list[Popen[str]] = []

    def start_run() -> Popen[str]:
        patience = ("--set", "distributed.timeout_seconds=40")
        started.append(start_training("demo", tmp_path / "run", RECIPE, *patience))
        return started[-1]

    (tmp_path / "handlers").mkdir()
    (tmp_path / "handlers/sitecustomize.py").write_text(_HANDLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "handlers"))
    monkeypatch.setenv("SLURMD_NODENAME", "node1")  # by which a verdict calls this machine
    yield start_run
    for process in started:
        process.kill()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_to_the_losses_of_an_undisturbed_one(faults, whole, start, tmp_path, cgroup, fault):
    directory = tmp_path / "run"
    inject, code, expected, cause = FAULTS[fault]
    process = start()
    wait_for(lambda: has_checkpoint(directory), process)
    inject(Launch(process, directory, read_pids(directory), cgroup))
    printed = finish(process, code, SECONDS)
    processes = find_processes(tmp_path)
    verdict = find_verdict(directory)
    assert bool(verdict) is bool(expected)
    if verdict:
        assert {key: verdict[key] for key in expected} == expected
        assert cause in verdict["cause"] and verdict["sentence"] in printed and verdict["code"] == code
    assert find_resumed_steps(finish(start(), timeout=SECONDS))
    faults.check(
        *("local", fault), verdict=verdict, processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(faults, whole, start, tmp_path):
    directory = tmp_path / "run"
    process = start()
    wait_for(lambda: has_checkpoint(directory, 3 * INTERVAL), process)
    os.kill(read_pids(directory)[1], signal.SIGKILL)
    finish(process, 1, SECONDS)
    processes = find_processes(tmp_path)
    *_, newest = sorted((directory / "checkpoints").glob("step-*"))
    shard = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    (step,) = find_resumed_steps(finish(start(), timeout=SECONDS))
    assert step == int(newest.name.removeprefix("step-")) - INTERVAL
    faults.check(
        *("local", "a rank is killed, then a shard of the newest checkpoint loses its second half"),
        verdict=read_verdict(directory), processes=processes,
        metrics=directory / "metrics.jsonl", whole=whole,
    )  # fmt: skip
