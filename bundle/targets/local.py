"""This machine as a target: a node of a job that outlives its launcher, identified by its folder.

The folder lies in the run directory. It holds the job file, what the node writes, and the exit code once the
node has ended. The processes of the node hold a lock, which the kernel releases with the last of them; the
lock tells whether the node runs.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bundle import files
from bundle.errors import EnvironmentUnfit, ExitCode, TargetUnavailable, UsageError
from bundle.launch import command as ranks
from bundle.launch import job as job_file
from bundle.launch.command import Command
from bundle.launch.job import FILE_NAME, Job
from bundle.launch.rendezvous import discover
from bundle.targets.log_reader import read_appended_text
from bundle.targets.options import Preflight, Restarts
from bundle.targets.states import JobState, ListedJob, find_exit_code, yield_polled_states

LOG_NAME = "node.log"
_LOCK_NAME, _GROUP_NAME, _EXIT_CODE_NAME = "lock", "group", "ended"
_POLL_SECONDS = 0.5
# A request to save goes to the whole process group. The shell survives it and writes the exit code.
_EXIT_CODE_SCRIPT = 'trap : TERM INT HUP; "$@"; echo $? >"$0"'


@dataclass(frozen=True)
class LocalOptions:
    """The options of a node; its ranks import `mcore` instead of the installed megatron-core."""

    restarts: Restarts = 0
    preflight: Preflight = False
    mcore: str = ""
    python: str = sys.executable


def build_node_command(
    job: Job, options: LocalOptions, folder: Path, node_rank: int = 0, rendezvous: str = ""
) -> Command:
    """Return the command that runs one node.

    Raise UsageError where the job has several machines and no rendezvous.
    """
    if wrong := job_file.find_rendezvous_problems(job, rendezvous):
        raise UsageError("the command cannot be generated", wrong)
    arguments = job_file.build_train_arguments(
        job, folder / FILE_NAME, node_rank, rendezvous, options.restarts, preflight=options.preflight
    )
    mcore = [f"--mcore={options.mcore}"] if options.mcore else []
    return Command((options.python, "-m", "bundle", *arguments, *mcore))


def render_dry_run(job: Job, options: LocalOptions, rendezvous: str = "") -> str:
    """Return the text of a dry run: the command of each node and the one that starts its ranks."""
    folder, rendezvous = (
        next(_list_next_folders(job)),
        job_file.get_rendezvous_or_placeholder(job, rendezvous),
    )
    lines = [f"# executes {folder / FILE_NAME}, which `mcore-bundle launch local` writes"]
    for node in range(job.nodes):
        lines += [
            f"# node {node} of {job.nodes}",
            build_node_command(job, options, folder, node, rendezvous).to_redacted_shell(),
            "# which starts its ranks by",
        ]
        node_rendezvous = discover({}, nodes=job.nodes, node_rank=node, endpoint=rendezvous or None)
        lines.append(
            ranks.build_command(
                job_file.build_launch(job, node_rendezvous, python=options.python), {}
            ).to_redacted_shell()
        )
    return "\n".join(lines) + "\n"


def submit(job: Job, options: LocalOptions, workdir: Path, node_rank: int = 0, rendezvous: str = "") -> str:
    """Start one node and return the name of its folder.

    Raise EnvironmentUnfit where the folder cannot be made.
    """
    folders = _list_next_folders(job)
    node_command = build_node_command(job, options, folder := next(folders), node_rank, rendezvous)
    try:
        while not _create_folder(folder):  # another node has just created it
            node_command = build_node_command(job, options, folder := next(folders), node_rank, rendezvous)
        with (folder / _LOCK_NAME).open("wb") as lock, (folder / LOG_NAME).open("wb") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files.write_text(folder / FILE_NAME, job.to_text())
            process = subprocess.Popen(
                ["/bin/sh", "-c", _EXIT_CODE_SCRIPT, str(folder / _EXIT_CODE_NAME), *node_command.argv],
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        files.write_text(folder / _GROUP_NAME, f"{process.pid} {socket.gethostname()}")
    except OSError as error:
        raise EnvironmentUnfit(f"{folder}: {error.strerror}. Name another --run-directory") from error
    return str(folder)


def list_jobs() -> Iterator[ListedJob]:
    """Yield this user's running nodes, and the nodes of run directories below `runs` of this directory."""
    folders = {*_find_running_folders(), *(path.absolute() for path in Path().glob("runs/*/logs/local-*"))}
    for folder in sorted(folders, key=lambda folder: (folder.parent, len(folder.name), folder.name)):
        if files.is_file(folder / _LOCK_NAME):
            state = query_state(str(folder))
            yield ListedJob(str(folder), state.name, state.has_ended, folder.parent.parent)


def query_state(name: str) -> JobState:
    """Return the state of a node. Raise TargetUnavailable where no node was started in that folder."""
    if _is_running(Path(name)):
        return JobState("RUNNING", "", None)
    exit_text = (files.read_text_if_small(Path(name) / _EXIT_CODE_NAME) or "").strip()
    if not exit_text.isdigit():
        return JobState("LOST", "the job's processes or its machine died", int(ExitCode.LAUNCH_UNAVAILABLE))
    code = int(exit_text)
    return JobState("FAILED" if code else "COMPLETED", f"code {code}" if code else "", code)


def request_stop(name: str) -> None:
    """Tell a node's ranks to save and end; a second call ends the node at once."""
    if not _is_running(Path(name)):
        return
    group, _, host = (files.read_text_if_small(Path(name) / _GROUP_NAME) or "").partition(" ")
    if host != socket.gethostname():
        raise TargetUnavailable(f"local:{name}: the job runs on machine '{host or 'unknown'}'. Stop it there")
    os.killpg(int(group), signal.SIGTERM)


def read_log(name: str) -> str:
    """Return everything that a node has written."""
    return "".join(read_appended_text([_require_launch_folder(name) / LOG_NAME]))


def follow(name: str) -> Iterator[str]:
    """Yield what a node writes, as it comes, until the node has ended."""
    yield from read_appended_text(Path(name) / LOG_NAME for _ in _poll_states(name))


def wait(name: str) -> int:
    """Wait until a node has ended and return its exit code."""
    return find_exit_code(_poll_states(name))


def _list_next_folders(job: Job) -> Iterator[Path]:
    """Yield the folders that the next launch of this run may use, in order."""
    logs = job.directory.absolute() / "logs"
    taken = [int(path.name[6:]) for path in logs.glob("local-*") if path.name[6:].isdecimal()]
    return (logs / f"local-{number}" for number in count(max(taken, default=0) + 1))


def _create_folder(folder: Path) -> bool:
    """Return True if this process created the folder, and False if it existed already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _find_running_folders() -> Iterator[Path]:
    """Yield the folders of the nodes whose shells are processes of this user."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = process.stat().st_uid == os.getuid()
            words = (process / "cmdline").read_bytes().split(b"\0") if is_ours else []
        except OSError:  # it has ended
            continue
        if words[:3] == [b"/bin/sh", b"-c", _EXIT_CODE_SCRIPT.encode()]:
            yield Path(os.fsdecode(words[3])).parent


def _require_launch_folder(name: str) -> Path:
    folder = Path(name)
    if not files.is_file(folder / _LOCK_NAME):
        raise TargetUnavailable(f"local:{name}: this machine has launched no job in this folder")
    return folder


def _is_running(folder: Path) -> bool:
    with (_require_launch_folder(str(folder)) / _LOCK_NAME).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _poll_states(name: str) -> Iterator[JobState]:
    return yield_polled_states(lambda: query_state(name), _POLL_SECONDS, patience_seconds=0)
