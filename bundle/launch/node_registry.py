"""The registry of the nodes that were started for a job: members of the run, spare nodes, lost nodes.

All nodes share a folder. `node-TOKEN.json` is a node's entry. Beside it lies an empty file, the heartbeat,
whose name has all values that the others decide by (`Heartbeat`). A living node renames it again and again.
The first node that sees enough waiting nodes makes `round-N.json`, the members of a round; the file appears
in one piece. Clocks of different nodes are never compared, and no single node is needed for a decision.

A node therefore lists one folder per poll and opens no file. A thousand nodes that open a file of each would
send a file server a million requests. Times of files would not do either: an NFS client may show old ones for
a minute. It asks anew whether a folder has changed whenever the folder is opened, and a rename changes the
folder. A file's inode number would be used again.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bundle import files
from bundle.errors import JobFailed
from bundle.launch.verdict import Verdict, parse

HEARTBEAT_SECONDS = 2.0
# A waiting node without a heartbeat for so long is lost; after a third of it, it is not chosen for a round.
LOST_SECONDS = 30.0
# While ranks run, all nodes together send at most so many heartbeats a second, and poll as often.
_RUN_HEARTBEATS_PER_SECOND = 20
# The poll interval of nodes that wait grows with the nodes, so that all together make at most
# _LISTINGS_PER_SECOND listings. It has a maximum, so that a heartbeat is seen within a third of LOST_SECONDS.
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.5, 5.0
_LISTINGS_PER_SECOND = 200


@dataclass(frozen=True)
class NodeEntry:
    """A node: `number` is its node rank at its start, `address` is where others reach it.

    `waits_for`: the round that it could take part in; None while its ranks run. `out`: why it may take part
    in none. `ended`: the verdict that it has ended with.
    """

    token: str
    number: int
    name: str
    address: str
    waits_for: int | None = None
    out: str = ""
    ended: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The sign that a node lives, with the values that others decide by; `count` grows.

    `is_excluded` and `exit_code` say only whether the node is out and how it ended; the entry has the
    reasons.
    """

    token: str
    number: int
    count: int = 0
    waits_for: int | None = None
    is_excluded: bool = False
    exit_code: int | None = None

    @property
    def encoded_file_name(self) -> str:
        """The name of the heartbeat's file."""
        waits_for, exit_code = (
            "" if value is None else str(value) for value in (self.waits_for, self.exit_code)
        )
        fit = "out" if self.is_excluded else "fit"
        return f"beat-{self.token}-{self.number}-{self.count}-{waits_for}-{fit}-{exit_code}"

    @classmethod
    def from_file_name(cls, file_name: str) -> "Heartbeat | None":
        """Return the heartbeat in the name of a file; None for another kind of file."""
        if (match := _HEARTBEAT_FILE_PATTERN.fullmatch(file_name)) is None:
            return None
        token, number, count, waits_for, fit, exit_code = match.groups()
        waits, code = (int(text) if text else None for text in (waits_for, exit_code))
        return cls(token, int(number), int(count), waits, fit == "out", code)


_HEARTBEAT_FILE_PATTERN = re.compile(r"beat-(\w+)-(\d+)-(\d+)-(\d*)-(fit|out)-(\d*)")
_ROUND_FILE_PATTERN = re.compile(r"round-(\d+)\.json")


@dataclass(frozen=True)
class Round:
    """The nodes that run the job together, by token, in the order of their ranks; they meet at the first.

    `continues`: the round before belongs to the same start of these nodes.
    """

    number: int
    members: tuple[str, ...]
    continues: bool


_UNSEEN_NODE = (Heartbeat("", 0), 0.0, False)


