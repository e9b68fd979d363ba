"""The reviewed list of megatron-core releases: fingerprints of every target, and where each defect is.

releases.json is written by `python -m tools.patches.review` and checked in. A fingerprint in it was looked at
together with the wrappers; a release in it is decided without having its source at hand.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bundle.patches.entry import Presence

SHIPPED = Path(__file__).with_name("releases.json")
# name -> value -> the references that have it, in one string: a line of the file for each value
Listing = Mapping[str, Mapping[str, str]]
_LISTINGS = ("targets", "signatures", "defects", "modules")  # the fields of a Table, and of the file


@dataclass(frozen=True)
class Table:
    """What was read in every reviewed reference: a release ("0.16.1") or a commit ("0.16.2+0123abcd4567")."""

    references: tuple[str, ...]  # oldest first
    targets: Listing  # target -> fingerprint of its code -> references
    signatures: Listing  # target -> fingerprint of its signature -> references
    defects: Listing  # id of a patch or trap -> presence -> references
    modules: Listing  # module that was read -> digest of its file -> references

    def fingerprint(self, target: str, reference: str, *, by_signature: bool = False) -> str | None:
        """The target's fingerprint in a reference; None where it does not have the target."""
        return _value(self._known(target, by_signature), reference)

    def defect(self, entry: str, reference: str) -> Presence:
        """What was found in a reference; UNKNOWN for an entry that the reference was not read for."""
        return Presence(_value(self.defects.get(entry, {}), reference) or Presence.UNKNOWN)

    def reviewed(self, target: str, fingerprint: str, *, by_signature: bool = False) -> tuple[str, ...]:
        """The references in which this code, or signature, of the target was reviewed."""
        return tuple(self._known(target, by_signature).get(fingerprint, "").split())

    def _known(self, target: str, by_signature: bool) -> Mapping[str, str]:
        return (self.signatures if by_signature else self.targets).get(target, {})

    def matching(self, digests: Mapping[str, str]) -> str | None:
        """The newest reference whose every module that was read has this digest ("" is no such module)."""
        left = set(self.references)
        for module, known in self.modules.items():
            having = known.get(digests[module])
            if having is not None:
                left &= set(having.split())
            elif digests[module]:
                return None
            else:
                left -= {reference for references in known.values() for reference in references.split()}
        return next((reference for reference in reversed(self.references) if reference in left), None)


def _value(known: Mapping[str, str], reference: str) -> str | None:
    return next((value for value, references in known.items() if reference in references.split()), None)


@cache
def load() -> Table:
    """The list that is shipped with the package."""
    return parse(SHIPPED.read_text("utf-8"))


def parse(text: str) -> Table:
    """The table of a releases.json."""
    document = json.loads(text)
    return Table(tuple(document["references"].split()), *(document[listing] for listing in _LISTINGS))


def write(table: Table, path: Path) -> None:
    """Writes the table as releases.json."""
    document = {
        "references": " ".join(table.references),
        **{listing: getattr(table, listing) for listing in _LISTINGS},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def merged(tables: Iterable[Table], order: Iterable[str]) -> Table:
    """One table of several, each of other references, in the order given."""
    tables, references = list(tables), tuple(order)
    return Table(
        references,
        *(_merged([getattr(table, listing) for table in tables], references) for listing in _LISTINGS),
    )


def _merged(listings: list[Listing], order: tuple[str, ...]) -> Listing:
    rank = {reference: position for position, reference in enumerate(order)}
    collected: dict[str, dict[str, set[str]]] = {}
    for listing in listings:
        for name, known in listing.items():
            for value, references in known.items():
                kept = set(references.split()) & set(rank)
                if kept:
                    collected.setdefault(name, {}).setdefault(value, set()).update(kept)
    return {
        name: {
            value: " ".join(sorted(references, key=rank.__getitem__))
            for value, references in sorted(
                known.items(), key=lambda item: min(map(rank.__getitem__, item[1]))
            )
        }
        for name, known in sorted(collected.items())
    }
