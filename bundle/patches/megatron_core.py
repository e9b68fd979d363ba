"""The megatron-core that decisions are about, and what is known about patches and traps in it.

A megatron-core is an installed one, a tree or a version. Its source is read, or the reviewed list answers for
it, or nothing does.

The list is releases.json, which `python -m tools.patches.review` writes: fingerprints of every target, and
where each defect is. Somebody compared each fingerprint in the list with the wrappers. A release in the list
is decided without its source at hand. commits.json holds the code of single targets between releases that was
read with the wrappers, where nobody has read the other code of the commit. A fingerprint is that of the code,
or of the signature where the replacement is reviewed by its signature.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bundle import files
from bundle.environment import packages
from bundle.environment.packages import InstalledPackages, MegatronCopy
from bundle.errors import UsageError
from bundle.patches import source
from bundle.patches.definitions import Definitions, EvidenceDefinitions
from bundle.patches.entry import Patch, Presence, Seam, Trap
from bundle.patches.source import SourceTree, UnreadableSource

# The release that `make` installs: decisions are about it where there is no megatron-core.
DEFAULT_RELEASE = "0.16.1"


REVIEW_TABLE_FILE = Path(__file__).with_name("releases.json")
# target -> fingerprint -> a commit, and its differences from the releases
REVIEWED_COMMITS_FILE = Path(__file__).with_name("commits.json")
# name -> value -> the references that have it, in one string: a line of the file for each value
Listing = Mapping[str, Mapping[str, str]]
REVIEW_TABLE_LISTING_NAMES = (
    "targets",
    "signatures",
    "defects",
    "modules",
)  # the fields of a Table, and of the file


class ReviewTable(NamedTuple):
    """The findings in every reviewed reference: a release ("0.16.1") or a commit ("0.16.2+0123abcd4567")."""

    references: tuple[str, ...]  # oldest first
    targets: Listing  # target -> fingerprint of its code -> references
    signatures: Listing  # target -> fingerprint of its signature -> references
    defects: Listing  # id of a patch or trap -> presence -> references
    modules: Listing  # module that was read -> digest of its file -> references

    def find_fingerprint(self, target: str, reference: str, *, by_signature: bool = False) -> str | None:
        """Return the target's fingerprint in a reference; None where the reference lacks the target."""
        return _find_key_by_reference(self._get_references_by_fingerprint(target, by_signature), reference)

    def find_presence(self, entry: str, reference: str) -> Presence:
        """Return the presence of a defect in a reference; UNKNOWN where the reference was not read for it."""
        return Presence(_find_key_by_reference(self.defects.get(entry, {}), reference) or Presence.UNKNOWN)

    def find_reviewed_versions(
        self, target: str, fingerprint: str, *, by_signature: bool = False
    ) -> tuple[str, ...]:
        """Return the references in which this code, or this signature, of the target was reviewed."""
        return tuple(self._get_references_by_fingerprint(target, by_signature).get(fingerprint, "").split())

    def _get_references_by_fingerprint(self, target: str, by_signature: bool) -> Mapping[str, str]:
        return (self.signatures if by_signature else self.targets).get(target, {})

    def find_matching_reference(self, digests: Mapping[str, str]) -> str | None:
        """Return the newest reference in which every listed module has this digest; None where there is none.

        The digest "" stands for a module that does not exist.
        """
        candidates = set(self.references)
        for module, known in self.modules.items():
            listed = known.get(digests[module])
            if listed is not None:
                candidates &= set(listed.split())
            elif digests[module]:
                return None
            else:
                candidates -= {reference for references in known.values() for reference in references.split()}
        return next((reference for reference in reversed(self.references) if reference in candidates), None)


def _find_key_by_reference(known: Mapping[str, str], reference: str) -> str | None:
    return next((value for value, references in known.items() if reference in references.split()), None)


@cache
def load_review_table() -> ReviewTable:
    """Return the reviewed list that is shipped with the package."""
    return parse_releases_json(REVIEW_TABLE_FILE.read_text("utf-8"))


