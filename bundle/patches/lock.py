"""Records trees in the reviewed list: fingerprints, verdicts, and the files that decide them."""

from collections.abc import Mapping
from pathlib import Path

from bundle.patches import source
from bundle.patches.catalogue import PATCHES
from bundle.patches.definitions import Definitions, Evidence
from bundle.patches.entry import Patch, Trap
from bundle.patches.seams import SEAMS
from bundle.patches.source import SourceTree
from bundle.patches.table import Listing, Table, merged
from bundle.patches.traps import TRAPS
from bundle.stack import Copy, metadata, versions

# What is decided by reading evidence.
ENTRIES: tuple[Patch | Trap, ...] = (*PATCHES, *TRAPS)


def reference_of(copy: Copy) -> str | None:
    """What a tree is called in the list: a release where its dist-info says so, else version and commit."""
    record = metadata.distributions([copy.root]).get("megatron-core")
    installed = metadata.read(record) if record else None
    if installed is not None and installed.version == copy.version:
        return copy.version
    return f"{copy.version}+{copy.commit[:12]}" if copy.version and copy.commit else None


def read(trees: Mapping[str, Path]) -> Table:
    """A table of the trees, by reference: everything that the patches, seams and traps name.

    Raises source.Unreadable where a tree cannot be parsed.
    """
    by_code, by_signature = declared()
    targets: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(by_code)}
    signatures: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(by_signature)}
    defects: dict[str, dict[str, list[str]]] = {entry.id: {} for entry in ENTRIES}
    modules: dict[str, dict[str, list[str]]] = {}
    asked: set[str] = set()
    references = sorted(trees, key=_age)
    for reference in references:
        tree = SourceTree(trees[reference])
        definitions = Definitions(tree)
        for target in by_code | by_signature:
            found = definitions[target]
            if found is not None and target in by_code:
                targets[target].setdefault(found.fingerprint, []).append(reference)
            if found is not None and target in by_signature:
                signatures[target].setdefault(found.signature, []).append(reference)
        for entry in ENTRIES:
            verdict = entry.defect(Evidence(definitions, frozenset(entry.evidence)))
            defects[entry.id].setdefault(verdict, []).append(reference)
        asked.update(tree.asked())
    for module in sorted(asked):
        for reference in references:
            digest = source.digest(trees[reference], module)
            if digest:
                modules.setdefault(module, {}).setdefault(digest, []).append(reference)
    return Table(tuple(references), *map(_joined, (targets, signatures, defects, modules)))


def declared() -> tuple[set[str], set[str]]:
    """The names whose code is recorded (evidence too), and those whose signature is."""
    replacements = [replacement for patch in PATCHES for replacement in patch.replacements]
    reviewed = [(replacement.target, replacement.by_signature) for replacement in replacements]
    reviewed += [(target, seam.by_signature) for seam in SEAMS for target in seam.targets]
    evidence = {target for entry in ENTRIES for target in entry.evidence}
    by_code = evidence | {target for target, by_signature in reviewed if not by_signature}
    return by_code, {target for target, by_signature in reviewed if by_signature}


def _joined(listing: dict[str, dict[str, list[str]]]) -> Listing:
    return {
        name: {str(value): " ".join(references) for value, references in known.items()}
        for name, known in listing.items()
        if known
    }


def combined(table: Table, new: Table) -> Table:
    """The table with the references of `new` put in, or replaced."""
    kept = merged([table], [reference for reference in table.references if reference not in new.references])
    return merged([kept, new], sorted({*kept.references, *new.references}, key=_age))


def _age(reference: str) -> tuple[object, str]:
    return versions.parse(reference), reference


def changes(table: Table, new: Table) -> list[str]:
    """What the new table has that was not reviewed: a line for each fingerprint and verdict."""
    lines = []
    for what, listing in (("code", new.targets), ("signature", new.signatures)):
        for target, known in listing.items():
            for fingerprint, references in known.items():
                if not table.reviewed(target, fingerprint, by_signature=what == "signature"):
                    lines.append(f"new {what} {fingerprint} of {target} in {references}")
    for entry, verdicts in new.defects.items():
        for verdict, references in verdicts.items():
            fresh = [r for r in references.split() if table.defect(entry, r) != verdict]
            if fresh:
                lines.append(f"{entry} is {verdict} in {' '.join(fresh)}")
    return lines
