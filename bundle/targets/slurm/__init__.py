"""Slurm: the calls of sbatch, scontrol and scancel for a job. `batch` writes the batch script."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bundle import files
from bundle.errors import ExitCode, TargetUnavailable, UsageError, format_value
from bundle.launch.job import FILE_NAME, Job
from bundle.targets import ray
from bundle.targets.client import ClientTimeout, run_client
from bundle.targets.log_reader import read_appended_text
from bundle.targets.slurm.batch import (
    ENDED_PREFIX,
    JOB_DIRECTORY_PREFIX,
    STOPPED_PREFIX,
    build_script,
    get_job_directory,
)
from bundle.targets.slurm.options import SlurmOptions, find_sbatch_variable_violations
from bundle.targets.states import PATIENCE_SECONDS, JobState, ListedJob, find_exit_code, yield_polled_states

SCRIPT_NAME = "job.sh"
# A look at the files of a job, and a question to Slurm's controller, which answers every user of the cluster.
POLL_SECONDS, QUERY_SECONDS = 2.0, 15.0
# States in which the exit code that the script has written counts: it ends, or was cancelled after a stop.
_STATES_WITH_SCRIPT_EXIT_CODE = ("RUNNING", "COMPLETING", "CANCELLED")
# The final states of a job (squeue's manual page, JOB STATE CODES), with the exit code. None stands for the
# code of its script. In any other state the job has not ended.
_FINAL_STATE_EXIT_CODES: Mapping[str, ExitCode | None] = {
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


def submit(job: Job, options: SlurmOptions, workdir: Path) -> str:
    """Submit a job to Slurm and return its number. Raise TargetUnavailable where Slurm refuses it."""
    text, directory = build_script(job, options, workdir), get_job_directory(job)
    if wrong := list(find_sbatch_variable_violations(os.environ)):
        raise UsageError("environment variables would override the batch script. Unset them", wrong)
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / FILE_NAME, job.to_text())
    files.write_text(directory / SCRIPT_NAME, text)
    try:
        number = (
            run_client("sbatch", "--parsable", str(directory / SCRIPT_NAME), seconds=PATIENCE_SECONDS)
            .strip()
            .partition(";")[0]
        )
    except ClientTimeout as error:
        return _find_queued_job(directory / SCRIPT_NAME, error)
    if not number.isdigit():
        raise TargetUnavailable(f"sbatch answered {format_value(number)}, which is not a job number")
    return number


def _find_queued_job(script: Path, error: ClientTimeout) -> str:
    """Return the number of a batch script's job that sbatch did not report.

    Raise TargetUnavailable where there is no such job.
    """
    try:
        jobs = [
            _parse_fields(line) for line in run_client("scontrol", "--oneliner", "show", "job").splitlines()
        ]
    except TargetUnavailable:
        jobs = []
    alive = [job for job in jobs if job.get("JobState") not in _FINAL_STATE_EXIT_CODES]
    if not (numbers := [int(job["JobId"]) for job in alive if job.get("Command") == str(script)]):
        raise TargetUnavailable(
            f"{error}; the job may be queued nevertheless. Look for {script} in `scontrol show job` before"
            " you launch it again"
        )
    return str(max(numbers))


def list_jobs() -> Iterator[ListedJob]:
    """Yield this user's jobs that Slurm knows and that `submit` submitted."""
    rows = run_client(
        "squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%i|%T|%o"
    ).splitlines()
    for number, state, command in (row.split("|", 2) for row in rows):
        script = Path(command)
        if script.name == SCRIPT_NAME and script.parent.name.startswith(JOB_DIRECTORY_PREFIX):
            yield ListedJob(number, state, state in _FINAL_STATE_EXIT_CODES, script.parent.parent.parent)


def query_state(number: str) -> JobState:
    """Return the state of a job as Slurm reports it, or as its run directory has it once Slurm forgot it.

    Raise TargetUnavailable where neither is known.
    """
    try:
        fields = _parse_fields(run_client("scontrol", "--oneliner", "show", "job", number))
    except TargetUnavailable:
        if (ended := _find_state_in_run_directories(number)) is None:
            raise
        return ended
    name, output = fields.get("JobState", ""), fields.get("StdOut")
    if not name:
        raise TargetUnavailable(f"scontrol reports no state of job {number}")
    code = _parse_final_exit_code(name, fields)
    if (
        output
        and name in _STATES_WITH_SCRIPT_EXIT_CODE
        and (script_code := _read_written_exit_code(Path(output).parent, number))
    ):
        code = int(script_code)
    return JobState(name, fields.get("Reason", ""), code, Path(output) if output else None)


