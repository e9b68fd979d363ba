"""The nodes that were started for a job: which of them run it, which are spare, which are lost.

They meet in a folder that all of them see. What a node says of itself is `node-TOKEN.json`; for as long as
it lives it renames an empty file beside that again and again, whose name has all that the others decide by
(`Heartbeat`). Who takes part in a round is a file as well, `round-N.json`, which is there whole or not, and
which the first makes that sees what it takes. No clock is compared with that of another node, and no node is
needed for what the others decide.

So a node that looks lists one folder and opens nothing, however many there are: of a thousand nodes that open
a file of each, a file server would be asked a million times. Times of the files would not do either: a client
of NFS may show them, as long as it keeps what it once asked, for a minute, while it asks anew whether a
folder has changed whenever that is opened, and a rename changes it. A file's number would be given again.
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
# Without a beat for so long, a node is lost; for a third of that, it is not chosen.
LOST_SECONDS = 30.0
# From one look to the next: the more nodes, the longer, so that all together list the folder at most so often
# in a second; and never so long that a node that lives is not seen to within a third of LOST_SECONDS.
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.5, 5.0
_LISTINGS_PER_SECOND = 200


@dataclass(frozen=True)
class NodeEntry:
    """A node: `number` is its node rank as it was started, `address` where others would reach it.

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
    """That a node lives, and what others decide by; `count` grows. `out` and `ended` say only whether it is,
    and with which exit code: the entry has the rest.
    """

    token: str
    number: int
    count: int = 0
    waits_for: int | None = None
    is_excluded: bool = False
    exit_code: int | None = None

    @property
    def file_name(self) -> str:
        """The name of its file."""
        waits_for, exit_code = (
            "" if value is None else str(value) for value in (self.waits_for, self.exit_code)
        )
        fit = "out" if self.is_excluded else "fit"
        return f"beat-{self.token}-{self.number}-{self.count}-{waits_for}-{fit}-{exit_code}"

    @classmethod
    def from_file_name(cls, file_name: str) -> "Heartbeat | None":
        """What the name of a file says; None where it is another's."""
        if (match := _HEARTBEAT_FILE.fullmatch(file_name)) is None:
            return None
        token, number, count, waits_for, fit, exit_code = match.groups()
        waits, code = (int(text) if text else None for text in (waits_for, exit_code))
        return cls(token, int(number), int(count), waits, fit == "out", code)


_HEARTBEAT_FILE = re.compile(r"beat-(\w+)-(\d+)-(\d+)-(\d*)-(fit|out)-(\d*)")
_ROUND_FILE = re.compile(r"round-(\d+)\.json")


@dataclass(frozen=True)
class Round:
    """The nodes that run the job together, by token, in the order of their ranks; they meet at the first.

    `continues`: the round before was of the same start of these nodes.
    """

    number: int
    members: tuple[str, ...]
    continues: bool


_UNSEEN_NODE = (Heartbeat("", 0), 0.0, False)


