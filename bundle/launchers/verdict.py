"""One exit code and one message for a launch, out of what its ranks, its agent and its signals say."""

import re
import signal
from pathlib import Path

from bundle.errors import ExitCode
from bundle.frozen import frozen
from bundle.launchers.outcomes import Outcome

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


@frozen
class Verdict:
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
    """Returns the verdict of a launch: `agent` is torchrun's status, `stopped_by` the signal we were sent.

    `out_of_memory`: meanwhile the kernel killed a process for want of memory.
    """
    if agent == 0:
        return Verdict(ExitCode.OK)
    # The first that says what is wrong; what merely broke may be the echo of it on another rank.
    ended = sorted((o for o in outcomes if o.code), key=lambda outcome: (not outcome.explained, outcome.time))
    causes = [(ExitCode(o.code), o) for o in ended if o.code in _CAUSES]
    preempted = [o for o in ended if o.code == ExitCode.PREEMPTED]
    if stopped_by == signal.SIGINT:
        return Verdict(ExitCode.INTERRUPTED, "interrupted")
    if causes:
        code, first = causes[0]
        silent = ", ".join(str(o.rank) for o in outcomes if o.code is None)
        stuck = f"; no word from rank {silent}" if silent and code == ExitCode.HANG else ""
        return Verdict(code, f"rank {first.rank}: {first.message}{stuck}")
    if preempted and all(o.code in (ExitCode.OK, ExitCode.PREEMPTED, None) for o in outcomes):
        return Verdict(ExitCode.PREEMPTED, preempted[0].message)
    if stopped_by is not None:
        name = signal.Signals(stopped_by).name
        return Verdict(ExitCode.TERMINATED, f"ended by {name} before a checkpoint was complete")
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