def _parse_final_exit_code(name: str, fields: Mapping[str, str]) -> int | None:
    """Return the exit code of a job in that state; None before the job has ended."""
    if name not in _FINAL_STATE_EXIT_CODES:
        return None
    if (code := _FINAL_STATE_EXIT_CODES[name]) is not None:
        return int(code)
    status, _, signal = fields.get("ExitCode", "1:0").partition(":")
    exit_code = int(status) or (128 + int(signal) if signal != "0" else 0)
    return exit_code if exit_code or name == "COMPLETED" else int(ExitCode.JOB_FAILED)


def request_stop(number: str) -> None:
    """Tell a running job to save and end; a waiting job does not begin.

    Raise TargetUnavailable where the job's run directory cannot be written to.
    """
    now = query_state(number)
    if now.has_ended:
        return
    if now.name == "RUNNING" and now.output is not None:
        directory = now.output.parent  # the same as `get_job_directory`, as no option may set another
        try:
            (directory / f"{STOPPED_PREFIX}{number}").touch()
        except OSError as error:
            raise TargetUnavailable(
                f"slurm:{number}: the job was not stopped, because no stop file can be written to {directory}"
                f" ({error.strerror}). Without this file, Slurm queues the job again. Stop it on a machine"
                f" that has its run directory, or run `scancel {number}`"
            ) from error
        # Signal the step, as the script must write the exit code. With Ray, the script requests the save.
        batch = ["--batch"] if files.is_file(directory / ray.TOKEN_NAME) else []
        run_client("scancel", *batch, "--signal=TERM", number)
    else:
        run_client("scancel", number)


def read_log(number: str) -> str:
    """Return everything that a job has written. Raise UsageError where it has written nothing yet."""
    now = query_state(number)
    if now.output is None or not files.is_file(now.output):
        raise UsageError(f"slurm:{number}: the job has no output yet")
    return now.output.read_text(errors="replace")


def follow(number: str, seconds: float = POLL_SECONDS) -> Iterator[str]:
    """Yield what a job writes, as it comes, until the job has ended; a requeued job has not ended."""
    yield from read_appended_text(now.output for now in _poll_states(number, seconds))


def wait(number: str, seconds: float = POLL_SECONDS) -> int:
    """Wait until a job has ended and return its exit code."""
    return find_exit_code(_poll_states(number, seconds))


def _poll_states(number: str, seconds: float) -> Iterator[JobState]:
    return yield_polled_states(_PacedQuery(number).query_state, seconds)


class _PacedQuery:
    """The state of a job; Slurm is asked once in QUERY_SECONDS, and as soon as the job's script has ended."""

    def __init__(self, number: str) -> None:
        self._number, self._next_query = number, 0.0
        self._answer: JobState | TargetUnavailable | None = None
        self._script_code = ""

    def query_state(self) -> JobState:
        """Return the last state that Slurm reported. Raise TargetUnavailable where it did not answer."""
        if time.monotonic() >= self._next_query or self._read_written_exit_code() != self._script_code:
            try:
                self._answer = query_state(self._number)
            except TargetUnavailable as error:
                self._answer = error
            self._next_query, self._script_code = (
                time.monotonic() + QUERY_SECONDS,
                self._read_written_exit_code(),
            )
        if isinstance(self._answer, JobState):
            return self._answer
        assert self._answer is not None, "it was asked above"
        raise self._answer

    def _read_written_exit_code(self) -> str:
        output = self._answer.output if isinstance(self._answer, JobState) else None
        return _read_written_exit_code(output.parent, self._number) if output else self._script_code


def _read_written_exit_code(directory: Path, number: str) -> str:
    """Return the exit code that a job's script has written; empty before its end."""
    code = (files.read_text_if_small(directory / f"{ENDED_PREFIX}{number}") or "").strip()
    return code if code.isdigit() else ""


def _find_state_in_run_directories(number: str) -> JobState | None:
    """Return the final state of a job that Slurm has forgotten, from run directories below this one."""
    for directory in Path().glob("runs/*/logs/slurm-*"):
        if code := _read_written_exit_code(directory, number):
            return JobState("ENDED", "Slurm has no record", int(code), directory / f"slurm-{number}.log")
    return None


def _parse_fields(line: str) -> Mapping[str, str]:
    """Return the fields NAME=VALUE of scontrol's line; a value continues up to the next name."""
    return dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", line))
