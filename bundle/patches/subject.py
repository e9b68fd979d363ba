"""The megatron-core that decisions are about, and what is known about patches and traps in it.

An installed one, a tree or a version; read from its source, from the reviewed list, or not at all.

The list is releases.json, which `python -m tools.patches.review` writes: fingerprints of every target, and
where each defect is. A fingerprint in it was looked at together with the wrappers; a release in it is decided
without having its source at hand. commits.json is code of single targets between releases that was read with
the wrappers, where nobody has read the other code of the commit; a fingerprint is that of the code, or of the
signature where the replacement is reviewed by it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.environment import packages
from bundle.environment.packages import Copy, Stack
from bundle.errors import UsageError
from bundle.patches import source
from bundle.patches.definitions import Definitions, Evidence
from bundle.patches.entry import Patch, Presence, Seam, Trap
from bundle.patches.source import SourceTree, Unreadable

# What `make` installs: where there is no megatron-core, decisions are about this one.
DEFAULT = "0.16.1"


SHIPPED = Path(__file__).with_name("releases.json")
# target -> fingerprint -> a commit, and what differs there from the releases
COMMITS = Path(__file__).with_name("commits.json")
# name -> value -> the references that have it, in one string: a line of the file for each value
Listing = Mapping[str, Mapping[str, str]]
LISTINGS = ("targets", "signatures", "defects", "modules")  # the fields of a Table, and of the file


class Table(NamedTuple):
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
    return Table(tuple(document["references"].split()), *(document[listing] for listing in LISTINGS))


@cache
def commits() -> Mapping[str, Mapping[str, str]]:
    """The code of single targets that was read in commits."""
    known: dict[str, dict[str, str]] = json.loads(COMMITS.read_text("utf-8"))
    return known


class Subject(NamedTuple):
    """One megatron-core: what it calls itself, where it is, and the reviewed reference that it equals."""

    version: str | None
    commit: str | None
    root: Path | None  # of its source; None for a mere version
    origin: str
    reference: str | None  # every file that matters is the same there
    conflict: str | None = None

    def __str__(self) -> str:
        where = f" in {files.printable(self.root)} ({self.origin})" if self.root else f" ({self.origin})"
        same = "reviewed" if self.reference == self.version else f"like {self.reference} wherever it matters"
        commit = f" at {self.commit[:12]}" if self.commit else ""
        known = same if self.reference else "not reviewed"
        return f"megatron-core {self.version or 'without a version'}{commit}{where}: {known}"

    def as_json(self) -> dict[str, str | None]:
        """The same, as plain JSON values."""
        return {
            "version": self.version,
            "base_version": packages.base_version(self.version) if self.version else None,
            "commit": self.commit,
            "path": str(self.root) if self.root else None,
            "origin": self.origin,
            "reference": self.reference,
        }

    def reader(self, table: Table) -> "Reader":
        """What can tell about patches in this megatron."""
        if self.root is None or self.reference is not None:
            return Reader(self.reference, None, table)
        return Reader(None, Definitions(SourceTree(self.root)), table)


@dataclass(frozen=True)
class Reading:
    """What is known about one entry: about the defect, and about each target of a patch."""

    evidence: Presence | None  # None: nothing was read, there is only a version number
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the targets that are there
    reviewed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # references with that code
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names like a missing target's
    trouble: str | None = None  # why the source could not be read


NUMBER_ALONE = Reading(None)


@dataclass(frozen=True)
class Reader:
    """Reads one megatron for any entry: from the reviewed list where it equals a reference of it."""

    reference: str | None
    definitions: Definitions | None
    table: Table

    def read(self, entry: Patch | Trap) -> Reading:
        """What is known about a patch, or about a trap, which replaces nothing."""
        replacements = entry.replacements if isinstance(entry, Patch) else ()
        targets = {replacement.target: replacement.by_signature for replacement in replacements}
        if self.reference is not None:
            return self._recorded(entry.id, targets, self.reference)
        if self.definitions is None:
            return NUMBER_ALONE
        found = self._looked_up(targets, self.definitions)
        try:
            evidence = entry.defect(Evidence(self.definitions, frozenset(entry.evidence)))
            gone = _gone(entry, self.definitions) if evidence is Presence.UNKNOWN else ""
        except Unreadable as error:
            return replace(found, evidence=Presence.UNKNOWN, trouble=str(error))
        return replace(found, evidence=evidence, trouble=found.trouble or gone or None)

    def read_so_far(self) -> tuple[str, ...]:
        """The modules that what is known rests on, those that are not there too."""
        if self.reference is not None:
            return tuple(self.table.modules)
        return self.definitions.tree.asked() if self.definitions else ()

    def look(self, seam: Seam) -> Reading | None:
        """What the tree says about the names of a seam; None where it is reviewed, or not at hand."""
        if self.definitions is None:
            return None
        return self._looked_up(dict.fromkeys(seam.targets, seam.by_signature), self.definitions)

    def _recorded(self, entry: str, targets: Mapping[str, bool], reference: str) -> Reading:
        """What the reviewed list says about one of its references."""
        known = {t: self.table.fingerprint(t, reference, by_signature=by) for t, by in targets.items()}
        fingerprints = {
            target: fingerprint for target, fingerprint in known.items() if fingerprint is not None
        }
        reviewed = self._reviewed(fingerprints, targets)
        return Reading(self.table.defect(entry, reference), fingerprints, reviewed)

    def _looked_up(self, targets: Mapping[str, bool], definitions: Definitions) -> Reading:
        """What the source of a tree says about names, by their code or (True) their signature; no verdict."""
        trouble, fingerprints, nearest = None, {}, {}
        for target, by_signature in targets.items():
            try:
                found = definitions[target]
                if found is not None:
                    fingerprints[target] = found.signature if by_signature else found.fingerprint
                else:
                    nearest[target] = definitions.nearest(target)
            except Unreadable as error:
                trouble = str(error)
        return Reading(None, fingerprints, self._reviewed(fingerprints, targets), nearest, trouble)

    def _reviewed(
        self, fingerprints: Mapping[str, str], targets: Mapping[str, bool]
    ) -> Mapping[str, tuple[str, ...]]:
        """The releases, and the commits, in which what is there was reviewed."""
        return {
            target: self.table.reviewed(target, value, by_signature=targets[target])
            + tuple(commits().get(target, {}).get(value, "").split()[:1])
            for target, value in fingerprints.items()
        }


def _gone(entry: Patch | Trap, definitions: Definitions) -> str:
    """Which files of the evidence are not there; "" where all are."""
    modules = dict.fromkeys(target.partition(":")[0] for target in entry.evidence)
    missing = [module for module in modules if definitions.tree.module(module) is None]
    gone = [f"{module.replace('.', '/')}.py" for module in missing]
    return f"{', '.join(gone)} {'are' if gone[1:] else 'is'} not there" if gone else ""


def installed(stack: Stack, table: Table) -> Subject:
    """The megatron-core that a worker would import; the default release where there is none."""
    core = stack.megatron.core
    if core is not None:
        return _of_copy(core, table, stack.megatron.conflict)
    archive = stack.megatron.archive
    where = (
        f"in a zip, which is not read: {files.printable(archive)}" if archive else "none is installed here"
    )
    return named(DEFAULT, table)._replace(origin=f"{where}: the default release")


def named(name: str, table: Table) -> Subject:
    """The megatron-core that `--mcore` names: a tree where there is one, else a version."""
    path = Path(name)
    copy = packages.megatron_at(path.absolute())
    if copy is not None:
        return _of_copy(copy, table, None)
    number = name.removeprefix("core_v")  # as Megatron-LM's tags have it
    version = packages.parse_version(number)
    if version is None:
        no_tree = "holds no megatron/core" if files.is_directory(path) else "is no directory"
        raise UsageError(f"--mcore {files.printable(name[:200])}: no version, and it {no_tree}")
    known = next((ref for ref in table.references if packages.parse_version(ref) == version), None)
    return Subject(number, version.local, None, "--mcore", known)


def _of_copy(copy: Copy, table: Table, conflict: str | None) -> Subject:
    digests = {module: source.digest(copy.root, module) for module in table.modules}
    reference = table.matching(digests)
    version, commit = (value and files.printable(value) for value in (copy.version, copy.commit))
    return Subject(version, commit, copy.root, files.printable(copy.origin), reference, conflict)