class NodeRegistry:
    """The roster as one node sees it, which keeps its own entry there."""

    def __init__(self, folder: Path, number: int, name: str, address: str) -> None:
        self.folder = folder
        self.own_entry = NodeEntry(secrets.token_hex(4), number, name, address)
        self._heartbeat_count, self._last_heartbeat = 0, -HEARTBEAT_SECONDS
        self._heartbeat_file = self._heartbeat.file_name  # which is not there yet
        # By token: what it says, when that was seen to be new, whether it has changed since we came.
        self._known_nodes: dict[str, tuple[Heartbeat, float, bool]] = {}
        self._has_polled, self._last_poll = False, -_POLL_SECONDS
        self._newest_number = 0  # the number of the newest round
        self._newest_round: Round | None = None  # the last that was read
        folder.mkdir(parents=True, exist_ok=True)

    def update_entry(self, **changes: Any) -> None:
        """Changes this node's entry. Raises JobFailed where nothing can be written."""
        self.own_entry = replace(self.own_entry, **changes)
        files.write_json(self._get_entry_path(self.own_entry.token), asdict(self.own_entry))
        if not self._rename_heartbeat():
            with files.convert_write_errors(self.folder / self._heartbeat.file_name):
                (self.folder / self._heartbeat.file_name).touch()
            self._heartbeat_file = self._heartbeat.file_name

    def send_heartbeat(self) -> None:
        """Called every now and then: says that this node lives."""
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_SECONDS:
            with suppress(JobFailed):  # a disk that takes nothing is no reason to end what runs
                if not self._rename_heartbeat():  # somebody has taken us for lost, and removed what we said
                    self.update_entry()

    def poll(self) -> bool:
        """Sees what the other nodes show, if it is time to; whether it was."""
        now, interval = time.monotonic(), get_poll_interval(len(self._known_nodes))
        if now - self._last_poll < interval:
            return False
        if (late := now - self._last_poll - interval) > LOST_SECONDS / 3:
            # We had no time to look, or the disk none for anybody: nobody else is to blame for that.
            self._known_nodes = {
                token: (heartbeat, seen_at + late, has_changed)
                for token, (heartbeat, seen_at, has_changed) in self._known_nodes.items()
            }
        self._last_poll, is_first, self._has_polled = now, not self._has_polled, True
        file_names = [path.name for path in self.folder.iterdir()]
        for heartbeat in filter(None, map(Heartbeat.from_file_name, file_names)):
            known = self._known_nodes.get(heartbeat.token)
            # While it is renamed, a listing may have a file twice, or not at all.
            if known is None or heartbeat.count > known[0].count:
                self._known_nodes[heartbeat.token] = (heartbeat, now, not is_first)
        rounds = (int(match[1]) for match in map(_ROUND_FILE.fullmatch, file_names) if match)
        self._newest_number = max([self._newest_number, *rounds])
        return True

    def find_live_nodes(self, within: float | None = None) -> list[Heartbeat]:
        """The nodes that were seen to live `within` seconds; without that, those that are not lost."""
        now, within = time.monotonic(), LOST_SECONDS if within is None else within
        live = [
            heartbeat
            for heartbeat, seen_at, has_changed in self._known_nodes.values()
            if has_changed and now - seen_at < within
        ]
        return [heartbeat for heartbeat in live if heartbeat.token != self.own_entry.token] + [
            self._heartbeat
        ]

    def find_lost_nodes(self, tokens: Iterable[str]) -> set[str]:
        """Those that have said nothing for long, or never did, and have not ended either."""
        now = time.monotonic()
        present = {
            token
            for token, (heartbeat, seen_at, _) in self._known_nodes.items()
            if heartbeat.exit_code is not None or now - seen_at < LOST_SECONDS
        }
        return set(tokens) - present - {self.own_entry.token}

    def find_ended_nodes(self, tokens: Iterable[str]) -> set[str]:
        """Those that have ended."""
        return {
            token for token in tokens if self._known_nodes.get(token, _UNSEEN_NODE)[0].exit_code is not None
        }

    def has_seen_any_heartbeat(self, tokens: Iterable[str]) -> bool:
        """Whether any of them has lived since this node came: what never did is of an earlier start."""
        return any(
            token == self.own_entry.token or self._known_nodes.get(token, _UNSEEN_NODE)[2] for token in tokens
        )

    def format_names(self, tokens: Iterable[str]) -> str:
        """What nodes are called, as far as they ever said."""
        return ", ".join(entry.name for entry in map(self.read_entry, tokens) if entry)

    def read_exit_codes(self, tokens: Iterable[str]) -> dict[str, int]:
        """With which exit codes those ended that did so while we looked: what was there before is of an
        earlier start.
        """
        known = (self._known_nodes[token] for token in tokens if token in self._known_nodes)
        return {
            heartbeat.token: heartbeat.exit_code
            for heartbeat, _, has_changed in known
            if has_changed and heartbeat.exit_code is not None
        }

    def read_entry(self, token: str) -> NodeEntry | None:
        """All that a node says; None where it is not there, or no more."""
        values = json.loads(files.read_text(self._get_entry_path(token)) or "null")
        return values and NodeEntry(**values)

    def read_verdict(self, token: str) -> Verdict | None:
        """The verdict that a node has ended with; None where it does not say one."""
        entry = self.read_entry(token)
        return parse(entry.ended) if entry and entry.ended else None

    def read_newest_round(self) -> Round | None:
        """The newest round that was there at the last look, or that this node has proposed since."""
        if self._newest_number and (
            self._newest_round is None or self._newest_round.number != self._newest_number
        ):
            values = json.loads(
                (self.folder / f"round-{self._newest_number}.json").read_text(encoding="utf-8")
            )
            self._newest_round = Round(values["number"], tuple(values["members"]), values["continues"])
        return self._newest_round

    def propose(self, new_round: Round) -> None:
        """Makes a round, unless somebody else has made one of that number. Raises JobFailed."""
        path = self.folder / f"round-{new_round.number}.json"
        complete_file = self.folder / f".{path.name}.{self.own_entry.token}"
        files.write_json(complete_file, asdict(new_round))
        with suppress(FileExistsError):
            os.link(complete_file, path)
            if not new_round.continues:
                self._remove_old_entries()
        complete_file.unlink()
        self._newest_number = max(self._newest_number, new_round.number)

    def _remove_old_entries(self) -> None:
        """Removes what earlier starts have left."""
        live_tokens = {heartbeat.token for heartbeat in self.find_live_nodes()}
        for token in [token for token in self._known_nodes if token not in live_tokens]:
            heartbeat, _, _ = self._known_nodes.pop(token)
            with suppress(FileNotFoundError):  # it lives after all
                (self.folder / heartbeat.file_name).unlink()
                self._get_entry_path(token).unlink()

    @property
    def _heartbeat(self) -> Heartbeat:
        entry = self.own_entry
        exit_code = int(entry.ended["code"]) if entry.ended else None
        return Heartbeat(
            entry.token, entry.number, self._heartbeat_count, entry.waits_for, bool(entry.out), exit_code
        )

    def _rename_heartbeat(self) -> bool:
        """Shows what this node says, and that it lives; whether there was a file to rename.

        Raises JobFailed where the disk does not take it.
        """
        self._heartbeat_count += 1
        self._last_heartbeat = time.monotonic()
        with files.convert_write_errors(self.folder / self._heartbeat.file_name):
            try:
                (self.folder / self._heartbeat_file).rename(self.folder / self._heartbeat.file_name)
            except FileNotFoundError:
                return False
        self._heartbeat_file = self._heartbeat.file_name
        return True

    def _get_entry_path(self, token: str) -> Path:
        return self.folder / f"node-{token}.json"


