"""The megatron-core that decisions are about: an installed one, a tree, or a version."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bundle import files
from bundle.environment import megatron, versions
from bundle.environment.megatron import Copy
from bundle.environment.packages import Stack
from bundle.errors import UsageError
from bundle.patches import reading
from bundle.patches.entry import Patch, Seam, Trap
from bundle.patches.reading import Reading
from bundle.patches.table import Table

if TYPE_CHECKING:
    from bundle.patches.definitions import Definitions

# What `make` installs: where there is no megatron-core, decisions are about this one.
DEFAULT = "0.16.1"


@dataclass(frozen=True)
class Subject:
    """One megatron-core: what it calls itself, where it is, and the reviewed reference that it equals."""

    version: str | None
    commit: str | None
    root: Path | None  # of its source; None for a mere version
    origin: str
    reference: str | None  # every file that matters is the same there
    conflict: str | None = None

    def reader(self, table: Table) -> "Reader":
        """What can tell about patches in this megatron."""
        if self.root is None or self.reference:
            return Reader(self.reference, None, table)
        # Only for a tree that nobody has reviewed: what parses sources is not loaded before.
        from bundle.patches.definitions import Definitions
        from bundle.patches.source import SourceTree

        return Reader(None, Definitions(SourceTree(self.root)), table)


@dataclass(frozen=True)
class Reader:
    """Reads one megatron for any entry: from the reviewed list where it equals a reference of it."""

    reference: str | None
    definitions: "Definitions | None"
    table: Table

    def read(self, entry: Patch | Trap) -> Reading:
        """What is known about a patch or a trap."""
        if self.reference is not None:
            return reading.of_reference(entry, self.reference, self.table)
        if self.definitions is not None:
            return reading.of_tree(entry, self.definitions, self.table)
        return reading.NUMBER_ALONE

    def look(self, seam: Seam) -> Reading | None:
        """What the tree says about the names of a seam; None where it is reviewed, or not at hand."""
        if self.definitions is None:
            return None
        targets = dict.fromkeys(seam.targets, seam.by_signature)
        return reading.of_targets(targets, self.definitions, self.table)


def installed(stack: Stack, table: Table) -> Subject:
    """The megatron-core that a worker would import; the default release where there is none."""
    core = stack.megatron.core
    if core is not None:
        return _of_copy(core, table, stack.megatron.conflict)
    archive = stack.megatron.archive
    where = (
        f"in a zip, which is not read: {files.printable(archive)}" if archive else "none is installed here"
    )
    return replace(named(DEFAULT, table), origin=f"{where}: the default release")


def named(name: str, table: Table) -> Subject:
    """The megatron-core that `--mcore` names: a tree where there is one, else a version."""
    path = Path(name)
    copy = megatron.at(path.absolute())
    if copy is not None:
        return _of_copy(copy, table, None)
    number = name.removeprefix("core_v")  # as Megatron-LM's tags have it
    version = versions.parse(number)
    if version is None:
        no_tree = "holds no megatron/core" if files.is_directory(path) else "is no directory"
        raise UsageError(f"--mcore {files.printable(name[:200])}: no version, and it {no_tree}")
    known = next((ref for ref in table.references if versions.parse(ref) == version), None)
    return Subject(number, version.local, None, "--mcore", known)


def _of_copy(copy: Copy, table: Table, conflict: str | None) -> Subject:
    from bundle.patches import source

    digests = {module: source.digest(copy.root, module) for module in table.modules}
    reference = table.matching(digests)
    version, commit = (value and files.printable(value) for value in (copy.version, copy.commit))
    return Subject(version, commit, copy.root, files.printable(copy.origin), reference, conflict)