def parse_releases_json(text: str) -> ReviewTable:
    """Return the table from the text of a releases.json."""
    document = json.loads(text)
    return ReviewTable(
        tuple(document["references"].split()), *(document[listing] for listing in REVIEW_TABLE_LISTING_NAMES)
    )


@cache
def load_commits_by_target_fingerprint() -> Mapping[str, Mapping[str, str]]:
    """Return the code of single targets that was read in commits."""
    known: dict[str, dict[str, str]] = json.loads(REVIEWED_COMMITS_FILE.read_text("utf-8"))
    return known


class MegatronCore(NamedTuple):
    """One megatron-core: the version that it reports, its place, and the reviewed reference it equals."""

    version: str | None
    commit: str | None
    root: Path | None  # of its source; None for a mere version
    origin: str
    reference: str | None  # every file that matters is the same there
    conflict: str | None = None

    def __str__(self) -> str:
        location = (
            f" in {files.to_printable(self.root)} ({self.origin})" if self.root else f" ({self.origin})"
        )
        comparison = (
            "reviewed" if self.reference == self.version else f"like {self.reference} in all reviewed files"
        )
        commit = f" at {self.commit[:12]}" if self.commit else ""
        review_state = comparison if self.reference else "not reviewed"
        return f"megatron-core {self.version or 'without a version'}{commit}{location}: {review_state}"

    def as_json(self) -> dict[str, str | None]:
        """Return the fields as plain JSON values."""
        return {
            "version": self.version,
            "base_version": packages.parse_base_version(self.version) if self.version else None,
            "commit": self.commit,
            "path": str(self.root) if self.root else None,
            "origin": self.origin,
            "reference": self.reference,
        }

    def build_reader(self, table: ReviewTable) -> "DefectReader":
        """Return a reader for the patches and traps in this megatron-core."""
        if self.root is None or self.reference is not None:
            return DefectReader(self.reference, None, table)
        return DefectReader(None, Definitions(SourceTree(self.root)), table)


@dataclass(frozen=True)
class Reading:
    """The findings about one entry: about the defect, and about each target of a patch."""

    presence: Presence | None  # None: nothing was read, there is only a version number
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the targets that are there
    references: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # references with that code
    nearest_names: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # names like a missing target's
    read_error: str | None = None  # why the source could not be read


VERSION_ONLY_READING = Reading(None)


@dataclass(frozen=True)
class DefectReader:
    """A reader of one megatron-core for any entry.

    It takes the answers from the reviewed list where this megatron-core equals a reference of the list.
    """

    reference: str | None
    definitions: Definitions | None
    table: ReviewTable

    def read(self, entry: Patch | Trap) -> Reading:
        """Return what is known about a patch, or about a trap, which replaces nothing."""
        replacements = entry.replacements if isinstance(entry, Patch) else ()
        targets = {replacement.target: replacement.by_signature for replacement in replacements}
        if self.reference is not None:
            return self._read_from_table(entry.id, targets, self.reference)
        if self.definitions is None:
            return VERSION_ONLY_READING
        reading = self._collect_target_fingerprints(targets, self.definitions)
        try:
            presence = entry.defect(EvidenceDefinitions(self.definitions, frozenset(entry.evidence_targets)))
            gone = (
                _describe_missing_evidence_files(entry, self.definitions)
                if presence is Presence.UNKNOWN
                else ""
            )
        except UnreadableSource as error:
            return replace(reading, presence=Presence.UNKNOWN, read_error=str(error))
        return replace(reading, presence=presence, read_error=reading.read_error or gone or None)

    def list_consulted_modules(self) -> tuple[str, ...]:
        """Return the modules that the findings rest on, including those that do not exist."""
        if self.reference is not None:
            return tuple(self.table.modules)
        return self.definitions.tree.list_requested_modules() if self.definitions else ()

    def read_seam_fingerprints(self, seam: Seam) -> Reading | None:
        """Return what the tree says about the names of a seam; None where it is reviewed, or not at hand."""
        if self.definitions is None:
            return None
        return self._collect_target_fingerprints(
            dict.fromkeys(seam.targets, seam.by_signature), self.definitions
        )

    def _read_from_table(self, entry: str, targets: Mapping[str, bool], reference: str) -> Reading:
        """Return what the reviewed list says about one of its references."""
        known = {t: self.table.find_fingerprint(t, reference, by_signature=by) for t, by in targets.items()}
        fingerprints = {
            target: fingerprint for target, fingerprint in known.items() if fingerprint is not None
        }
        references = self._find_reviewed_versions(fingerprints, targets)
        return Reading(self.table.find_presence(entry, reference), fingerprints, references)

    def _collect_target_fingerprints(self, targets: Mapping[str, bool], definitions: Definitions) -> Reading:
        """Return what a tree's source says about targets, without the presence of the defect.

        The value of `targets` is True for a target that is read by its signature and not by its code.
        """
        read_error, fingerprints, nearest_names = None, {}, {}
        for target, by_signature in targets.items():
            try:
                definition = definitions[target]
                if definition is not None:
                    fingerprints[target] = (
                        definition.signature_fingerprint if by_signature else definition.fingerprint
                    )
                else:
                    nearest_names[target] = definitions.find_nearest(target)
            except UnreadableSource as error:
                read_error = str(error)
        return Reading(
            None, fingerprints, self._find_reviewed_versions(fingerprints, targets), nearest_names, read_error
        )

    def _find_reviewed_versions(
        self, fingerprints: Mapping[str, str], targets: Mapping[str, bool]
    ) -> Mapping[str, tuple[str, ...]]:
        """Return, for each target, the releases and commits in which its code was reviewed."""
        return {
            target: self.table.find_reviewed_versions(target, value, by_signature=targets[target])
            + tuple(load_commits_by_target_fingerprint().get(target, {}).get(value, "").split()[:1])
            for target, value in fingerprints.items()
        }