class NodeRegistry:
    """The registry as one node sees it; it keeps this node's entry."""

    def __init__(self, folder: Path, number: int, name: str, address: str) -> None:
        self.folder = folder
        self.own_entry = NodeEntry(secrets.token_hex(4), number, name, address)
        self._heartbeat_count, self._last_heartbeat = 0, -HEARTBEAT_SECONDS
        self._heartbeat_file = self._heartbeat.encoded_file_name  # does not exist yet
        # By token: the heartbeat, the time at which it was new, and whether it has changed since our start.
        self._known_nodes: dict[str, tuple[Heartbeat, float, bool]] = {}
        self._has_polled, self._last_poll = False, -_POLL_SECONDS
        self._newest_number = 0  # the number of the newest round
        self._newest_round: Round | None = None  # the last round that was read
        folder.mkdir(parents=True, exist_ok=True)

    def update_entry(self, **changes: Any) -> None:
        """Change this node's entry. Raise JobFailed where nothing can be written."""
        self.own_entry = replace(self.own_entry, **changes)
        files.write_json(self._get_entry_path(self.own_entry.token), asdict(self.own_entry))
        if not self._renew_heartbeat_by_rename():
            with files.convert_write_errors(self.folder / self._heartbeat.encoded_file_name):
                (self.folder / self._heartbeat.encoded_file_name).touch()
            self._heartbeat_file = self._heartbeat.encoded_file_name

    def send_heartbeat_if_due(self) -> None:
        """Renew this node's heartbeat if it is due; the launcher calls it at each poll."""
        interval = HEARTBEAT_SECONDS
        if self.own_entry.waits_for is None:
            interval = get_running_interval(len(self._known_nodes))
        if time.monotonic() - self._last_heartbeat >= interval:
            with suppress(JobFailed):  # a full disk must not end running ranks
                if (
                    not self._renew_heartbeat_by_rename()
                ):  # another node has taken us for lost and removed our files
                    self.update_entry()

    def poll_if_due(self) -> bool:
        """Read the heartbeats of the other nodes if a poll is due, and return whether it was."""
        now, interval = time.monotonic(), get_waiting_poll_interval(len(self._known_nodes))
        if now - self._last_poll < interval:
            return False
        if (late := now - self._last_poll - interval) > LOST_SECONDS / 3:
            # We or the disk were late, so the other nodes are not to blame for old heartbeats.
            self._known_nodes = {
                token: (heartbeat, seen_at + late, has_changed)
                for token, (heartbeat, seen_at, has_changed) in self._known_nodes.items()
            }
        self._last_poll, is_first, self._has_polled = now, not self._has_polled, True
        file_names = [path.name for path in self.folder.iterdir()]
        for heartbeat in filter(None, map(Heartbeat.from_file_name, file_names)):
            known = self._known_nodes.get(heartbeat.token)
            # A listing may contain a file twice, or not at all, while it is renamed.
            if known is None or heartbeat.count > known[0].count:
                self._known_nodes[heartbeat.token] = (heartbeat, now, not is_first)
        rounds = (int(match[1]) for match in map(_ROUND_FILE_PATTERN.fullmatch, file_names) if match)
        self._newest_number = max([self._newest_number, *rounds])
        return True

    def find_live_nodes(self, within: float | None = None) -> list[Heartbeat]:
        """Return this node and those seen alive within `within` seconds; None: those that are not lost."""
        now = time.monotonic()
        live = [
            heartbeat
            for heartbeat, seen_at, has_changed in self._known_nodes.values()
            if has_changed and now - seen_at < (within or self._choose_lost_seconds(heartbeat))
        ]
        return [heartbeat for heartbeat in live if heartbeat.token != self.own_entry.token] + [
            self._heartbeat
        ]

    def find_lost_nodes(self, tokens: Iterable[str]) -> set[str]:
        """Return the nodes without a recent heartbeat, or without any, that have not ended."""
        now = time.monotonic()
        present = {
            token
            for token, (heartbeat, seen_at, _) in self._known_nodes.items()
            if heartbeat.exit_code is not None or now - seen_at < self._choose_lost_seconds(heartbeat)
        }
        return set(tokens) - present - {self.own_entry.token}

    def find_ended_nodes(self, tokens: Iterable[str]) -> set[str]:
        """Return the nodes that have ended."""
        return {
            token for token in tokens if self._known_nodes.get(token, _UNSEEN_NODE)[0].exit_code is not None
        }

    def has_any_heartbeat_since_start(self, tokens: Iterable[str]) -> bool:
        """Return whether any of the nodes has lived since this one came.

        Nodes that never did belong to an earlier start.
        """
        return any(
            token == self.own_entry.token or self._known_nodes.get(token, _UNSEEN_NODE)[2] for token in tokens
        )

    def format_names(self, tokens: Iterable[str]) -> str:
        """Return the names of nodes, as far as they have entries."""
        return ", ".join(entry.name for entry in map(self.read_entry, tokens) if entry)

    def find_newly_recorded_exit_codes(self, tokens: Iterable[str]) -> dict[str, int]:
        """Return the exit codes of the nodes that ended while we polled.

        Nodes that had ended before belong to an earlier start.
        """
        known = (self._known_nodes[token] for token in tokens if token in self._known_nodes)
        return {
            heartbeat.token: heartbeat.exit_code
            for heartbeat, _, has_changed in known
            if has_changed and heartbeat.exit_code is not None
        }

    def read_entry(self, token: str) -> NodeEntry | None:
        """Return a node's entry; None where there is none, or none any more."""
        values = json.loads(files.read_text_if_small(self._get_entry_path(token)) or "null")
        return values and NodeEntry(**values)

    def read_peer_verdict(self, token: str) -> Verdict | None:
        """Return the verdict that a node has ended with; None where it has none."""
        entry = self.read_entry(token)
        return parse(entry.ended) if entry and entry.ended else None

    def read_newest_round(self) -> Round | None:
        """Return the newest round at the last poll, or the one that this node has proposed since."""
        if self._newest_number and (
            self._newest_round is None or self._newest_round.number != self._newest_number
        ):
            values = json.loads(
                (self.folder / f"round-{self._newest_number}.json").read_text(encoding="utf-8")
            )
            self._newest_round = Round(values["number"], tuple(values["members"]), values["continues"])
        return self._newest_round

    def create_round_if_absent(self, new_round: Round) -> None:
        """Make a round, unless another node has made one with that number. Raise JobFailed."""
        path = self.folder / f"round-{new_round.number}.json"
        complete_file = self.folder / f".{path.name}.{self.own_entry.token}"
        files.write_json(complete_file, asdict(new_round))
        with suppress(FileExistsError):
            os.link(complete_file, path)
            if not new_round.continues:
                self._remove_dead_nodes()
        complete_file.unlink()
        self._newest_number = max(self._newest_number, new_round.number)

    def _remove_dead_nodes(self) -> None:
        """Remove the files of earlier starts."""
        live_tokens = {heartbeat.token for heartbeat in self.find_live_nodes()}
        for token in [token for token in self._known_nodes if token not in live_tokens]:
            heartbeat, _, _ = self._known_nodes.pop(token)
            with suppress(FileNotFoundError):  # the node lives after all
                (self.folder / heartbeat.encoded_file_name).unlink()
                self._get_entry_path(token).unlink()

    def _choose_lost_seconds(self, heartbeat: Heartbeat) -> float:
        """Return how long after this heartbeat its node is lost [s]."""
        if heartbeat.waits_for is not None:
            return LOST_SECONDS
        return get_running_lost_seconds(len(self._known_nodes))

    @property
    def _heartbeat(self) -> Heartbeat:
        entry = self.own_entry
        exit_code = int(entry.ended["code"]) if entry.ended else None
        return Heartbeat(
            entry.token, entry.number, self._heartbeat_count, entry.waits_for, bool(entry.out), exit_code
        )

    def _renew_heartbeat_by_rename(self) -> bool:
        """Renew this node's heartbeat by a rename, and return whether there was a file to rename.

        Raise JobFailed where the disk refuses it.
        """
        self._heartbeat_count += 1
        self._last_heartbeat = time.monotonic()
        with files.convert_write_errors(self.folder / self._heartbeat.encoded_file_name):
            try:
                (self.folder / self._heartbeat_file).rename(self.folder / self._heartbeat.encoded_file_name)
            except FileNotFoundError:
                return False
        self._heartbeat_file = self._heartbeat.encoded_file_name
        return True

    def _get_entry_path(self, token: str) -> Path:
        return self.folder / f"node-{token}.json"


