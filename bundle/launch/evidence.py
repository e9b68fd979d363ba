"""What is known of a launch on one node when it has ended: all that a verdict is made of."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.errors import ExitCode
from bundle.launch import hang, outcomes
from bundle.launch.hang import Standing
from bundle.launch.outcomes import Outcome
from bundle.launch.rendezvous import Rendezvous

_KERNEL = Path("/dev/kmsg")
_RECORD = 8192  # bytes; the kernel's own limit of one
_END = 1 << 16  # bytes of a log: its last words are in there


class Log(NamedTuple):
    """The end of what a rank wrote on stderr, and where all of it lies."""

    path: Path
    end: str


@dataclass(frozen=True)
class Evidence:
    """A launch on one node, after it: pure data.

    `status` is torchrun's and `agent` what it wrote; `logs` are by local rank. `standings` are of the ranks
    of all nodes, where they hung. `stopped_by` is the signal that we were sent, `gave_up` the wait for other
    nodes that was too long. `kernel` is what the kernel's log got meanwhile, as far as we may read it;
    `memory_kills`: it ended processes, of anybody, for memory. `overdue`: we killed what outlived a failure,
    be it `elsewhere`, on another node.
    `noticed` is what was unusual before: stragglers and losses that jumped.
    """

    status: int
    node: str = ""
    node_rank: int = 0
    nodes: int = 1
    per_node: int = 1
    outcomes: tuple[Outcome, ...] = ()
    agent: str = ""
    logs: Mapping[int, Log] = field(default_factory=dict)
    standings: tuple[Standing, ...] = ()
    kernel: tuple[str, ...] = ()
    memory_kills: bool = False
    stopped_by: int | None = None
    overdue: bool = False
    elsewhere: bool = False
    gave_up: str = ""
    noticed: tuple[str, ...] = ()


class KernelLog:
    """What the kernel logs from now on; nothing where we may not read it, as in most containers."""

    def __init__(self, path: Path = _KERNEL) -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.close()

    def lines(self) -> tuple[str, ...]:
        """The lines since this was made, or since they were read; without their time and level."""
        found: list[str] = []
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, _RECORD)
            except BrokenPipeError:
                continue  # so much was logged that some of it is lost
            except OSError:
                break
            if not record:
                break
            # "level,number,microseconds,flags;text", and what it is about in lines of their own.
            text = record.decode("utf-8", errors="replace").splitlines()[0]
            found.append(text.partition(";")[2])
        return tuple(found)

    def close(self) -> None:
        """Lets go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def gathered(
    folder: Path,
    meeting: Rendezvous,
    per_node: int,
    status: int,
    *,
    stopped_by: int | None = None,
    overdue: bool = False,
    hung: bool = False,
    elsewhere: bool = False,
    gave_up: str = "",
    kernel: tuple[str, ...] = (),
    memory_kills: bool = False,
) -> Evidence:
    """What the log folder of a launch holds, beside what its starter has seen.

    `hung`: it killed ranks that stood still in a hang, which have that for their end.
    """
    found = {int(path.parent.name): path for path in sorted(folder.glob("*/attempt_*/*/stderr.log"))}
    return Evidence(
        status=status,
        node=outcomes.node_name(),
        node_rank=meeting.node_rank,
        nodes=meeting.nodes,
        per_node=per_node,
        outcomes=tuple(_killed_in_hang(of) if hung else of for of in outcomes.read(folder)),
        agent=_end(folder / "agent.log"),
        logs={local: Log(path, _end(path)) for local, path in found.items()},
        standings=tuple(hang.read(outcomes.world(folder) or folder)),
        kernel=kernel,
        memory_kills=memory_kills,
        stopped_by=stopped_by,
        overdue=overdue,
        elsewhere=elsewhere,
        gave_up=gave_up,
        noticed=outcomes.noticed(folder),
    )


def _killed_in_hang(of: Outcome) -> Outcome:
    return of if of.code is not None else replace(of, code=int(ExitCode.HANG), message="killed in a hang")


def _end(path: Path) -> str:
    """The last words of a file; empty where there is none."""
    if not files.is_file(path):
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END))
        return file.read().decode("utf-8", errors="replace")
