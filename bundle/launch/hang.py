"""Snapshots of all ranks when a job hangs, and the one sentence that summarizes them.

A rank writes its own snapshot (`bundle.distributed.rank_snapshot`). The launcher writes it for a rank that
cannot.
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
from bundle.launch import network, outcomes, ras
from bundle.launch.outcomes import RankState, format_ranks
from bundle.launch.rendezvous import Rendezvous

# The innermost frame of the main thread, as faulthandler writes it.
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_MOST_SHOWN = 4  # ranks that a summary describes one by one
# The time for a rank's own snapshot before its launcher writes one, and for printing its stacks.
_SNAPSHOT_SECONDS, _PRINTING_SECONDS = 2.0, 0.5
# The time for ranks to end after a hang is noticed; other nodes wait longer for our verdict.
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
        return f"{self.description} (call {self.number} of {self.group})"


@dataclass(frozen=True)
class RankSnapshot:
    """The position of a rank in a hang.

    `doing` is its activity for `seconds`, and `frame` the innermost frame outside libraries. `waits`: the
    collective that it is in. `entered`: the number of the last collective that it entered, by group.
    `silent`: the launcher's description of a rank that wrote no snapshot.
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
        """Return whether the rank has entered the collective, or another one in its place."""
        return self.entered.get(collective.group, 0) >= collective.number

    def __str__(self) -> str:
        if self.silent:
            return self.silent
        return (
            f"it is in {self.waits}, {self.frame_and_activity}"
            if self.waits
            else f"it is {self.frame_and_activity}"
        )

    @property
    def frame_and_activity(self) -> str:
        """The position in the code, and the part of the job."""
        return f"at {self.frame}, in {self.doing}" if self.frame else f"in {self.doing}"


def write(folder: Path, snapshot: RankSnapshot) -> None:
    """Write the snapshot of a rank. Raise JobFailed where nothing can be written."""
    files.write_json(folder / f"hang-rank-{snapshot.rank}.json", asdict(snapshot))


def has_snapshot(folder: Path, rank: int) -> bool:
    """Return whether a rank has written its snapshot."""
    return (folder / f"hang-rank-{rank}.json").exists()


def read(folder: Path) -> list[RankSnapshot]:
    """Return the snapshots of ranks, in the order of the ranks."""
    snapshots = [
        _read(json.loads(text))
        for path in files.list_matches(folder, "hang-rank-*.json")
        if (text := files.read_text_if_small(path))
    ]
    return sorted(snapshots, key=lambda snapshot: snapshot.rank)


def _read(values: dict[str, Any]) -> RankSnapshot:
    if values["waits"] is not None:
        group, ranks, number, description = values["waits"]
        values["waits"] = Collective(group, tuple(ranks), number, description)
    return RankSnapshot(**values)


def describe_unresponsive_state(pid: int) -> str:
    """Return the reason, from the kernel, why a process cannot write a snapshot; empty where none."""
    stat = files.read_text_if_small(Path(f"/proc/{pid}/stat"))
    return _PROCESS_STATES.get(stat.rpartition(")")[2].split()[0], "") if stat else PROCESS_ENDED


def can_print_stacks(pid: int) -> bool:
    """Return whether a process prints its stacks at SIGUSR1; another process would die of the signal."""
    status = files.read_text_if_small(Path(f"/proc/{pid}/status")) or ""
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def find_innermost_frame(text: str) -> str:
    """Return the innermost frame of the stacks that a rank printed at SIGUSR1; empty where none."""
    _, thread, after = text.rpartition("Current thread ")
    match = _FRAME.search(after) if thread else None
    return f"`{match['function']}` ({match['file']}:{match['line']})" if match else ""


class HangSummary(NamedTuple):
    """The summary of a hang in one line, and the rank at fault; None where no single rank is."""

    text: str
    rank: int | None = None


def summarize_hang(snapshots: Sequence[RankSnapshot]) -> HangSummary:
    """Return which ranks are in which collective, which never entered it, and what those do instead."""
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
        """Return the ranks that never entered and are in no other collective; all others wait for them."""
        return [rank for rank in missing[collective] if rank not in by_rank or by_rank[rank].waits is None]

    by_size = sorted(missing, key=lambda collective: len(missing[collective]))
    for collective in by_size:
        if collective.ranks and (find_idle_ranks(collective) or not missing[collective]):
            return _summarize_collective(
                collective, missing[collective], by_rank, next(iter(find_idle_ranks(collective)), None)
            )
    listed = _join_and_count_rest(
        map(_describe_snapshot, snapshots if not collectives else _pick_one_per_collective(snapshots))
    )
    if not collectives or not all(collective.ranks for collective in collectives):
        return HangSummary(listed, snapshots[0].rank if len(snapshots) == 1 else None)
    return HangSummary(f"ranks wait for each other: {listed}")


