"""Slurm: what sbatch, scontrol and scancel are asked of a job, whose batch script is `batch`'s."""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.errors import ExitCode, LaunchUnavailable, UsageError, shown
from bundle.launch.job import NAME, Job
from bundle.targets import ray
from bundle.targets.client import NoAnswer, asked
from bundle.targets.growing import grown
from bundle.targets.slurm.batch import placed, script
from bundle.targets.slurm.options import Options, overruled

_log = logging.getLogger(__name__)

SCRIPT = "job.sh"
# How often a job is looked at, and for how long a controller may be away meanwhile.
LOOK_SECONDS, PATIENCE_SECONDS = 2.0, 600
# The states in which a job stays (squeue's manual page, JOB STATE CODES), by its exit code, None being its
# script's; in any other state it lives.
_ENDED: Mapping[str, ExitCode | None] = {
    "BOOT_FAIL": ExitCode.LAUNCH_UNAVAILABLE,
    "CANCELLED": ExitCode.TERMINATED,
    "COMPLETED": None,
    "DEADLINE": ExitCode.TERMINATED,
    "FAILED": None,
    "NODE_FAIL": ExitCode.LAUNCH_UNAVAILABLE,
    "OUT_OF_MEMORY": None,
    "PREEMPTED": ExitCode.TERMINATED,
    "REVOKED": ExitCode.LAUNCH_UNAVAILABLE,  # another cluster runs it
    "TIMEOUT": ExitCode.TERMINATED,
}


class State(NamedTuple):
    """What Slurm says of a job: its state, why it waits, where its output goes, its exit code once ended."""

    name: str
    reason: str
    output: Path | None
    code: int | None

    @property
    def ended(self) -> bool:
        return self.code is not None


def submit(job: Job, options: Options, workdir: Path) -> str:
    """Hands a job to Slurm; returns its number. Raises LaunchUnavailable where Slurm will not have it."""
    text, where = script(job, options, workdir), placed(job)
    if wrong := list(overruled(os.environ)):
        raise UsageError("sbatch would not do what the batch script says: unset", wrong)
    where.mkdir(parents=True, exist_ok=True)
    files.write_text(where / NAME, job.text())
    files.write_text(where / SCRIPT, text)
    try:
        number = (
            asked("sbatch", "--parsable", str(where / SCRIPT), seconds=PATIENCE_SECONDS)
            .strip()
            .partition(";")[0]
        )
    except NoAnswer as error:
        return _queued(where / SCRIPT, error)
    if not number.isdigit():
        raise LaunchUnavailable(f"sbatch answered {shown(number)}, which is no number of a job")
    return number


def _queued(script: Path, error: NoAnswer) -> str:
    """The number of the job of a batch script that sbatch did not say. Raises LaunchUnavailable if none."""
    try:
        jobs = [_fields(line) for line in asked("scontrol", "--oneliner", "show", "job").splitlines()]
    except LaunchUnavailable:
        jobs = []
    alive = [said for said in jobs if said.get("JobState") not in _ENDED]
    if not (numbers := [int(said["JobId"]) for said in alive if said.get("Command") == str(script)]):
        raise LaunchUnavailable(
            f"{error}; it may queue the job even so: look for {script} with `scontrol show job` before you"
            " launch it again"
        )
    return str(max(numbers))


def state(number: str) -> State:
    """What Slurm says of a job, or once it has forgotten it, what that left in its run directory.

    Raises LaunchUnavailable where neither does.
    """
    try:
        said = _fields(asked("scontrol", "--oneliner", "show", "job", number))
    except LaunchUnavailable:
        if (ended := _forgotten(number)) is None:
            raise
        return ended
    name, output = said.get("JobState", ""), said.get("StdOut")
    if not name:
        raise LaunchUnavailable(f"scontrol says nothing of job {number}")
    return State(name, said.get("Reason", ""), Path(output) if output else None, _code(name, said))


def _code(name: str, said: Mapping[str, str]) -> int | None:
    """The exit code of a job in that state; None while it lives."""
    if name not in _ENDED:
        return None
    if (code := _ENDED[name]) is not None:
        return int(code)
    status, _, signal = said.get("ExitCode", "1:0").partition(":")
    own = int(status) or (128 + int(signal) if signal != "0" else 0)
    return own if own or name == "COMPLETED" else int(ExitCode.JOB_FAILED)


def stop(number: str) -> None:
    """Has a job save and end, one that waits not begin. Raises LaunchUnavailable where it cannot be told."""
    now = state(number)
    if now.ended:
        return
    if now.name == "RUNNING" and now.output is not None:
        where = now.output.parent  # `placed`, as no option may say another
        try:
            (where / f"stopped-{number}").touch()
        except OSError as error:
            raise LaunchUnavailable(
                f"slurm:{number}: it would be queued again, as {where} cannot be written to here"
                f" ({error.strerror}): stop it where its run directory is seen, or `scancel {number}`"
            ) from error
        # The step alone, whose batch script says how it ended; of Ray's, the script, which has it save.
        batch = ["--batch"] if files.is_file(where / ray.TOKEN) else []
        asked("scancel", *batch, "--signal=TERM", number)
    else:
        asked("scancel", number)


def written(number: str) -> str:
    """All that a job has written. Raises UsageError where that is nothing yet."""
    now = state(number)
    if now.output is None or not files.is_file(now.output):
        raise UsageError(f"slurm:{number}: has written nothing yet")
    return now.output.read_text(errors="replace")


def follow(number: str, seconds: float = LOOK_SECONDS) -> Iterator[str]:
    """What a job writes, as it comes, until it has ended; a job that is requeued has not."""
    yield from grown(now.output for now in _looked_at(number, seconds))


def wait(number: str, seconds: float = LOOK_SECONDS) -> int:
    """The exit code of a job, once it has ended."""
    *_, last = _looked_at(number, seconds)
    assert last.code is not None, "it has ended"
    return last.code


def _looked_at(number: str, seconds: float) -> Iterator[State]:
    """How a job is, every now and then until it has ended; a controller that is away may come back."""
    silent = 0.0
    while True:
        try:
            now, silent = state(number), 0.0
        except LaunchUnavailable as error:
            if silent >= PATIENCE_SECONDS:
                raise
            if not silent:
                _log.warning("%s; asks again for %d s", error, PATIENCE_SECONDS)
            silent += seconds
        else:
            yield now
            if now.ended:
                return
        time.sleep(seconds)


def _forgotten(number: str) -> State | None:
    """How a job ended that Slurm no longer knows, by what it left in a run directory below this one."""
    for left in Path().glob(f"runs/*/logs/slurm-*/ended-{number}"):
        code = (files.read(left) or "").strip()
        if code.isdigit():
            return State("ENDED", "Slurm has forgotten it", left.parent / f"slurm-{number}.log", int(code))
    return None


def _fields(line: str) -> Mapping[str, str]:
    """The NAME=VALUE of scontrol's one line; a value goes on until the next name."""
    return dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", line))
