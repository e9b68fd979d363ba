"""Compares megatron-core trees with the reviewed list, and records them in it.

`python -m tools.patches.review PATH...` says what of them nobody has looked at; with `--write` the list that
the package ships has them afterwards: fingerprints, verdicts, and the files that decide them.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from bundle.environment import packages
from bundle.environment.packages import MegatronCopy
from bundle.environment.search import find_distributions, read_distribution
from bundle.errors import UsageError
from bundle.patches import source
from bundle.patches.catalogue import PATCHES, SEAMS, TRAPS
from bundle.patches.definitions import Definitions, EvidenceDefinitions
from bundle.patches.entry import Patch, Trap
from bundle.patches.megatron_core import (
    REVIEW_TABLE_FILE,
    REVIEW_TABLE_LISTING_NAMES,
    Listing,
    ReviewTable,
    load_review_table,
)
from bundle.patches.source import SourceTree
from tools import command

# What is decided by reading evidence.
ENTRIES: tuple[Patch | Trap, ...] = (*PATCHES, *TRAPS)


def reference_of(copy: MegatronCopy) -> str | None:
    """What a tree is called in the list: a release where its dist-info says so, else version and commit."""
    installed = read_distribution(find_distributions([copy.root]).get("megatron-core"))
    if installed is not None and installed.version == copy.version:
        return copy.version
    return f"{copy.version}+{copy.commit[:12]}" if copy.version and copy.commit else None


def read(trees: Mapping[str, Path]) -> ReviewTable:
    """A table of the trees, by reference: everything that the patches, seams and traps name.

    Raises source.UnreadableSource where a tree cannot be parsed.
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
                signatures[target].setdefault(found.signature_fingerprint, []).append(reference)
        for entry in ENTRIES:
            verdict = entry.defect(EvidenceDefinitions(definitions, frozenset(entry.evidence_targets)))
            defects[entry.id].setdefault(verdict, []).append(reference)
        asked.update(tree.list_requested_modules())
    for module in sorted(asked):
        for reference in references:
            digest = source.compute_module_digest(trees[reference], module)
            if digest:
                modules.setdefault(module, {}).setdefault(digest, []).append(reference)
    return ReviewTable(tuple(references), *map(_joined, (targets, signatures, defects, modules)))


def declared() -> tuple[set[str], set[str]]:
    """The names whose code is recorded (evidence too), and those whose signature is."""
    replacements = [replacement for patch in PATCHES for replacement in patch.replacements]
    reviewed = [(replacement.target, replacement.by_signature) for replacement in replacements]
    reviewed += [(target, seam.by_signature) for seam in SEAMS for target in seam.targets]
    evidence = {target for entry in ENTRIES for target in entry.evidence_targets}
    by_code = evidence | {target for target, by_signature in reviewed if not by_signature}
    return by_code, {target for target, by_signature in reviewed if by_signature}


def _joined(listing: dict[str, dict[str, list[str]]]) -> Listing:
    return {
        name: {str(value): " ".join(references) for value, references in known.items()}
        for name, known in listing.items()
        if known
    }


def combined(before: ReviewTable, new: ReviewTable) -> ReviewTable:
    """The table with the references of `new` put in, or replaced."""
    kept = merged([before], [reference for reference in before.references if reference not in new.references])
    return merged([kept, new], sorted({*kept.references, *new.references}, key=_age))


def record(table: ReviewTable, path: Path) -> None:
    """Writes the table as releases.json."""
    document = {
        "references": " ".join(table.references),
        **{listing: getattr(table, listing) for listing in REVIEW_TABLE_LISTING_NAMES},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def merged(tables: Iterable[ReviewTable], order: Iterable[str]) -> ReviewTable:
    """One table of several, each of other references, in the order given."""
    tables, references = list(tables), tuple(order)
    return ReviewTable(
        references,
        *(
            _merged([getattr(table, listing) for table in tables], references)
            for listing in REVIEW_TABLE_LISTING_NAMES
        ),
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


def _age(reference: str) -> tuple[object, str]:
    return packages.parse_version(reference), reference


def changes(before: ReviewTable, new: ReviewTable) -> list[str]:
    """What the new table has that was not reviewed: a line for each fingerprint and verdict."""
    lines = []
    for what, listing in (("code", new.targets), ("signature", new.signatures)):
        for target, known in listing.items():
            for fingerprint, references in known.items():
                if not before.find_reviewed_versions(target, fingerprint, by_signature=what == "signature"):
                    lines.append(f"new {what} {fingerprint} of {target} in {references}")
    for entry, verdicts in new.defects.items():
        for verdict, references in verdicts.items():
            fresh = [r for r in references.split() if before.find_presence(entry, r) != verdict]
            if fresh:
                lines.append(f"{entry} is {verdict} in {' '.join(fresh)}")
    return lines


def main(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Checkouts or unpacked wheels.")],
    write: Annotated[bool, typer.Option(help="Record them in the list that the package ships.")] = False,
) -> None:
    """Fingerprint trees and compare them with the reviewed list."""
    trees = {}
    for path in paths:
        copy = packages.find_copy(path.absolute())
        reference = reference_of(copy) if copy else None
        if copy is None or reference is None:
            raise UsageError(
                f"{path}: "
                + ("it has no megatron/core" if copy is None else "its version or commit is unknown")
            )
        trees[reference] = copy.root
    before, new = load_review_table(), read(trees)
    print("\n".join(changes(before, new)) or "Everything is reviewed.")
    if write:
        record(combined(before, new), REVIEW_TABLE_FILE)


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(main)
    command.run(app, "tools.patches.review")
