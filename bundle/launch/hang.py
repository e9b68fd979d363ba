"""Where every rank stands when a job hangs, and the one statement that this makes.

A rank writes down its own standing (`bundle.distributed.standing`), a launcher that of a rank which cannot.
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
from bundle.launch.outcomes import Outcome, spelled

# The innermost frame of the main thread, as faulthandler writes it.
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_SHOWN = 4  # ranks that are told of one by one
# That a rank has to write down where it stands before its launcher does, and to print its stacks for that.
_WORD_SECONDS, _PRINTING_SECONDS = 2.0, 0.5
# That ranks have to end, once a hang is noticed; other nodes wait longer than this for our word of it.
_ENDING_SECONDS = 10.0
ENDED = "its process has ended"
_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is held by a debugger",
    "D": "its process waits in the kernel, for a disk, a file server or a device",
    "Z": ENDED,
}


class Collective(NamedTuple):
    """The `number`-th call of a group, over `ranks`; `what` is its name and sizes."""

    group: str
    ranks: tuple[int, ...]
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} number {self.number} of {self.group}"


@dataclass(frozen=True)
class Standing:
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

    def came_to(self, to: Collective) -> bool:
        """Whether it has called the collective too, or another in its place."""
        return self.entered.get(to.group, 0) >= to.number

    def __str__(self) -> str:
        if self.silent:
            return self.silent
        return f"it is in {self.waits}, {self.place}" if self.waits else f"it is {self.place}"

    @property
    def place(self) -> str:
        """Where in the code, and in what part of the job."""
        return f"at {self.frame}, in {self.doing}" if self.frame else f"in {self.doing}"


def write(folder: Path, of: Standing) -> None:
    """Puts down the standing of a rank. Raises JobFailed where nothing can be written."""
    files.write_json(folder / f"hang-rank-{of.rank}.json", asdict(of))


def written(folder: Path, rank: int) -> bool:
    """Whether a rank has put down where it stands."""
    return (folder / f"hang-rank-{rank}.json").exists()


def read(folder: Path) -> list[Standing]:
    """What ranks put down, in the order of their ranks."""
    found = [_read(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("hang-rank-*.json")]
    return sorted(found, key=lambda each: each.rank)


def _read(values: dict[str, Any]) -> Standing:
    if values["waits"] is not None:
        group, ranks, number, what = values["waits"]
        values["waits"] = Collective(group, tuple(ranks), number, what)
    return Standing(**values)


def state(pid: int) -> str:
    """Why a process cannot say where it stands, as the kernel knows it; empty where that knows of nothing."""
    said = files.read(Path(f"/proc/{pid}/stat"))
    return _STATES.get(said.rpartition(")")[2].split()[0], "") if said else ENDED


def listens(pid: int) -> bool:
    """Whether a process prints its stacks at SIGUSR1; one that has not begun to would die of it."""
    said = files.read(Path(f"/proc/{pid}/status")) or ""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", said, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def frame_of_log(text: str) -> str:
    """The innermost frame of the stacks that a rank printed at SIGUSR1; empty where there are none."""
    _, thread, after = text.rpartition("Current thread ")
    match = _FRAME.search(after) if thread else None
    return f"`{match['function']}` ({match['file']}:{match['line']})" if match else ""


class Statement(NamedTuple):
    """What a hang is, in one line, and the rank that it is about; None where all are in it alike."""

    text: str
    rank: int | None = None


def statement(standings: Sequence[Standing]) -> Statement:
    """Who is in which collective, who never came, and what it does instead."""
    known = {each.rank: each for each in standings}
    waits = {each.waits for each in standings if each.waits}
    missing = {
        at: [rank for rank in at.ranks if rank not in known or not known[rank].came_to(at)]
        for at in sorted(waits, key=str)
    }

    def idle(at: Collective) -> list[int]:
        """Those who never came, and are in no other collective: they are what everybody waits for."""
        return [rank for rank in missing[at] if rank not in known or known[rank].waits is None]

    by_size = sorted(missing, key=lambda at: len(missing[at]))
    for at in by_size:
        if at.ranks and (idle(at) or not missing[at]):
            return _of_collective(at, missing[at], known, next(iter(idle(at)), None))
    listed = _listed(map(_of, standings if not waits else _one_of_each(standings)))
    if not waits or not all(at.ranks for at in waits):
        return Statement(listed, standings[0].rank if len(standings) == 1 else None)
    return Statement(f"ranks wait for each other: {listed}")


def _of_collective(
    at: Collective, missing: Sequence[int], known: Mapping[int, Standing], about: int | None
) -> Statement:
    """The statement about a collective, and those ranks of its group that never came to it."""
    there = [known[rank] for rank in at.ranks if rank in known and known[rank].waits == at]
    others = [known[r] for r in at.ranks if r in known and r not in missing and known[r].waits != at]
    text = f"{spelled([each.rank for each in there])} in {at}, {there[0].place}"
    if not missing:
        return Statement(f"{text}; {_listed(map(_of, others))}" if others else f"{text}, to which all came")
    instead = [f"{_name(rank, known)} never came: {known.get(rank, 'it says nothing')}" for rank in missing]
    return Statement(f"{text}; {_listed(instead)}", about)


def _one_of_each(standings: Iterable[Standing]) -> list[Standing]:
    """One rank of each collective, since the others in it say the same, and all that are in none."""
    return list({each.waits or each.rank: each for each in reversed(list(standings))}.values())[::-1]


def _of(of: Standing) -> str:
    said = str(of).removeprefix("it is ")
    return f"rank {of.rank} on {of.node}: {said}"


def _name(rank: int, known: Mapping[int, Standing]) -> str:
    return f"rank {rank} on {known[rank].node}" if rank in known else f"rank {rank}"


def _listed(parts: Iterable[str]) -> str:
    shown = list(parts)
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return "; ".join(shown[:_SHOWN]) + more


class Hung:
    """What a launcher does about a hang: tells other nodes, asks NCCL, speaks for ranks that say nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._noticed: float | None = None
        self._over = False

    @property
    def overdue(self) -> bool:
        """Whether ranks had their time to write down where they stand and to end: who is left never will."""
        return self._noticed is not None and time.monotonic() - self._noticed > _ENDING_SECONDS

    def look(self, ranks: Sequence[Outcome]) -> None:
        """Called every now and then, as long as ranks run."""
        world = outcomes.world(self._folder) or self._folder
        here, everywhere = self._folder / outcomes.HANG, world / outcomes.HANG
        if self._over or not (here.exists() or everywhere.exists()):
            return
        if self._noticed is None:
            self._noticed = time.monotonic()
            for file in (here, everywhere):
                with suppress(OSError):  # a hang on a full disk is still a hang
                    file.touch()
            # Of processes that still live, and in nobody's way.
            path = world / f"hang-rank-{ranks[0].rank}.nccl.txt"
            Thread(target=ras.write, args=(path,), daemon=True).start()
        elif time.monotonic() - self._noticed > _WORD_SECONDS:
            self._over = True
            for rank in ranks:
                if rank.code is None and not written(world, rank.rank):
                    self._speak_for(rank, world)

    def _speak_for(self, rank: Outcome, world: Path) -> None:
        """Writes down what can be known of a rank that does not; its own stacks, where it can print them."""
        if not (why := state(rank.pid)):
            if listens(rank.pid):
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
                time.sleep(_PRINTING_SECONDS)
            logs = sorted(self._folder.glob(f"*/attempt_*/{rank.local_rank}/stderr.log"))
            where = frame_of_log(logs[-1].read_text(errors="replace")) if logs else ""
            why = f"it is at {where}, and says nothing" if where else "it says nothing"
        with suppress(JobFailed):
            write(world, Standing(rank.rank, outcomes.node_name(), silent=why))
