"""What is known about a patch in one megatron: from its source, the reviewed list, or its number."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bundle.patches.definitions import Definitions, Evidence
from bundle.patches.entry import Patch, Presence
from bundle.patches.source import Unreadable
from bundle.patches.table import Table


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known about one patch: about the defect, and about each of its targets."""

    evidence: Presence | None  # None: nothing was read, there is only a version number
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the targets that are there
    reviewed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # references with that code
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names like a missing target's
    trouble: str | None = None  # why the source could not be read


NUMBER_ALONE = Reading(None)


def of_tree(patch: Patch, definitions: Definitions, table: Table) -> Reading:
    """What the source of a tree says."""
    trouble = None
    try:
        evidence = patch.defect(Evidence(definitions, frozenset(patch.evidence)))
    except Unreadable as error:
        evidence, trouble = Presence.UNKNOWN, str(error)
    fingerprints, nearest = {}, {}
    for replacement in patch.replacements:
        try:
            found = definitions[replacement.target]
            if found is not None:
                fingerprints[replacement.target] = found.fingerprint
            else:
                nearest[replacement.target] = definitions.nearest(replacement.target)
        except Unreadable as error:
            trouble = str(error)
    return Reading(evidence, fingerprints, _reviewed(fingerprints, table), nearest, trouble)


def of_reference(patch: Patch, reference: str, table: Table) -> Reading:
    """What the reviewed list says about one of its references."""
    known = {
        replacement.target: table.fingerprint(replacement.target, reference)
        for replacement in patch.replacements
    }
    fingerprints = {target: fingerprint for target, fingerprint in known.items() if fingerprint is not None}
    return Reading(table.defect(patch.id, reference), fingerprints, _reviewed(fingerprints, table))


def _reviewed(fingerprints: Mapping[str, str], table: Table) -> Mapping[str, tuple[str, ...]]:
    return {target: table.reviewed(target, value) for target, value in fingerprints.items()}
