"""This machine: a node of a job that goes on when who launched it is gone, and is known by its folder.

The folder lies in the run directory and holds the job file, what the node writes, and its exit code once it
has ended. Whether it runs is asked of a lock that its processes hold, which the kernel lets go with the last.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.errors import EnvironmentUnfit, ExitCode, LaunchUnavailable, UsageError
from bundle.launch import command as ranks
from bundle.launch import job as job_file
from bundle.launch.command import Command
from bundle.launch.job import NAME, Job
from bundle.launch.rendezvous import discover
from bundle.targets.growing import grown

LOG = "node.log"
_LOCK, _GROUP, _ENDED = "lock", "group", "ended"
_LOOK_SECONDS = 0.5
# The shell outlives a request to save, which goes to all of its group, and writes down how the node ended.
_SHELL = 'trap : TERM INT HUP; "$@"; echo $? >"$0"'


@dataclass(frozen=True)
class Options:
    """How often ranks are started again in place, without a new checkpoint between; what runs them.

    `mcore` is the megatron-core that they import instead of the installed one, as `train` takes it;
    `preflight`: first every node does what the job will ask of it.
    """

    restarts: int = 0
    mcore: str = ""
    preflight: bool = False
    python: str = sys.executable


class State(NamedTuple):
    """How a node is: its state, why it is so, its exit code once it has ended."""

    name: str
    reason: str
    code: int | None


def command(job: Job, options: Options, folder: Path, node_rank: int = 0, rendezvous: str = "") -> Command:
    """What runs one node. Raises UsageError where several machines are not told where they meet."""
    if wrong := job_file.unmet(job, rendezvous):
        raise UsageError("no command can be written", wrong)
    words = job_file.words(
        job, folder / NAME, node_rank, rendezvous, options.restarts, preflight=options.preflight
    )
    mcore = [f"--mcore={options.mcore}"] if options.mcore else []
    return Command((options.python, "-m", "bundle", *words, *mcore))


def dry_run(job: Job, options: Options, rendezvous: str = "") -> str:
    """What would run: a command for each node, and the one by which that starts its ranks."""
    folder, rendezvous = next(_next(job)), job_file.met_at(job, rendezvous)
    lines = [f"# executes {folder / NAME}, which `mcore-bundle launch local` writes"]
    for node in range(job.nodes):
        lines += [
            f"# node {node} of {job.nodes}",
            command(job, options, folder, node, rendezvous).shell(),
            "# which starts its ranks by",
        ]
        where = discover({}, nodes=job.nodes, node_rank=node, endpoint=rendezvous or None)
        lines.append(ranks.command(job_file.launch(job, where, python=options.python), {}).shell())
    return "\n".join(lines) + "\n"


def submit(job: Job, options: Options, workdir: Path, node_rank: int = 0, rendezvous: str = "") -> str:
    """Starts one node; returns the name of its folder. Raises EnvironmentUnfit where that cannot be made."""
    folders = _next(job)
    words = command(job, options, folder := next(folders), node_rank, rendezvous)
    try:
        while not _made(folder):  # another node just has
            words = command(job, options, folder := next(folders), node_rank, rendezvous)
        with (folder / _LOCK).open("wb") as lock, (folder / LOG).open("wb") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files.write_text(folder / NAME, job.text())
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, str(folder / _ENDED), *words.argv],
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        files.write_text(folder / _GROUP, f"{process.pid} {socket.gethostname()}")
    except OSError as error:
        raise EnvironmentUnfit(f"{folder}: {error.strerror}; name another with --run-directory") from error
    return str(folder)


def state(name: str) -> State:
    """How a node is. Raises LaunchUnavailable where none was started in such a folder."""
    if _runs(Path(name)):
        return State("RUNNING", "", None)
    said = (files.read(Path(name) / _ENDED) or "").strip()
    if not said.isdigit():
        return State("LOST", "killed, or its machine was", int(ExitCode.LAUNCH_UNAVAILABLE))
    code = int(said)
    return State("FAILED" if code else "COMPLETED", f"code {code}" if code else "", code)


def stop(name: str) -> None:
    """Has a node's ranks save and end; told so again, it ends at once."""
    if not _runs(Path(name)):
        return
    group, _, host = (files.read(Path(name) / _GROUP) or "").partition(" ")
    if host != socket.gethostname():
        raise LaunchUnavailable(f"local:{name}: runs on {host or 'another machine'}; stop it there")
    os.killpg(int(group), signal.SIGTERM)


def written(name: str) -> str:
    """All that a node has written."""
    return "".join(grown([_known(name) / LOG]))


def follow(name: str) -> Iterator[str]:
    """What a node writes, as it comes, until it has ended."""
    yield from grown(Path(name) / LOG for _ in _looked_at(name))


def wait(name: str) -> int:
    """The exit code of a node, once it has ended."""
    *_, last = _looked_at(name)
    assert last.code is not None, "it has ended"
    return last.code


def _next(job: Job) -> Iterator[Path]:
    """The folders that the next launch of a run here may have."""
    logs = job.directory.absolute() / "logs"
    taken = [int(path.name[6:]) for path in logs.glob("local-*") if path.name[6:].isdecimal()]
    return (logs / f"local-{number}" for number in count(max(taken, default=0) + 1))


def _made(folder: Path) -> bool:
    """Whether this process made it, and no other."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _known(name: str) -> Path:
    folder = Path(name)
    if not files.is_file(folder / _LOCK):
        raise LaunchUnavailable(f"local:{name}: no job was launched there, on this machine")
    return folder


def _runs(folder: Path) -> bool:
    with (_known(str(folder)) / _LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _looked_at(name: str) -> Iterator[State]:
    """How a node is, every now and then until it has ended."""
    while True:
        yield (now := state(name))
        if now.code is not None:
            return
        time.sleep(_LOOK_SECONDS)
