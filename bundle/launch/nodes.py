"""The common verdict of all nodes of a launch, each of which has its own launcher.

Nodes that share the run directory share a folder there. A node whose ranks only lost their connections waits
there for the verdict of another; a node without a verdict is lost. Where the ranks of one node have ended,
those of the others would wait for them in vain, so their launchers end them. A node that may start again
leaves when all have ended; otherwise it would meet running ranks at the same address.

The name of a verdict's file has its main values, `RANK.CODE.KIND.ACTION.verdict.json`. A waiting node lists
one folder and reads a single verdict at the end; a thousand nodes would otherwise read a thousand each.
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
from bundle.launch.node_registry import get_running_interval, get_waiting_poll_interval
from bundle.launch.outcomes import NODES_FOLDER
from bundle.launch.rendezvous import Rendezvous
from bundle.launch.verdict import Verdict, get_symptom_level, is_restartable_in_place, parse

# The time for a node's verdict after it has noticed that another one has ended.
VERDICT_SECONDS = 20.0
_HEARTBEAT_SECONDS = 0.5
_NODE_FILE_PATTERN = re.compile(r"(\d+)\.json")
_VERDICT_FILE_PATTERN = re.compile(r"\d+\.\d+\.[a-z-]+\.[a-z-]+\.verdict\.json")


def agree_on_verdict(
    own_verdict: Verdict,
    world: Path | None,
    seconds: float | None = None,
    send_heartbeat: Callable[[], None] = lambda: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Verdict:
    """Return the common verdict of the nodes that report within `seconds`, and write this node's.

    Default of `seconds`: `get_verdict_seconds`. Call `send_heartbeat` at each poll. Wait no longer once
    `is_stopped` returns true. Raise JobFailed where nothing can be written.
    """
    if world is None or own_verdict.nodes == 1:
        return own_verdict
    folder = world / NODES_FOLDER
    files.write_json(folder / _name_verdict_file(own_verdict), own_verdict.dump())
    seconds = get_verdict_seconds(own_verdict.nodes) if seconds is None else seconds
    began = time.monotonic()
    last_poll = began - get_waiting_poll_interval(own_verdict.nodes)
    while _needs_other_verdicts(own_verdict):
        send_heartbeat()
        now = time.monotonic()
        # A verdict that came during the last poll may be in time, so one more poll follows the limit.
        is_final = now > began + seconds or is_stopped()
        if is_final or now - last_poll >= get_waiting_poll_interval(own_verdict.nodes):
            last_poll = now
            ranks, verdicts = _read_nodes_and_verdicts(folder)
            node_names = {
                rank: _read_node_name(folder, rank) if is_final and rank not in verdicts else ""
                for rank in ranks
            }
            waited = now - began if is_final else None
            joined = choose_common_verdict(own_verdict, verdicts, node_names, waited=waited)
            if joined is not None and joined.node_rank in verdicts:
                return replace(
                    parse(_parse_json_file(folder / _name_verdict_file(joined))), silent=joined.silent
                )
            if joined is not None:
                return joined
        time.sleep(_HEARTBEAT_SECONDS)
    return own_verdict


def get_verdict_seconds(nodes: int) -> float:
    """Return the time for the verdicts of `nodes` nodes after one has ended; the others notice by polls."""
    return VERDICT_SECONDS + get_running_interval(nodes) - get_running_interval(1)


def choose_common_verdict(
    own_verdict: Verdict,
    verdicts: Mapping[int, Verdict],
    node_names: Mapping[int, str],
    *,
    waited: float | None,
) -> Verdict | None:
    """Return the verdict that all nodes have together; None where it must be waited for.

    `verdicts` are the verdicts of nodes and `node_names` all nodes, both by rank. `waited` are the
    seconds that this node has waited, None where more verdicts may come.
    """
    broken = [verdict for verdict in verdicts.values() if verdict.code != ExitCode.OK]
    first = min(broken, key=lambda verdict: get_symptom_level(verdict.kind), default=own_verdict)
    silent = sorted(set(node_names) - set(verdicts))
    if not silent or not _needs_other_verdicts(first):
        return first
    if waited is None:
        return None
    if not _may_blame_another_node(first):
        return replace(first, silent=tuple(node_names[rank] for rank in silent))
    reason = f"no report within {int(waited)} s after the other nodes ended"
    return replace(
        build_lost_node_verdict([node_names[rank] for rank in silent], reason),
        node_rank=silent[0],
        nodes=own_verdict.nodes,
        evidence=(f"{own_verdict.node}: {own_verdict.sentence}",),
    )


def build_lost_node_verdict(node_names: Sequence[str], reason: str) -> Verdict:
    """Return the verdict on lost nodes; `reason` says how their loss is known."""
    return Verdict(
        ExitCode.JOB_FAILED,
        FailureKind.LOST_NODE,
        f"lost with all its ranks ({reason})",
        RestartAction.RESTART_WITHOUT,
        node=", ".join(node_names),
        nodes=2,  # at least: the reporting node is another one
    )


def write_failed_start_verdict(folder: Path, rendezvous: Rendezvous, verdict: Verdict) -> None:
    """Tell the nodes that wait for this one why it ended; one file has the last failure of any node."""
    if (path := outcomes.build_failed_start_path(folder)) is not None:
        files.write_json(path, {"port": rendezvous.port, **verdict.dump()})


class PeerStartFailurePoller:
    """The failures of other nodes before the nodes met, from the creation of this object.

    Nodes that meet at another port belong to another launch in the same run directory.
    """

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._path, self._nodes = outcomes.build_failed_start_path(folder), rendezvous.nodes
        self._port = rendezvous.port
        self._earlier, self._last_poll = self._read_report_signature(), time.monotonic()
        self.cause = ""

    def poll(self) -> str:
        """Return which node failed and why; empty where none is known to have failed."""
        now = time.monotonic()
        if self.cause or self._path is None or now - self._last_poll < get_waiting_poll_interval(self._nodes):
            return self.cause
        self._last_poll = now
        if self._read_report_signature() != self._earlier:
            with suppress(OSError, ValueError, KeyError):  # another launch of the node may replace the file
                values = _parse_json_file(self._path)
                verdict = parse(values)
                if values["port"] == self._port:
                    self.cause = f"node {verdict.node_rank} ({verdict.node}) failed: {verdict.cause}"
        return self.cause

    def _read_report_signature(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


class PeerFailurePoll:
    """The other nodes of a launch, as this one sees them while its own ranks run.

    `has_failed_peer`: one of them ended with a failure, so its ranks will not meet ours any more.
    `hang.HangEvidenceCollector` tells how a hang ends.
    """

    def __init__(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._folder, self._rendezvous = folder, rendezvous
        self._last_poll = time.monotonic()
        self.has_failed_peer = False

    def has_failed_peer_after_poll(self) -> bool:
        """Return whether another node has ended with a failure; the launcher calls it at each poll."""
        now, nodes = time.monotonic(), self._rendezvous.nodes
        if nodes > 1 and now - self._last_poll >= get_running_interval(nodes):
            self._last_poll = now
            if world := outcomes.read_world_folder_path(self._folder):
                with suppress(OSError):  # the silence of ended nodes will be noticed
                    self.has_failed_peer = any(
                        map(self._is_peer_failure, _read_nodes_and_verdicts(world / NODES_FOLDER)[1].values())
                    )
        return self.has_failed_peer

    def _is_peer_failure(self, verdict: Verdict) -> bool:
        is_peer = verdict.node_rank != self._rendezvous.node_rank
        return is_peer and verdict.code not in (ExitCode.OK, ExitCode.PREEMPTED, ExitCode.HANG)


def _needs_other_verdicts(verdict: Verdict) -> bool:
    """Return whether a node with this verdict waits for the verdicts of all others."""
    return _may_blame_another_node(verdict) or is_restartable_in_place(verdict)


def _may_blame_another_node(verdict: Verdict) -> bool:
    """Return whether the cause in a verdict may lie on another node."""
    return bool(get_symptom_level(verdict.kind)) or verdict.kind is FailureKind.HANG


def _name_verdict_file(verdict: Verdict) -> str:
    """Return the name of the file of a node's verdict."""
    kind, action = (value.replace(" ", "-") for value in (verdict.kind, verdict.action))
    return f"{verdict.node_rank}.{int(verdict.code)}.{kind}.{action}.verdict.json"


def _read_nodes_and_verdicts(folder: Path) -> tuple[list[int], dict[int, Verdict]]:
    """Return all nodes, and the verdicts in the names of their files, in the order of ranks."""
    file_names = sorted(path.name for path in folder.iterdir())
    parts = [
        match[0].replace("-", " ").split(".")
        for match in map(_VERDICT_FILE_PATTERN.fullmatch, file_names)
        if match
    ]
    verdicts = [
        Verdict(ExitCode(int(code)), FailureKind(kind), action=RestartAction(action), node_rank=int(rank))
        for rank, code, kind, action, *_ in parts
    ]
    verdicts.sort(key=lambda verdict: verdict.node_rank)
    ranks = sorted(int(match[1]) for match in map(_NODE_FILE_PATTERN.fullmatch, file_names) if match)
    return ranks, {verdict.node_rank: verdict for verdict in verdicts}


def _read_node_name(folder: Path, rank: int) -> str:
    return str(_parse_json_file(folder / f"{rank}.json")["node"])


def _parse_json_file(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
