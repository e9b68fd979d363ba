"""Records trees in the reviewed list: fingerprints, verdicts, and the files that decide them."""

from collections.abc import Mapping
from pathlib import Path

from bundle.patches import source
from bundle.patches.catalogue import PATCHES
from bundle.patches.definitions import Definitions, Evidence
from bundle.patches.seams import SEAMS
from bundle.patches.source import SourceTree
from bundle.patches.table import Listing, Table, merged
from bundle.stack import Copy, metadata, versions


def reference_of(copy: Copy) -> str | None:
    """What a tree is called in the list: a release where its dist-info says so, else version and commit."""
    record = metadata.distributions([copy.root]).get("megatron-core")
    installed = metadata.read(record) if record else None
    if installed is not None and installed.version == copy.version:
        return copy.version
    return f"{copy.version}+{copy.commit[:12]}" if copy.version and copy.commit else None


def read(trees: Mapping[str, Path]) -> Table:
    """A table of the trees, by reference: everything that the patches and seams name.

    Raises source.Unreadable where a tree cannot be parsed.
    """
    names = {replacement.target for patch in PATCHES for replacement in patch.replacements}
    names |= {target for patch in PATCHES for target in patch.evidence}
    names |= {target for seam in SEAMS for target in seam.targets}
    targets: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(names)}
    defects: dict[str, dict[str, list[str]]] = {patch.id: {} for patch in PATCHES}
    modules: dict[str, dict[str, list[str]]] = {}
    asked: set[str] = set()
    references = sorted(trees, key=_age)
    for reference in references:
        tree = SourceTree(trees[reference])
        definitions = Definitions(tree)
        for target in targets:
            found = definitions[target]
            if found is not None:
                targets[target].setdefault(found.fingerprint, []).append(reference)
        for patch in PATCHES:
            verdict = patch.defect(Evidence(definitions, frozenset(patch.evidence)))
            defects[patch.id].setdefault(verdict, []).append(reference)
        asked.update(tree.asked())
    for module in sorted(asked):
        for reference in references:
            digest = source.digest(trees[reference], module)
            if digest:
                modules.setdefault(module, {}).setdefault(digest, []).append(reference)
    return Table(tuple(references), _joined(targets), _joined(defects), _joined(modules))


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
    for target, known in new.targets.items():
        for fingerprint, references in known.items():
            if not table.reviewed(target, fingerprint):
                lines.append(f"new fingerprint {fingerprint} of {target} in {references}")
    for patch_id, verdicts in new.defects.items():
        for verdict, references in verdicts.items():
            fresh = [r for r in references.split() if table.defect(patch_id, r) != verdict]
            if fresh:
                lines.append(f"{patch_id} is {verdict} in {' '.join(fresh)}")
    return lines
