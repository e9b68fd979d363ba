"""What is known about a patch in one megatron: from its source, the reviewed list, or its number.

Only the functions that read sources load what parses them: most questions are about reviewed releases.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from bundle.frozen import frozen
from bundle.patches.entry import Patch, Presence
from bundle.patches.table import Table

if TYPE_CHECKING:
    from bundle.patches.definitions import Definitions


@frozen
class Reading:
    """What is known about one patch: about the defect, and about each of its targets."""

    evidence: Presence | None  # None: nothing was read, there is only a version number
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the targets that are there
    reviewed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # references with that code
    nearest: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names like a missing target's
    trouble: str | None = None  # why the source could not be read


NUMBER_ALONE = Reading(None)


def of_tree(patch: Patch, definitions: "Definitions", table: Table) -> Reading:
    """What the source of a tree says."""
    from bundle.patches.definitions import Evidence
    from bundle.patches.source import Unreadable

    targets = of_targets([replacement.target for replacement in patch.replacements], definitions, table)
    try:
        evidence = patch.defect(Evidence(definitions, frozenset(patch.evidence)))
    except Unreadable as error:
        return replace(targets, evidence=Presence.UNKNOWN, trouble=str(error))
    return replace(targets, evidence=evidence)


def of_targets(targets: Iterable[str], definitions: "Definitions", table: Table) -> Reading:
    """What the source of a tree says about some names, without a verdict on any defect."""
    from bundle.patches.source import Unreadable

    trouble, fingerprints, nearest = None, {}, {}
    for target in targets:
        try:
            found = definitions[target]
            if found is not None:
                fingerprints[target] = found.fingerprint
            else:
                nearest[target] = definitions.nearest(target)
        except Unreadable as error:
            trouble = str(error)
    return Reading(None, fingerprints, _reviewed(fingerprints, table), nearest, trouble)


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
