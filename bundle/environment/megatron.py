"""Which megatron-core an import would get: every copy on the search path, and the one that wins.

`megatron` has no __init__.py, so Python merges the directories of that name on the path, and
megatron.core and megatron.training may come from different trees.
"""

from dataclasses import dataclass
from pathlib import Path

from bundle import files
from bundle.environment.search import Entry, SearchPath, commit, distribution, distributions, literals

_FIELDS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


@dataclass(frozen=True)
class Copy:
    """One directory named megatron that holds megatron.core or megatron.training."""

    package: Path  # the directory `megatron` itself
    origin: str
    version: str | None  # what its package_info.py says, which may be a lie
    commit: str | None

    @property
    def root(self) -> Path:
        """The directory that holds `megatron`: the checkout, or site-packages."""
        return self.package.parent


@dataclass(frozen=True)
class Megatron:
    """Every copy on the path, and the directories that `megatron.core` and `megatron.training` come from."""

    copies: tuple[Copy, ...]
    core: Copy | None
    training: Copy | None
    archive: str | None = None  # the zip that megatron.core would come from, which nobody here reads

    @property
    def conflict(self) -> str | None:
        """Why the two halves do not fit, when they come from different trees."""
        if self.core is None or self.training is None or self.core.package == self.training.package:
            return None
        return files.printable(
            f"megatron.core comes from {self.core.package} ({self.core.version or 'no version'}, "
            f"{self.core.origin}) and megatron.training from {self.training.package} "
            f"({self.training.version or 'no version'}, {self.training.origin}): "
            "put one tree first on PYTHONPATH"
        )


def find(path: SearchPath) -> Megatron:
    """The copies of megatron on the search path and what importing it would get."""
    whole = path.find("megatron")
    halves = [path.find(f"megatron.{half}", whole) if whole else None for half in ("core", "training")]
    winners = [
        Entry(places[0].path.parent, places[0].origin) if places else None
        for places in map(path.packages, halves)
    ]
    hidden = [Entry(entry.path / "megatron", entry.origin) for entry in path.entries]
    copies: dict[Path, Copy] = {}
    for entry in (*hidden, *path.packages(whole), *filter(None, winners)):
        if entry.path not in copies and (copy := read_copy(entry)) is not None:
            copies[entry.path] = copy
    core, training = (copies.get(winner.path) if winner else None for winner in winners)
    return Megatron(tuple(copies.values()), core, training, halves[0].archive if halves[0] else None)


def at(path: Path) -> Copy | None:
    """The copy in a tree that the user names: a checkout, a site-packages, `megatron` or `megatron/core`."""
    for package in (path / "megatron", path, path.parent):
        if package.name == "megatron" and files.is_directory(package / "core"):
            return read_copy(Entry(package, "--mcore"))
    return None


def read_copy(entry: Entry) -> Copy | None:
    """The identity of the copy in the directory `entry.path`; None when neither half of megatron is there."""
    if not any(files.is_directory(entry.path / child) for child in ("core", "training")):
        return None
    root = entry.path.parent
    record = distribution(distributions([root]).get("megatron-core"))
    version = declared(files.read(entry.path / "core" / "package_info.py"))
    version = version or (record.version if record else None)
    return Copy(entry.path, entry.origin, version, commit(root) or (record.commit if record else None))


def declared(source: str | None) -> str | None:
    """The version that the constants of a package_info.py's text make; None when they are not literals.

    `__version__` itself is not read: from 0.19 on importing the file runs git and appends whatever commit the
    surrounding directory is at, which need not be megatron's.
    """
    values = literals(source)
    if not all(isinstance(values.get(name), int | str) for name in _FIELDS):
        return None
    major, minor, patch, pre = (str(values[name]) for name in _FIELDS)
    return f"{major}.{minor}.{patch}{pre}"
