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
from bundle.launch.causes import FailureKind, RestartAction
from bundle.launch.node_registry import get_poll_interval
from bundle.launch.outcomes import NODES_FOLDER
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict, get_consequence_level, is_restartable, parse

# That a node has to say how it ended, after one that has ended: its launcher may take its time to notice.
VERDICT_SECONDS = 20.0
_HEARTBEAT_SECONDS = 0.5
# From one look to the next while ranks run: days, in which nothing changes there.
_PEER_POLL_SECONDS = 2.0
_NODE_FILE = re.compile(r"(\d+)\.json")
_VERDICT_FILE = re.compile(r"\d+\.\d+\.[a-z-]+\.[a-z-]+\.verdict\.json")


def agree_on_verdict(
    own_verdict: Verdict,
    world: Path | None,
    seconds: float = VERDICT_SECONDS,
    send_heartbeat: Callable[[], None] = lambda: None,
) -> Verdict:
    """The verdict of all nodes, as far as they say it within `seconds`; leaves this node's word for them.

    Calls `send_heartbeat` every now and then. Raises JobFailed where nothing can be written.
    """
    if world is None or own_verdict.nodes == 1:
        return own_verdict
    folder = world / NODES_FOLDER
    files.write_json(folder / _name_verdict_file(own_verdict), own_verdict.dump())
    began = time.monotonic()
    last_poll = began - get_poll_interval(own_verdict.nodes)
    while _needs_other_verdicts(own_verdict):
        send_heartbeat()
        now = time.monotonic()
        # What was said while we looked may have been said in time: there is one more look afterwards.
        is_final = now > began + seconds
        if is_final or now - last_poll >= get_poll_interval(own_verdict.nodes):
            last_poll = now
            ranks, verdicts = _read_verdicts(folder)
            node_names = {
                rank: _read_node_name(folder, rank) if is_final and rank not in verdicts else ""
                for rank in ranks
            }
            joined = choose_common_verdict(own_verdict, verdicts, node_names, is_final=is_final)
            if joined is not None and joined.node_rank in verdicts:
                return replace(parse(_read_json(folder / _name_verdict_file(joined))), silent=joined.silent)
            if joined is not None:
                return joined
        time.sleep(_HEARTBEAT_SECONDS)
    return own_verdict


def choose_common_verdict(
    own_verdict: Verdict, verdicts: Mapping[int, Verdict], node_names: Mapping[int, str], *, is_final: bool
) -> Verdict | None:
    """The verdict that all nodes have together; None where it is still to be waited for.

    `verdicts` are the verdicts of nodes and `node_names` all nodes, by their rank; `is_final`: none will say
    more.
    """
    broken = [verdict for verdict in verdicts.values() if verdict.code != ExitCode.OK]
    first = min(broken, key=lambda verdict: get_consequence_level(verdict.kind), default=own_verdict)
    silent = sorted(set(node_names) - set(verdicts))
    if not silent or not _needs_other_verdicts(first):
        return first
    if not is_final:
        return None
    if not _may_blame_another_node(first):
        return replace(first, silent=tuple(node_names[rank] for rank in silent))
    them = "it" if len(silent) == 1 else "them"
    reason = f"no word from {them} within {VERDICT_SECONDS:.0f} s after the others ended"
    return replace(
        build_lost_node_verdict([node_names[rank] for rank in silent], reason),
        node_rank=silent[0],
        nodes=own_verdict.nodes,
        evidence=(f"{own_verdict.node}: {own_verdict.sentence}",),
    )


def build_lost_node_verdict(node_names: Sequence[str], reason: str) -> Verdict:
    """The verdict on nodes that are lost; `reason` is by what that is known."""
    return Verdict(
        ExitCode.JOB_FAILED,
        FailureKind.LOST_NODE,
        f"lost, and all that ran there: {reason}",
        RestartAction.RESTART_WITHOUT,
        node=", ".join(node_names),
        nodes=2,  # at least: who says so is another
    )


class PeerNodes:
    """The other nodes of a launch, as this one sees them while its own ranks run.

    `has_failed_peer`: one of them has, with a failure, so that its ranks will not meet ours any more. How a
    hang ends is told apart (`hang.HangMonitor`).
    """

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._last_poll = time.monotonic()
        self.has_failed_peer = False

    def poll(self) -> bool:
        """Called every now and then: whether another node has ended with a failure."""
        now, nodes = time.monotonic(), self._rendezvous.nodes
        if nodes > 1 and now - self._last_poll >= max(_PEER_POLL_SECONDS, get_poll_interval(nodes)):
            self._last_poll = now
            if world := outcomes.find_world_folder(self._folder):
                with suppress(OSError):  # who has ended will be told by its silence
                    self.has_failed_peer = any(
                        map(self._has_failed, _read_verdicts(world / NODES_FOLDER)[1].values())
                    )
        return self.has_failed_peer

    def _has_failed(self, verdict: Verdict) -> bool:
        is_peer = verdict.node_rank != self._rendezvous.node_rank
        return is_peer and verdict.code not in (ExitCode.OK, ExitCode.PREEMPTED, ExitCode.HANG)


def _needs_other_verdicts(verdict: Verdict) -> bool:
    """Whether a node with this verdict waits for the words of all others."""
    return _may_blame_another_node(verdict) or is_restartable(verdict)


def _may_blame_another_node(verdict: Verdict) -> bool:
    """Whether a verdict may be about another node."""
    return bool(get_consequence_level(verdict.kind)) or verdict.kind is FailureKind.HANG


def _name_verdict_file(verdict: Verdict) -> str:
    """The name of the file of a node's word."""
    kind, action = (value.replace(" ", "-") for value in (verdict.kind, verdict.action))
    return f"{verdict.node_rank}.{int(verdict.code)}.{kind}.{action}.verdict.json"


def _read_verdicts(folder: Path) -> tuple[list[int], dict[int, Verdict]]:
    """All nodes, and their verdicts as far as the names of these say them, in the order of their ranks."""
    file_names = sorted(path.name for path in folder.iterdir())
    parts = [
        match[0].replace("-", " ").split(".") for match in map(_VERDICT_FILE.fullmatch, file_names) if match
    ]
    verdicts = [
        Verdict(ExitCode(int(code)), FailureKind(kind), action=RestartAction(action), node_rank=int(rank))
        for rank, code, kind, action, *_ in parts
    ]
    verdicts.sort(key=lambda verdict: verdict.node_rank)
    ranks = sorted(int(match[1]) for match in map(_NODE_FILE.fullmatch, file_names) if match)
    return ranks, {verdict.node_rank: verdict for verdict in verdicts}


def _read_node_name(folder: Path, rank: int) -> str:
    return str(_read_json(folder / f"{rank}.json")["node"])


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
