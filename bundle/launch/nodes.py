"""One verdict for all nodes of a launch, each of which has a launcher of its own.

They meet in the folder of what concerns all of them, which they share where they share the run directory. A
node whose ranks only lost their connections waits there for the word of another; one without a word is lost.
Where the ranks of one have ended, those of the others wait for them in vain: their launchers end them. A node
that may start again leaves when all have ended: at the same address it would meet what others still run.

The name of a node's word says what it comes to, `RANK.CODE.KIND.ACTION.verdict.json`, so that a node that
waits lists one folder, and reads a single word in the end: of a thousand nodes, each would read a thousand.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import ExitCode
from bundle.launch import outcomes
from bundle.launch.causes import Action, Kind
from bundle.launch.outcomes import NODES
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.roster import look_seconds
from bundle.launch.verdict import Verdict, mends, parse, strength

# That a node has to say how it ended, after one that has ended: its launcher may take its time to notice.
WORD_SECONDS = 20.0
_ALIVE_SECONDS = 0.5
# From one look to the next while ranks run: days, in which nothing changes there.
_OTHERS_SECONDS = 2.0
_NAME = re.compile(r"(\d+)\.json")
_WORD = re.compile(r"\d+\.\d+\.[a-z-]+\.[a-z-]+\.verdict\.json")


def agreed(
    own: Verdict,
    world: Path | None,
    seconds: float = WORD_SECONDS,
    alive: Callable[[], None] = lambda: None,
) -> Verdict:
    """The verdict of all nodes, as far as they say it within `seconds`; leaves this node's word for them.

    Calls `alive` every now and then. Raises JobFailed where nothing can be written.
    """
    if world is None or own.nodes == 1:
        return own
    folder = world / NODES
    files.write_json(folder / _word(own), own.dump())
    began = time.monotonic()
    looked = began - look_seconds(own.nodes)
    while _waits(own):
        alive()
        now = time.monotonic()
        # What was said while we looked may have been said in time: there is one more look afterwards.
        over = now > began + seconds
        if over or now - looked >= look_seconds(own.nodes):
            looked = now
            ranks, said = _seen(folder)
            names = {rank: _name(folder, rank) if over and rank not in said else "" for rank in ranks}
            joined = joint(own, said, names, over=over)
            if joined is not None and joined.node_rank in said:
                return replace(parse(_json(folder / _word(joined))), silent=joined.silent)
            if joined is not None:
                return joined
        time.sleep(_ALIVE_SECONDS)
    return own


def joint(
    own: Verdict, said: Mapping[int, Verdict], names: Mapping[int, str], *, over: bool
) -> Verdict | None:
    """The verdict that all nodes have together; None where it is still to be waited for.

    `said` are the verdicts of nodes and `names` all nodes, by their rank; `over`: none will say more.
    """
    broken = [verdict for verdict in said.values() if verdict.code != ExitCode.OK]
    first = min(broken, key=lambda verdict: strength(verdict.kind), default=own)
    silent = sorted(set(names) - set(said))
    if not silent or not _waits(first):
        return first
    if not over:
        return None
    if not _undecided(first):
        return replace(first, silent=tuple(names[rank] for rank in silent))
    them = "it" if len(silent) == 1 else "them"
    word = f"no word from {them} within {WORD_SECONDS:.0f} s after the others ended"
    return replace(
        lost([names[rank] for rank in silent], word),
        node_rank=silent[0],
        nodes=own.nodes,
        evidence=(f"{own.node}: {own.sentence}",),
    )


def lost(names: Sequence[str], word: str) -> Verdict:
    """The verdict on nodes that are lost; `word` is by what that is known."""
    return Verdict(
        ExitCode.JOB_FAILED,
        Kind.LOST_NODE,
        f"lost, and all that ran there: {word}",
        Action.RESTART_WITHOUT,
        node=", ".join(names),
        nodes=2,  # at least: who says so is another
    )


class Others:
    """The other nodes of a launch, as this one sees them while its own ranks run.

    `ended`: one of them has, with a failure, so that its ranks will not meet ours any more. How a hang ends
    is told apart (`hang.Hung`).
    """

    def __init__(self, folder: Path, where: Rendezvous) -> None:
        self._folder, self._where = folder, where
        self._looked = time.monotonic()
        self.ended = False

    def look(self) -> bool:
        """Called every now and then: whether another node has ended with a failure."""
        now, nodes = time.monotonic(), self._where.nodes
        if nodes > 1 and now - self._looked >= max(_OTHERS_SECONDS, look_seconds(nodes)):
            self._looked = now
            if world := outcomes.world(self._folder):
                with suppress(OSError):  # who has ended will be told by its silence
                    self.ended = any(map(self._broke, _seen(world / NODES)[1].values()))
        return self.ended

    def _broke(self, word: Verdict) -> bool:
        other = word.node_rank != self._where.node_rank
        return other and word.code not in (ExitCode.OK, ExitCode.PREEMPTED, ExitCode.HANG)


def _waits(verdict: Verdict) -> bool:
    """Whether a node with this verdict waits for the words of all others."""
    return _undecided(verdict) or mends(verdict)


def _undecided(verdict: Verdict) -> bool:
    """Whether a verdict may be about another node."""
    return bool(strength(verdict.kind)) or verdict.kind is Kind.HANG


def _word(of: Verdict) -> str:
    """The name of the file of a node's word."""
    kind, action = (each.replace(" ", "-") for each in (of.kind, of.action))
    return f"{of.node_rank}.{int(of.code)}.{kind}.{action}.verdict.json"


def _seen(folder: Path) -> tuple[list[int], dict[int, Verdict]]:
    """All nodes, and their verdicts as far as the names of these say them, in the order of their ranks."""
    there = sorted(path.name for path in folder.iterdir())
    said = [found[0].replace("-", " ").split(".") for found in map(_WORD.fullmatch, there) if found]
    verdicts = [
        Verdict(ExitCode(int(code)), Kind(kind), action=Action(action), node_rank=int(rank))
        for rank, code, kind, action, *_ in said
    ]
    verdicts.sort(key=lambda verdict: verdict.node_rank)
    ranks = sorted(int(found[1]) for found in map(_NAME.fullmatch, there) if found)
    return ranks, {verdict.node_rank: verdict for verdict in verdicts}


def _name(folder: Path, rank: int) -> str:
    return str(_json(folder / f"{rank}.json")["node"])


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
