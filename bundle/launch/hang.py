"""Where every rank stands when a job hangs, and the one statement that this makes.

A rank writes its own snapshot (`bundle.distributed.rank_snapshot`);
a launcher writes that of a rank which cannot.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from bundle import files
from bundle.errors import JobFailed
from bundle.launch import outcomes, ras
from bundle.launch.outcomes import Outcome, format_ranks

# The innermost frame of the main thread, as faulthandler writes it.
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_MOST_SHOWN = 4  # ranks that are told of one by one
# That a rank has to write down where it stands before its launcher does, and to print its stacks for that.
_SNAPSHOT_SECONDS, _PRINTING_SECONDS = 2.0, 0.5
# That ranks have to end, once a hang is noticed; other nodes wait longer than this for our word of it.
_ENDING_SECONDS = 10.0
PROCESS_ENDED = "its process has ended"
_PROCESS_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is held by a debugger",
    "D": "its process waits in the kernel, for a disk, a file server or a device",
    "Z": PROCESS_ENDED,
}


class Collective(NamedTuple):
    """The `number`-th call of a group, over `ranks`; `description` is its name and sizes."""

    group: str
    ranks: tuple[int, ...]
    number: int
    description: str

    def __str__(self) -> str:
        return f"{self.description} number {self.number} of {self.group}"


@dataclass(frozen=True)
class RankSnapshot:
    """Where a rank stands: what it has been doing for `seconds`, and in which `frame` of no library.

    `waits`: the collective that it is in; `entered`: the number of the last one that it came to, by group.
    `silent`: what its launcher knows of a rank that said none of this.
    """

    rank: int
    node: str
    doing: str = ""
    seconds: float = 0.0
    frame: str = ""
    waits: Collective | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    silent: str = ""

    def has_entered(self, collective: Collective) -> bool:
        """Whether it has called the collective too, or another in its place."""
        return self.entered.get(collective.group, 0) >= collective.number

    def __str__(self) -> str:
        if self.silent:
            return self.silent
        return f"it is in {self.waits}, {self.location}" if self.waits else f"it is {self.location}"

    @property
    def location(self) -> str:
        """Where in the code, and in what part of the job."""
        return f"at {self.frame}, in {self.doing}" if self.frame else f"in {self.doing}"


def write(folder: Path, snapshot: RankSnapshot) -> None:
    """Puts down the standing of a rank. Raises JobFailed where nothing can be written."""
    files.write_json(folder / f"hang-rank-{snapshot.rank}.json", asdict(snapshot))


def has_snapshot(folder: Path, rank: int) -> bool:
    """Whether a rank has put down where it stands."""
    return (folder / f"hang-rank-{rank}.json").exists()


def read(folder: Path) -> list[RankSnapshot]:
    """What ranks put down, in the order of their ranks."""
    snapshots = [
        _read(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("hang-rank-*.json")
    ]
    return sorted(snapshots, key=lambda snapshot: snapshot.rank)


def _read(values: dict[str, Any]) -> RankSnapshot:
    if values["waits"] is not None:
        group, ranks, number, description = values["waits"]
        values["waits"] = Collective(group, tuple(ranks), number, description)
    return RankSnapshot(**values)


def describe_process_state(pid: int) -> str:
    """Why a process cannot say where it stands, as the kernel knows it; empty where that knows of nothing."""
    stat = files.read_text(Path(f"/proc/{pid}/stat"))
    return _PROCESS_STATES.get(stat.rpartition(")")[2].split()[0], "") if stat else PROCESS_ENDED


def can_print_stacks(pid: int) -> bool:
    """Whether a process prints its stacks at SIGUSR1; one that has not begun to would die of it."""
    status = files.read_text(Path(f"/proc/{pid}/status")) or ""
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def find_innermost_frame(text: str) -> str:
    """The innermost frame of the stacks that a rank printed at SIGUSR1; empty where there are none."""
    _, thread, after = text.rpartition("Current thread ")
    match = _FRAME.search(after) if thread else None
    return f"`{match['function']}` ({match['file']}:{match['line']})" if match else ""


class HangSummary(NamedTuple):
    """What a hang is, in one line, and the rank that it is about; None where all are in it alike."""

    text: str
    rank: int | None = None


def summarize_hang(snapshots: Sequence[RankSnapshot]) -> HangSummary:
    """Who is in which collective, who never came, and what it does instead."""
    by_rank = {snapshot.rank: snapshot for snapshot in snapshots}
    collectives = {snapshot.waits for snapshot in snapshots if snapshot.waits}
    missing = {
        collective: [
            rank
            for rank in collective.ranks
            if rank not in by_rank or not by_rank[rank].has_entered(collective)
        ]
        for collective in sorted(collectives, key=str)
    }

    def find_idle_ranks(collective: Collective) -> list[int]:
        """Those who never came, and are in no other collective: they are what everybody waits for."""
        return [rank for rank in missing[collective] if rank not in by_rank or by_rank[rank].waits is None]

    by_size = sorted(missing, key=lambda collective: len(missing[collective]))
    for collective in by_size:
        if collective.ranks and (find_idle_ranks(collective) or not missing[collective]):
            return _summarize_collective(
                collective, missing[collective], by_rank, next(iter(find_idle_ranks(collective)), None)
            )
    listed = _join_parts(
        map(_describe_snapshot, snapshots if not collectives else _pick_representatives(snapshots))
    )
    if not collectives or not all(collective.ranks for collective in collectives):
        return HangSummary(listed, snapshots[0].rank if len(snapshots) == 1 else None)
    return HangSummary(f"ranks wait for each other: {listed}")


def _summarize_collective(
    collective: Collective, missing: Sequence[int], by_rank: Mapping[int, RankSnapshot], about: int | None
) -> HangSummary:
    """The statement about a collective, and those ranks of its group that never came to it."""
    present = [
        by_rank[rank] for rank in collective.ranks if rank in by_rank and by_rank[rank].waits == collective
    ]
    elsewhere = [
        by_rank[r]
        for r in collective.ranks
        if r in by_rank and r not in missing and by_rank[r].waits != collective
    ]
    text = f"{format_ranks([snapshot.rank for snapshot in present])} in {collective}, {present[0].location}"
    if not missing:
        return HangSummary(
            f"{text}; {_join_parts(map(_describe_snapshot, elsewhere))}"
            if elsewhere
            else f"{text}, to which all came"
        )
    absences = [
        f"{_name_rank(rank, by_rank)} never came: {by_rank.get(rank, 'it says nothing')}" for rank in missing
    ]
    return HangSummary(f"{text}; {_join_parts(absences)}", about)


def _pick_representatives(snapshots: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """One rank of each collective, since the others in it say the same, and all that are in none."""
    return list(
        {snapshot.waits or snapshot.rank: snapshot for snapshot in reversed(list(snapshots))}.values()
    )[::-1]


def _describe_snapshot(snapshot: RankSnapshot) -> str:
    description = str(snapshot).removeprefix("it is ")
    return f"rank {snapshot.rank} on {snapshot.node}: {description}"


def _name_rank(rank: int, by_rank: Mapping[int, RankSnapshot]) -> str:
    return f"rank {rank} on {by_rank[rank].node}" if rank in by_rank else f"rank {rank}"


def _join_parts(parts: Iterable[str]) -> str:
    shown = list(parts)
    more = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return "; ".join(shown[:_MOST_SHOWN]) + more


class HangMonitor:
    """What a launcher does about a hang: tells other nodes, asks NCCL, speaks for ranks that say nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noticed_at: float | None = None
        self._is_done = False

    @property
    def is_overdue(self) -> bool:
        """Whether ranks had their time to write down where they stand and to end: who is left never will."""
        return self._noticed_at is not None and time.monotonic() - self._noticed_at > _ENDING_SECONDS

    def poll(self, ranks: Sequence[Outcome]) -> None:
        """Called every now and then, as long as ranks run."""
        world = outcomes.find_world_folder(self._folder) or self._folder
        node_file, world_file = self._folder / outcomes.HANG_FILE, world / outcomes.HANG_FILE
        if self._is_done or not (node_file.exists() or world_file.exists()):
            return
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
            for file in (node_file, world_file):
                with suppress(OSError):  # a hang on a full disk is still a hang
                    file.touch()
            # Of processes that still live, and in nobody's way.
            path = world / f"hang-rank-{ranks[0].rank}.nccl.txt"
            Thread(target=ras.write, args=(path,), daemon=True).start()
        elif time.monotonic() - self._noticed_at > _SNAPSHOT_SECONDS:
            self._is_done = True
            for rank in ranks:
                if rank.code is None and not has_snapshot(world, rank.rank):
                    self._write_snapshot_for(rank, world)

    def _write_snapshot_for(self, rank: Outcome, world: Path) -> None:
        """Writes down what can be known of a rank that does not; its own stacks, where it can print them."""
        if not (reason := describe_process_state(rank.pid)):
            if can_print_stacks(rank.pid):
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
                time.sleep(_PRINTING_SECONDS)
            logs = sorted(self._folder.glob(f"*/attempt_*/{rank.local_rank}/stderr.log"))
            frame = find_innermost_frame(logs[-1].read_text(errors="replace")) if logs else ""
            reason = f"it is at {frame}, and says nothing" if frame else "it says nothing"
        with suppress(JobFailed):
            write(world, RankSnapshot(rank.rank, outcomes.get_node_name(), silent=reason))