def get_running_interval(nodes: int) -> float:
    """Return the interval of heartbeats, and of polls, of each of `nodes` nodes whose ranks run [s]."""
    return max(HEARTBEAT_SECONDS, nodes / _RUN_HEARTBEATS_PER_SECOND)


def get_running_lost_seconds(nodes: int) -> float:
    """Return after how long without a heartbeat each of `nodes` nodes whose ranks run is lost [s]."""
    return max(LOST_SECONDS, 2 * get_running_interval(nodes))


def get_waiting_poll_interval(nodes: int) -> float:
    """Return the poll interval of each of `nodes` nodes that wait for each other [s]."""
    return min(max(_POLL_SECONDS, nodes / _LISTINGS_PER_SECOND), _LONGEST_POLL_SECONDS)


def plan_next_round(
    last: Round | None, live_nodes: Iterable[Heartbeat], gone: Iterable[str], nodes: int, *, continues: bool
) -> Round | None:
    """Return the round after `last`; None while it cannot begin.

    `gone` are members of `last` that will not come back. A round begins when every member of the last one is
    gone or waits, and enough nodes wait that are not excluded. Former members come first, then lower node
    ranks.
    """
    live, number = list(live_nodes), (last.number if last else 0) + 1
    last_members = last.members if last else ()
    waiting = [heartbeat for heartbeat in live if heartbeat.waits_for == number and not heartbeat.is_excluded]
    if len(waiting) < nodes or not has_no_running_members(last, live, gone):
        return None
    chosen = sorted(waiting, key=lambda heartbeat: (heartbeat.token not in last_members, heartbeat.number))[
        :nodes
    ]
    chosen.sort(key=lambda heartbeat: heartbeat.number)
    return Round(number, tuple(heartbeat.token for heartbeat in chosen), continues)


def has_no_running_members(last: Round | None, live_nodes: Iterable[Heartbeat], gone: Iterable[str]) -> bool:
    """Return whether no member of the last round runs the job any more."""
    number = (last.number if last else 0) + 1
    finished = {heartbeat.token for heartbeat in live_nodes if heartbeat.waits_for == number} | set(gone)
    return last is None or set(last.members) <= finished
