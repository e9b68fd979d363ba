"""How each rank of this node ended, and the one exit code and message that this makes of a launch.

torchrun says 1 whatever happened, so the ranks write down how they end, and the launcher reads it.
"""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.errors import BundleError, ExitCode, JobFailed

# The variable that names the folder of one launch on one node; unset where somebody else started the ranks.
DIRECTORY = "BUNDLE_OUTCOMES"
AGENT = "agent.pid"
STOP = "stop"
# What a rank says only when it knows the cause; a plain failure is often the echo of another rank's death.
_CAUSES = (
    ExitCode.USAGE,
    ExitCode.ENVIRONMENT_UNFIT,
    ExitCode.PATCHES,
    ExitCode.LAUNCH_UNAVAILABLE,
    ExitCode.HANG,
)
_FIRST_DEATH = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_TAIL_LINES = 15
# A line of the warnings module, and the source line that it shows.
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:[ \t]+\S.*\n?)?", re.MULTILINE)
_GOES_ON = "the same command goes on after the last checkpoint"
_KILLED = (
    f"killed by SIGKILL: by somebody, or by the kernel when memory ran out (`dmesg` says so); {_GOES_ON}"
)
_KILLED_FOR_MEMORY = (
    "killed by SIGKILL while the kernel ended processes for want of memory: give the container more, "
    f"or lower train.micro_batch_size or the ranks of a node; {_GOES_ON}"
)


@dataclass(frozen=True)
class Outcome:
    """One rank: alive while `code` is None; `time` is when it said so, in seconds since the epoch.

    `explained`: the message says what is wrong, rather than what broke.
    """

    rank: int
    local_rank: int
    pid: int
    time: float
    code: int | None = None
    message: str = ""
    explained: bool = False


def next_logs(run: Path, node_rank: int) -> Path:
    """The log folder of the next launch of this node in a run directory; makes nothing."""
    here = run / "logs" / f"node-{node_rank}"
    taken = [int(path.name) for path in here.glob("*") if path.name.isdecimal()]
    return here / str(max(taken, default=0) + 1)


def directory() -> Path | None:
    """The folder of this launch, or None for a rank that somebody else started."""
    named = os.environ.get(DIRECTORY)
    return Path(named) if named else None


def write(outcome: Outcome) -> None:
    """Puts down how a rank stands, in one rename, where the launcher reads it."""
    folder = directory()
    if folder is None:
        return
    files.write_json(folder / f"rank-{outcome.rank}.json", asdict(outcome))


def read(folder: Path) -> list[Outcome]:
    """What the ranks of a launch put down, in the order of their ranks."""
    found = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda outcome: outcome.rank)


def asked_to_stop() -> bool:
    """Whether the launcher was told to stop, perhaps before this rank could take a signal."""
    folder = directory()
    return folder is not None and (folder / STOP).exists()


def report(rank: int, local_rank: int, body: Callable[[], None]) -> ExitCode:
    """How `body`, the work of a rank, ended; the launcher and this rank's log learn why."""
    # Our launcher starts ranks that ignore it; until the rank can save, it must end it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    write(Outcome(rank, local_rank, os.getpid(), time.time()))
    code, message, explained = ExitCode.OK, "", True
    try:
        body()
    except BundleError as error:
        code, message = ExitCode(error.code), str(error)
    except KeyboardInterrupt:
        code, message = ExitCode.INTERRUPTED, "interrupted"
    except BaseException as error:  # noqa: BLE001  whatever ends a rank; torch has some that are no Exception
        code, message, explained = ExitCode.JOB_FAILED, f"{type(error).__name__}: {error}", False
        traceback.print_exc()
    conclude(rank, local_rank, code, message, explained=explained)
    return code


def conclude(
    rank: int, local_rank: int, code: ExitCode, message: str = "", *, explained: bool = True
) -> None:
    """Puts down the end of a rank; says it on stderr too, which is the rank's log."""
    try:
        write(Outcome(rank, local_rank, os.getpid(), time.time(), int(code), message, explained))
    except JobFailed as error:  # a full disk must not hide why the rank ends
        print(f"cannot write this rank's outcome: {error}", file=sys.stderr)
    if message:
        print(f"rank {rank}: {message}", file=sys.stderr, flush=True)


class Verdict(NamedTuple):
    """How a launch ended on this node."""

    code: ExitCode
    message: str = ""


def judge(
    folder: Path,
    agent: int,
    outcomes: list[Outcome],
    stopped_by: int | None,
    *,
    out_of_memory: bool = False,
) -> Verdict:
    """The verdict of a launch: `agent` is torchrun's status, `stopped_by` the signal we were sent.

    `out_of_memory`: meanwhile the kernel killed a process for want of memory.
    """
    if agent == 0:
        return Verdict(ExitCode.OK)
    # The first that says what is wrong; what merely broke may be the echo of it on another rank.
    ended = sorted((o for o in outcomes if o.code), key=lambda outcome: (not outcome.explained, outcome.time))
    causes = [(ExitCode(o.code), o) for o in ended if o.code in _CAUSES]
    preempted = [o for o in ended if o.code == ExitCode.PREEMPTED]
    if causes:
        code, first = causes[0]
        silent = ", ".join(str(o.rank) for o in outcomes if o.code is None)
        stuck = f"; no word from rank {silent}" if silent and code == ExitCode.HANG else ""
        return Verdict(code, f"rank {first.rank}: {first.message}{stuck}")
    if preempted and all(o.code in (ExitCode.OK, ExitCode.PREEMPTED, None) for o in outcomes):
        return Verdict(ExitCode.PREEMPTED, preempted[0].message)
    if stopped_by is not None:
        code = ExitCode.INTERRUPTED if stopped_by == signal.SIGINT else ExitCode.TERMINATED
        name = signal.Signals(stopped_by).name
        return Verdict(code, f"ended by {name} before a checkpoint was complete")
    return _failure(folder, outcomes, ended, _KILLED_FOR_MEMORY if out_of_memory else _KILLED)


def _failure(folder: Path, outcomes: list[Outcome], ended: list[Outcome], killed: str) -> Verdict:
    first = _FIRST_DEATH.search(_text(folder / "agent.log"))
    if first is None and not outcomes:
        tail = _tail(folder / "agent.log", "torchrun")
        return Verdict(ExitCode.LAUNCH_UNAVAILABLE, f"torchrun could not start the ranks\n{tail}")
    failed = {o.local_rank: o for o in ended}
    local = int(first[2]) if first else next(iter(failed), 0)
    # torchrun names the rank whose death it saw first, which is the cause when that death was a signal.
    if not (first and int(first[1]) < 0) and ended:
        local = ended[0].local_rank
    ranks = {o.local_rank: o.rank for o in outcomes}
    name = f"rank {ranks[local]}" if local in ranks else f"local rank {local}"
    logs = sorted(folder.glob(f"*/attempt_*/{local}/stderr.log"))
    where = f"\n{name}'s log: {logs[-1]}" if logs else ""
    if local in failed:
        why = failed[local].message
    elif first and int(first[1]) == -signal.SIGKILL:
        why = killed
    else:
        number = int(first[1]) if first else 0
        said = f"with code {number} and no word" if number else "without a word"
        why = f"killed by {_signal_name(-number)}" if number < 0 else f"ended {said}"
        where += f"\n{_tail(logs[-1], name)}" if logs else ""
    return Verdict(ExitCode.JOB_FAILED, f"{name}: {why}{where}".rstrip())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _tail(path: Path, name: str) -> str:
    lines = _WARNING.sub("", _text(path)).rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join(f"[{name}] {line}" for line in lines)
