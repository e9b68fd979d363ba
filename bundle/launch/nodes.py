"""One verdict for all nodes of a launch, each of which has a launcher of its own.

They meet in the folder of what concerns all of them, which they share where they share the run directory. A
node whose ranks only lost their connections waits there for the word of another; one without a word is lost.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bundle import files
from bundle.errors import ExitCode
from bundle.launch.causes import Action, Kind
from bundle.launch.verdict import Verdict, parse, strength

# That a node has to say how it ended, after one that has ended: its ranks may take their time to notice.
WORD_SECONDS = 20.0
_LOOK_SECONDS = 0.5


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
    files.write_json(world / f"node-{own.node_rank}.verdict.json", own.dump())
    deadline = time.monotonic() + seconds
    while _undecided(own):
        alive()
        said, names = _said(world), _names(world)
        joined = joint(own, said, names, over=time.monotonic() > deadline)
        if joined is not None:
            return joined
        time.sleep(_LOOK_SECONDS)
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
    if not _undecided(first):
        return first
    if silent and not over:
        return None
    if not silent:
        return first
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


def _undecided(verdict: Verdict) -> bool:
    """Whether a verdict may be about another node."""
    return bool(strength(verdict.kind)) or verdict.kind is Kind.HANG


def _said(world: Path) -> dict[int, Verdict]:
    paths = sorted(world.glob("node-*.verdict.json"), key=_rank)
    return {_rank(path): parse(json.loads(path.read_text(encoding="utf-8"))) for path in paths}


def _names(world: Path) -> dict[int, str]:
    paths = (path for path in world.glob("node-*.json") if not path.name.endswith(".verdict.json"))
    return {_rank(path): json.loads(path.read_text(encoding="utf-8"))["node"] for path in paths}


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("node-").partition(".")[0])
