"""A run that meets a fault: how it ends, what is left of it, and what it learns when it goes on."""

import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from bundle.launch import outcomes
from bundle.launch.verdict import FILE_NAME
from tests.command import finish
from tests.record import Proven, RecordFault
from tests.runs.numbers import learned
from tests.targets.test_slurm_runs import left
from tests.training.test_interruption import TINY
from tests.training.verdicts import read_verdict

SECONDS = 600.0  # for a launch, or a state of one, on a busy machine
INTERVAL = 10
RECIPE = (*TINY, "train.steps=60", "train.log_interval=1", f"checkpoint.interval={INTERVAL}")
SAME_COMMAND, BY_ITSELF = "by the same command", "by itself"
_PROVEN = "runs that meet the faults of docs/launch.md learn what undisturbed ones do"


def wait_for(condition: Callable[[], object], *processes: Popen[str]) -> None:
    """Wait for a condition; a process that ends before is an error."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, [finish(process) for process in ended]
        time.sleep(0.01)


def has_checkpoint(directory: Path, step: int = INTERVAL) -> bool:
    """Return whether a run trains after the checkpoint of a step, and writes it no more."""
    if not (directory / f"checkpoints/step-{step:08d}").exists():
        return False
    return len((directory / "metrics.jsonl").read_text().splitlines()) > step + 1


def read_pids(directory: Path, node: int = 0) -> list[int]:
    """Return the processes of the ranks of a node's first launch."""
    return [outcome.pid for outcome in outcomes.read(directory / f"logs/node-{node}/1")]


def find_verdict(directory: Path) -> dict[str, Any] | None:
    """Return the first node's verdict on its first launch; None where nobody was left to write it."""
    return read_verdict(directory) if (directory / "logs/node-0/1" / FILE_NAME).exists() else None


def find_processes(place: Path, seconds: float = 10) -> list[str]:
    """Return the command lines with a path below `place` that processes still have after a while."""
    deadline = time.monotonic() + seconds
    while (lines := left(re.escape(f"{place}/"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return lines


def describe_verdict(verdict: Mapping[str, Any]) -> str:
    """Return the kind, the place and the action of a verdict."""
    rank = [] if verdict["rank"] is None else [f"rank {verdict['rank']}"]
    place = " on ".join([*rank, *([verdict["node"]] if verdict["nodes"] > 1 else [])])
    return f"{verdict['kind']}{f', {place}' if place else ''}; {verdict['action']}"


def describe_cause(verdict: Mapping[str, Any], folder: Path) -> str:
    """Return the cause in a verdict without process numbers and the path of the test's folder."""
    return re.sub(r"\bprocess \d+", "process PID", verdict["cause"].replace(str(folder), ""))


@dataclass(frozen=True)
class Faults:
    """Checks what becomes of runs that meet faults, and records a row for each."""

    record_fault: RecordFault
    proven: Proven
    folder: Path  # of the test

    def check(
        self,
        target: str,
        fault: str,
        *,
        verdict: Mapping[str, Any] | None,
        processes: list[str],
        metrics: Path,
        whole: Path,
        resumed: str = SAME_COMMAND,
    ) -> None:
        """Check a run that went on after a fault, and record its row.

        `verdict` is None where the launcher was killed, which writes it. `processes` are those that outlived
        the fault. `metrics` is the file of the run, `whole` that of an undisturbed one.
        """
        assert processes == []
        rows = learned(metrics.read_text())
        assert rows == learned(whole.read_text())
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert len(losses) == 60
        self.proven(_PROVEN)
        self.record_fault(
            {
                "target": target,
                "fault": fault,
                "verdict": describe_verdict(verdict) if verdict else "none",
                "cause": describe_cause(verdict, self.folder) if verdict else "-",
                "code": str(verdict["code"] if verdict else -signal.SIGKILL),
                "resumed": resumed,
                "losses": f"equal ({len(losses)})",
                "processes": "none",
            }
        )