def _summarize_collective(
    collective: Collective, missing: Sequence[int], by_rank: Mapping[int, RankSnapshot], about: int | None
) -> HangSummary:
    """Return the summary of a collective and of the ranks of its group that never entered it."""
    present = [
        by_rank[rank] for rank in collective.ranks if rank in by_rank and by_rank[rank].waits == collective
    ]
    elsewhere = [
        by_rank[r]
        for r in collective.ranks
        if r in by_rank and r not in missing and by_rank[r].waits != collective
    ]
    ranks = format_ranks([snapshot.rank for snapshot in present])
    text = f"{ranks} in {collective}, {present[0].frame_and_activity}"
    if not missing:
        return HangSummary(
            f"{text}; {_join_and_count_rest(map(_describe_snapshot, elsewhere))}"
            if elsewhere
            else f"{text}, and all ranks entered this call"
        )
    absences = [
        f"{_name_rank(rank, by_rank)} never entered it: {by_rank.get(rank, 'it reports nothing')}"
        for rank in missing
    ]
    return HangSummary(f"{text}; {_join_and_count_rest(absences)}", about)


def _pick_one_per_collective(snapshots: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """Return one rank of each collective, as the others are in the same place, and all ranks in none."""
    return list(
        {snapshot.waits or snapshot.rank: snapshot for snapshot in reversed(list(snapshots))}.values()
    )[::-1]


def _describe_snapshot(snapshot: RankSnapshot) -> str:
    description = str(snapshot).removeprefix("it is ")
    return f"rank {snapshot.rank} on {snapshot.node}: {description}"


def _name_rank(rank: int, by_rank: Mapping[int, RankSnapshot]) -> str:
    return f"rank {rank} on {by_rank[rank].node}" if rank in by_rank else f"rank {rank}"


def _join_and_count_rest(parts: Iterable[str]) -> str:
    shown = list(parts)
    more = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return "; ".join(shown[:_MOST_SHOWN]) + more


class HangEvidenceCollector:
    """The launcher's part in a hang: tells other nodes, asks NCCL and the kernel, describes silent ranks."""

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._noticed_at: float | None = None
        self._is_done = False

    @property
    def is_rank_exit_overdue(self) -> bool:
        """True if ranks had their time to write snapshots and to end; the rest will not end by themselves."""
        return self._noticed_at is not None and time.monotonic() - self._noticed_at > _ENDING_SECONDS

    def poll_and_write_snapshots(self, ranks: Sequence[RankState]) -> None:
        """Check for a hang; the launcher calls it at each poll while ranks run."""
        world = outcomes.read_world_folder_path(self._folder) or self._folder
        node_file, world_file = self._folder / outcomes.HANG_FILE, world / outcomes.HANG_FILE
        if self._is_done or not (files.is_file(node_file) or files.is_file(world_file)):
            return
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
            for file in (node_file, world_file):
                with suppress(OSError):  # a hang on a full disk is still a hang
                    file.touch()
            if self._rendezvous.nodes > 1:
                with suppress(JobFailed):
                    network.write_connections(world, self._rendezvous.node_rank)
            # NCCL answers only while the processes live; the thread delays nothing else.
            path = world / f"hang-rank-{ranks[0].rank}.nccl.txt"
            Thread(target=ras.write, args=(path,), daemon=True).start()
        elif time.monotonic() - self._noticed_at > _SNAPSHOT_SECONDS:
            self._is_done = True
            for rank in ranks:
                if rank.code is None and not has_snapshot(world, rank.rank):
                    self._write_silent_rank_snapshot(rank, world)

    def _write_silent_rank_snapshot(self, rank: RankState, world: Path) -> None:
        """Write a snapshot for a rank that does not, from its printed stacks where it can print them."""
        if not (reason := describe_unresponsive_state(rank.pid)):
            if can_print_stacks(rank.pid):
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
                time.sleep(_PRINTING_SECONDS)
            logs = sorted(self._folder.glob(f"*/attempt_*/{rank.local_rank}/stderr.log"))
            frame = find_innermost_frame(logs[-1].read_text(errors="replace")) if logs else ""
            reason = f"it is at {frame}, and reports nothing" if frame else "it reports nothing"
        with suppress(JobFailed):
            write(world, RankSnapshot(rank.rank, outcomes.get_node_name(), silent=reason))