def _describe_missing_evidence_files(entry: Patch | Trap, definitions: Definitions) -> str:
    """Return a note on the files of the evidence that are missing; "" where all exist."""
    modules = dict.fromkeys(target.partition(":")[0] for target in entry.evidence_targets)
    missing = [module for module in modules if definitions.tree.find_module(module) is None]
    gone = [f"{module.replace('.', '/')}.py" for module in missing]
    return f"{', '.join(gone)} {'are' if gone[1:] else 'is'} missing" if gone else ""


def find_installed_or_default_core(stack: InstalledPackages, table: ReviewTable) -> MegatronCore:
    """Return the megatron-core that a worker would import; the default release where there is none."""
    core = stack.megatron.core
    if core is not None:
        return _from_copy(core, table, stack.megatron.core_training_mismatch)
    archive = stack.megatron.archive
    cause = "none is installed here"
    if archive:
        cause = f"the installed one is in a zip archive, which is not read: {files.to_printable(archive)}"
    return resolve_core_path_or_version(DEFAULT_RELEASE, table)._replace(
        origin=f"default release, because {cause}"
    )


def resolve_core_path_or_version(name: str, table: ReviewTable) -> MegatronCore:
    """Return the megatron-core that `--mcore` names: a tree where there is one, else a version."""
    path = Path(name)
    copy = packages.find_copy(path.absolute())
    if copy is not None:
        return _from_copy(copy, table, None)
    number = name.removeprefix("core_v")  # as Megatron-LM's tags have it
    version = packages.parse_version(number)
    if version is None:
        no_tree = "a directory without megatron/core" if files.is_directory(path) else "not a directory"
        raise UsageError(f"--mcore {files.to_printable(name[:200])}: not a version number, and {no_tree}")
    reference = next((ref for ref in table.references if packages.parse_version(ref) == version), None)
    return MegatronCore(number, version.local, None, "--mcore", reference)


def _from_copy(copy: MegatronCopy, table: ReviewTable, conflict: str | None) -> MegatronCore:
    digests = {module: source.compute_module_digest(copy.root, module) for module in table.modules}
    reference = table.find_matching_reference(digests)
    version, commit = (value and files.to_printable(value) for value in (copy.version, copy.commit))
    return MegatronCore(version, commit, copy.root, files.to_printable(copy.origin), reference, conflict)
