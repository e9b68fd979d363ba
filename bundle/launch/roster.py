"""The nodes that were started for a job: which of them run it, which are spare, which are lost.

They meet in a folder that all of them see. What a node says of itself is `node-TOKEN.json`; for as long as
it lives it renames an empty file beside that again and again, whose name has all that the others decide by
(`Sign`). Who takes part in a round is a file as well, `round-N.json`, which is there whole or not, and which
the first makes that sees what it takes. No clock is compared with that of another node, and no node is needed
for what the others decide.

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

BEAT_SECONDS = 2.0
# Without a beat for so long, a node is lost; for a third of that, it is not chosen.
LOST_SECONDS = 30.0
# From one look to the next: the more nodes, the longer, so that all together list the folder at most so often
# in a second; and never so long that a node that lives is not seen to within a third of LOST_SECONDS.
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.5, 5.0
_LISTINGS = 200


@dataclass(frozen=True)
class Entry:
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
class Sign:
    """That a node lives, and what others decide by; `beat` grows. `out` and `ended` say only whether it is,
    and with which exit code: the entry has the rest.
    """

    token: str
    number: int
    beat: int = 0
    waits_for: int | None = None
    out: bool = False
    ended: int | None = None

    @property
    def file(self) -> str:
        """The name of its file."""
        waits_for, ended = ("" if each is None else str(each) for each in (self.waits_for, self.ended))
        fit = "out" if self.out else "fit"
        return f"beat-{self.token}-{self.number}-{self.beat}-{waits_for}-{fit}-{ended}"

    @classmethod
    def parse(cls, file: str) -> "Sign | None":
        """What the name of a file says; None where it is another's."""
        if (found := _SIGN.fullmatch(file)) is None:
            return None
        token, number, beat, waits_for, fit, ended = found.groups()
        waits, code = (int(each) if each else None for each in (waits_for, ended))
        return cls(token, int(number), int(beat), waits, fit == "out", code)


_SIGN = re.compile(r"beat-(\w+)-(\d+)-(\d+)-(\d*)-(fit|out)-(\d*)")
_ROUND = re.compile(r"round-(\d+)\.json")


@dataclass(frozen=True)
class Round:
    """The nodes that run the job together, by token, in the order of their ranks; they meet at the first.

    `continues`: the round before was of the same start of these nodes.
    """

    number: int
    members: tuple[str, ...]
    continues: bool


_UNSEEN = (Sign("", 0), 0.0, False)


