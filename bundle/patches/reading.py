"""What is known about a patch or a trap in one megatron: from its source, the reviewed list, or its number.

Only the functions that read sources load what parses them: most questions are about reviewed releases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bundle.patches.commits import REVIEWED
from bundle.patches.entry import Patch, Presence, Trap
from bundle.patches.table import Table

if TYPE_CHECKING:
    from bundle.patches.definitions import Definitions


@dataclass(frozen=True)
class Reading:
    """What is known about one entry: about the defect, and about each target of a patch."""

    evidence: Presence | None  # None: nothing was read, there is only a version number
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the targets that are there
    reviewed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # references with that code
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names like a missing target's
    trouble: str | None = None  # why the source could not be read


NUMBER_ALONE = Reading(None)


def of_tree(entry: Patch | Trap, definitions: "Definitions", table: Table) -> Reading:
    """What the source of a tree says."""
    from bundle.patches.definitions import Evidence
    from bundle.patches.source import Unreadable

    targets = of_targets(_targets(entry), definitions, table)
    try:
        evidence = entry.defect(Evidence(definitions, frozenset(entry.evidence)))
        gone = _gone(entry, definitions) if evidence is Presence.UNKNOWN else ""
    except Unreadable as error:
        return replace(targets, evidence=Presence.UNKNOWN, trouble=str(error))
    return replace(targets, evidence=evidence, trouble=targets.trouble or gone or None)


def _gone(entry: Patch | Trap, definitions: "Definitions") -> str:
    """Which files of the evidence are not there; "" where all are."""
    modules = dict.fromkeys(target.partition(":")[0] for target in entry.evidence)
    missing = [module for module in modules if definitions.tree.module(module) is None]
    files = [f"{module.replace('.', '/')}.py" for module in missing]
    return f"{', '.join(files)} {'are' if files[1:] else 'is'} not there" if files else ""


def of_targets(targets: Mapping[str, bool], definitions: "Definitions", table: Table) -> Reading:
    """What the source of a tree says about names, by their code or (True) their signature; no verdict."""
    from bundle.patches.source import Unreadable

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
    return Reading(None, fingerprints, _reviewed(fingerprints, targets, table), nearest, trouble)


def of_reference(entry: Patch | Trap, reference: str, table: Table) -> Reading:
    """What the reviewed list says about one of its references."""
    targets = _targets(entry)
    known = {target: table.fingerprint(target, reference, by_signature=by) for target, by in targets.items()}
    fingerprints = {target: fingerprint for target, fingerprint in known.items() if fingerprint is not None}
    reviewed = _reviewed(fingerprints, targets, table)
    return Reading(table.defect(entry.id, reference), fingerprints, reviewed)


def _targets(entry: Patch | Trap) -> dict[str, bool]:
    """What an entry replaces, and whether it is reviewed by its signature; a trap replaces nothing."""
    replacements = entry.replacements if isinstance(entry, Patch) else ()
    return {replacement.target: replacement.by_signature for replacement in replacements}


def _reviewed(
    fingerprints: Mapping[str, str], targets: Mapping[str, bool], table: Table
) -> Mapping[str, tuple[str, ...]]:
    """The releases, and the commits, in which what is there was reviewed."""
    return {
        target: table.reviewed(target, value, by_signature=targets[target])
        + REVIEWED.get(target, {}).get(value, ())[:1]
        for target, value in fingerprints.items()
    }
