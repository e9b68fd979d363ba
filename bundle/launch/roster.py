"""The nodes that were started for a job: which of them run it, which are spare, which are lost.

They meet in a folder that all of them see. Each writes a file of its own again and again for as long as it
lives, `node-TOKEN.json`; who takes part in a round is a file as well, `round-N.json`, which is there whole or
not, and which the first makes that sees what it takes. No clock is compared with that of another node, and no
node is needed for what the others decide.
"""

import json
import os
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
_LOOK_SECONDS = 0.5
# How many files all nodes together read at most, in a second: more nodes look less often.
_READ = 500


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
    beat: int = 0
    waits_for: int | None = None
    out: str = ""
    ended: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that it has ended with."""
        return parse(self.ended) if self.ended else None


@dataclass(frozen=True)
class Round:
    """The nodes that run the job together, by token, in the order of their ranks; they meet at `address`.

    `continues`: the round before was of the same start of these nodes.
    """

    number: int
    members: tuple[str, ...]
    address: str
    continues: bool


_UNSEEN = (Entry("", 0, "", ""), 0.0, False)


class Roster:
    """The roster as one node sees it, which keeps its own entry there."""

    def __init__(self, folder: Path, number: int, name: str, address: str) -> None:
        self.folder = folder
        self.own = Entry(secrets.token_hex(4), number, name, address)
        self._beaten = -BEAT_SECONDS
        # By token: what it says, when that was seen to be new, whether it has changed since we came.
        self._known: dict[str, tuple[Entry, float, bool]] = {}
        self._came, self._looked = False, -_LOOK_SECONDS
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, **changes: Any) -> None:
        """Changes this node's entry. Raises JobFailed where nothing can be written."""
        self.own = replace(self.own, **changes, beat=self.own.beat + 1)
        files.write_json(self._place(self.own.token), asdict(self.own))
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """Called every now and then: says that this node lives."""
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            with suppress(JobFailed):  # a full disk is no reason to end what runs
                self.say()

    def look(self) -> bool:
        """Reads what the other nodes say, if it is time to; whether it was."""
        now = time.monotonic()
        if now - self._looked < max(_LOOK_SECONDS, len(self._known) ** 2 / _READ):
            return False
        if (pause := now - self._looked) > LOST_SECONDS / 3:
            # We had no time to look, or the disk none for anybody: nobody else is to blame for that.
            self._known = {
                token: (entry, at + pause, moved) for token, (entry, at, moved) in self._known.items()
            }
        self._looked, first, self._came = now, not self._came, True
        for path in self.folder.glob("node-*.json"):
            values = json.loads(files.read(path) or "null")
            if values is None:
                continue  # somebody has just removed it
            entry = Entry(**values)
            before = self._known.get(entry.token)
            if before is None or before[0] != entry:
                self._known[entry.token] = (entry, now, not first)
        return True

    def alive(self, within: float | None = None) -> list[Entry]:
        """The nodes that were seen to live `within` seconds; without that, those that are not lost."""
        now, within = time.monotonic(), LOST_SECONDS if within is None else within
        seen = [entry for entry, at, moved in self._known.values() if moved and now - at < within]
        return [entry for entry in seen if entry.token != self.own.token] + [self.own]

    def lost(self, tokens: Iterable[str]) -> set[str]:
        """Those that have said nothing for long, or never did, and have not ended either."""
        now = time.monotonic()
        here = {
            token for token, (entry, at, _) in self._known.items() if entry.ended or now - at < LOST_SECONDS
        }
        return set(tokens) - here - {self.own.token}

    def ended(self, tokens: Iterable[str]) -> set[str]:
        """Those that have ended."""
        return {token for token in tokens if token in self._known and self._known[token][0].ended}

    def saw(self, tokens: Iterable[str]) -> bool:
        """Whether any of them has lived since this node came: what never did is of an earlier start."""
        return any(token == self.own.token or self._known.get(token, _UNSEEN)[2] for token in tokens)

    def names(self, tokens: Iterable[str]) -> str:
        """What nodes are called, as far as they ever said."""
        return ", ".join(self._known[token][0].name for token in tokens if token in self._known)

    def ends(self, tokens: Iterable[str]) -> list[Verdict]:
        """How those ended that did so while we looked: what was there before is of an earlier start."""
        seen = (self._known[token] for token in tokens if token in self._known)
        return [entry.verdict for entry, _, moved in seen if moved and entry.verdict is not None]

    def round(self) -> Round | None:
        """The newest round."""
        numbers = [int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.json")]
        if not numbers:
            return None
        values = json.loads((self.folder / f"round-{max(numbers)}.json").read_text(encoding="utf-8"))
        return Round(**values | {"members": tuple(values["members"])})

    def propose(self, of: Round) -> None:
        """Makes a round, unless somebody else has made one of that number. Raises JobFailed."""
        path = self.folder / f"round-{of.number}.json"
        whole = self.folder / f".{path.name}.{self.own.token}"
        files.write_json(whole, asdict(of))
        with suppress(FileExistsError):
            os.link(whole, path)
        whole.unlink()
        if not of.continues:  # what earlier starts have left
            here = {entry.token for entry in self.alive()}
            for entry in [each for each, _, _ in self._known.values() if each.token not in here]:
                self._place(entry.token).unlink(missing_ok=True)

    def _place(self, token: str) -> Path:
        return self.folder / f"node-{token}.json"


def upcoming(
    last: Round | None, alive: Iterable[Entry], gone: Iterable[str], nodes: int, *, continues: bool
) -> Round | None:
    """The round after `last`, of whose members `gone` will not come back; None while it cannot be.

    It can when every member of the last one is gone or waits, and enough nodes wait that are not out. Who has
    run the job goes on with it, and then who was started with the lower node rank.
    """
    here, number = list(alive), (last.number if last else 0) + 1
    before = last.members if last else ()
    waiting = [entry for entry in here if entry.waits_for == number and not entry.out]
    if len(waiting) < nodes or not resolved(last, here, gone):
        return None
    chosen = sorted(waiting, key=lambda entry: (entry.token not in before, entry.number))[:nodes]
    chosen.sort(key=lambda entry: entry.number)
    return Round(number, tuple(entry.token for entry in chosen), chosen[0].address, continues)


def resolved(last: Round | None, alive: Iterable[Entry], gone: Iterable[str]) -> bool:
    """Whether no member of the last round runs the job any more."""
    number = (last.number if last else 0) + 1
    over = {entry.token for entry in alive if entry.waits_for == number} | set(gone)
    return last is None or set(last.members) <= over