def get_poll_interval(nodes: int) -> float:
    """The seconds from one look to the next of each of so many nodes."""
    return min(max(_POLL_SECONDS, nodes / _LISTINGS_PER_SECOND), _LONGEST_POLL_SECONDS)


def plan_next_round(
    last: Round | None, live_nodes: Iterable[Heartbeat], gone: Iterable[str], nodes: int, *, continues: bool
) -> Round | None:
    """The round after `last`, of whose members `gone` will not come back; None while it cannot be.

    It can when every member of the last one is gone or waits, and enough nodes wait that are not out. Who has
    run the job goes on with it, and then who was started with the lower node rank.
    """
    live, number = list(live_nodes), (last.number if last else 0) + 1
    last_members = last.members if last else ()
    waiting = [heartbeat for heartbeat in live if heartbeat.waits_for == number and not heartbeat.is_excluded]
    if len(waiting) < nodes or not is_round_over(last, live, gone):
        return None
    chosen = sorted(waiting, key=lambda heartbeat: (heartbeat.token not in last_members, heartbeat.number))[
        :nodes
    ]
    chosen.sort(key=lambda heartbeat: heartbeat.number)
    return Round(number, tuple(heartbeat.token for heartbeat in chosen), continues)


def is_round_over(last: Round | None, live_nodes: Iterable[Heartbeat], gone: Iterable[str]) -> bool:
    """Whether no member of the last round runs the job any more."""
    number = (last.number if last else 0) + 1
    finished = {heartbeat.token for heartbeat in live_nodes if heartbeat.waits_for == number} | set(gone)
    return last is None or set(last.members) <= finished