class Roster:
    """The roster as one node sees it, which keeps its own entry there."""

    def __init__(self, folder: Path, number: int, name: str, address: str) -> None:
        self.folder = folder
        self.own = Entry(secrets.token_hex(4), number, name, address)
        self._beat, self._beaten = 0, -BEAT_SECONDS
        self._shown = self._sign.file  # which is not there yet
        # By token: what it says, when that was seen to be new, whether it has changed since we came.
        self._known: dict[str, tuple[Sign, float, bool]] = {}
        self._came, self._looked = False, -_LOOK_SECONDS
        self._newest = 0  # the number of the newest round
        self._round: Round | None = None  # the last that was read
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, **changes: Any) -> None:
        """Changes this node's entry. Raises JobFailed where nothing can be written."""
        self.own = replace(self.own, **changes)
        files.write_json(self._place(self.own.token), asdict(self.own))
        if not self._renamed():
            with files.writing(self.folder / self._sign.file):
                (self.folder / self._sign.file).touch()
            self._shown = self._sign.file

    def beat(self) -> None:
        """Called every now and then: says that this node lives."""
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            with suppress(JobFailed):  # a disk that takes nothing is no reason to end what runs
                if not self._renamed():  # somebody has taken us for lost, and removed what we said
                    self.say()

    def look(self) -> bool:
        """Sees what the other nodes show, if it is time to; whether it was."""
        now, planned = time.monotonic(), look_seconds(len(self._known))
        if now - self._looked < planned:
            return False
        if (late := now - self._looked - planned) > LOST_SECONDS / 3:
            # We had no time to look, or the disk none for anybody: nobody else is to blame for that.
            self._known = {
                token: (sign, at + late, moved) for token, (sign, at, moved) in self._known.items()
            }
        self._looked, first, self._came = now, not self._came, True
        there = [path.name for path in self.folder.iterdir()]
        for sign in filter(None, map(Sign.parse, there)):
            before = self._known.get(sign.token)
            # While it is renamed, a listing may have a file twice, or not at all.
            if before is None or sign.beat > before[0].beat:
                self._known[sign.token] = (sign, now, not first)
        rounds = (int(found[1]) for found in map(_ROUND.fullmatch, there) if found)
        self._newest = max([self._newest, *rounds])
        return True

    def alive(self, within: float | None = None) -> list[Sign]:
        """The nodes that were seen to live `within` seconds; without that, those that are not lost."""
        now, within = time.monotonic(), LOST_SECONDS if within is None else within
        seen = [sign for sign, at, moved in self._known.values() if moved and now - at < within]
        return [sign for sign in seen if sign.token != self.own.token] + [self._sign]

    def lost(self, tokens: Iterable[str]) -> set[str]:
        """Those that have said nothing for long, or never did, and have not ended either."""
        now = time.monotonic()
        here = {
            token
            for token, (sign, at, _) in self._known.items()
            if sign.ended is not None or now - at < LOST_SECONDS
        }
        return set(tokens) - here - {self.own.token}

    def ended(self, tokens: Iterable[str]) -> set[str]:
        """Those that have ended."""
        return {token for token in tokens if self._known.get(token, _UNSEEN)[0].ended is not None}

    def saw(self, tokens: Iterable[str]) -> bool:
        """Whether any of them has lived since this node came: what never did is of an earlier start."""
        return any(token == self.own.token or self._known.get(token, _UNSEEN)[2] for token in tokens)

    def names(self, tokens: Iterable[str]) -> str:
        """What nodes are called, as far as they ever said."""
        return ", ".join(entry.name for entry in map(self.entry, tokens) if entry)

    def ends(self, tokens: Iterable[str]) -> dict[str, int]:
        """With which exit codes those ended that did so while we looked: what was there before is of an
        earlier start.
        """
        seen = (self._known[token] for token in tokens if token in self._known)
        return {sign.token: sign.ended for sign, _, moved in seen if moved and sign.ended is not None}

    def entry(self, token: str) -> Entry | None:
        """All that a node says; None where it is not there, or no more."""
        values = json.loads(files.read(self._place(token)) or "null")
        return values and Entry(**values)

    def verdict(self, token: str) -> Verdict | None:
        """The verdict that a node has ended with; None where it does not say one."""
        entry = self.entry(token)
        return parse(entry.ended) if entry and entry.ended else None

    def round(self) -> Round | None:
        """The newest round that was there at the last look, or that this node has proposed since."""
        if self._newest and (self._round is None or self._round.number != self._newest):
            values = json.loads((self.folder / f"round-{self._newest}.json").read_text(encoding="utf-8"))
            self._round = Round(values["number"], tuple(values["members"]), values["continues"])
        return self._round

    def propose(self, of: Round) -> None:
        """Makes a round, unless somebody else has made one of that number. Raises JobFailed."""
        path = self.folder / f"round-{of.number}.json"
        whole = self.folder / f".{path.name}.{self.own.token}"
        files.write_json(whole, asdict(of))
        with suppress(FileExistsError):
            os.link(whole, path)
            if not of.continues:
                self._tidy()
        whole.unlink()
        self._newest = max(self._newest, of.number)

    def _tidy(self) -> None:
        """Removes what earlier starts have left."""
        here = {sign.token for sign in self.alive()}
        for token in [token for token in self._known if token not in here]:
            sign, _, _ = self._known.pop(token)
            with suppress(FileNotFoundError):  # it lives after all
                (self.folder / sign.file).unlink()
                self._place(token).unlink()

    @property
    def _sign(self) -> Sign:
        own = self.own
        ended = int(own.ended["code"]) if own.ended else None
        return Sign(own.token, own.number, self._beat, own.waits_for, bool(own.out), ended)

    def _renamed(self) -> bool:
        """Shows what this node says, and that it lives; whether there was a file to rename.

        Raises JobFailed where the disk does not take it.
        """
        self._beat += 1
        self._beaten = time.monotonic()
        with files.writing(self.folder / self._sign.file):
            try:
                (self.folder / self._shown).rename(self.folder / self._sign.file)
            except FileNotFoundError:
                return False
        self._shown = self._sign.file
        return True

    def _place(self, token: str) -> Path:
        return self.folder / f"node-{token}.json"


def look_seconds(nodes: int) -> float:
    """The seconds from one look to the next of each of so many nodes."""
    return min(max(_LOOK_SECONDS, nodes / _LISTINGS), _LONGEST_LOOK_SECONDS)


def upcoming(
    last: Round | None, alive: Iterable[Sign], gone: Iterable[str], nodes: int, *, continues: bool
) -> Round | None:
    """The round after `last`, of whose members `gone` will not come back; None while it cannot be.

    It can when every member of the last one is gone or waits, and enough nodes wait that are not out. Who has
    run the job goes on with it, and then who was started with the lower node rank.
    """
    here, number = list(alive), (last.number if last else 0) + 1
    before = last.members if last else ()
    waiting = [sign for sign in here if sign.waits_for == number and not sign.out]
    if len(waiting) < nodes or not resolved(last, here, gone):
        return None
    chosen = sorted(waiting, key=lambda sign: (sign.token not in before, sign.number))[:nodes]
    chosen.sort(key=lambda sign: sign.number)
    return Round(number, tuple(sign.token for sign in chosen), continues)


def resolved(last: Round | None, alive: Iterable[Sign], gone: Iterable[str]) -> bool:
    """Whether no member of the last round runs the job any more."""
    number = (last.number if last else 0) + 1
    over = {sign.token for sign in alive if sign.waits_for == number} | set(gone)
    return last is None or set(last.members) <= over
