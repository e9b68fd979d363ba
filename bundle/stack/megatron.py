"""Which megatron-core an import would get: every copy on the search path, and the one that wins.

`megatron` has no __init__.py, so Python merges the directories of that name on the path, and
megatron.core and megatron.training may come from different trees.
"""

from pathlib import Path

from bundle.frozen import frozen
from bundle.stack import git, metadata, text
from bundle.stack.search import Entry, SearchPath

_FIELDS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")


@frozen
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


@frozen
class Megatron:
    """Every copy on the path, and the directories that `megatron.core` and `megatron.training` come from."""

    copies: tuple[Copy, ...]
    core: Copy | None
    training: Copy | None

    @property
    def conflict(self) -> str | None:
        """Why the two halves do not fit, when they come from different trees."""
        if self.core is None or self.training is None or self.core.package == self.training.package:
            return None
        return text.printable(
            f"megatron.core comes from {self.core.package} ({self.core.version or 'no version'}, "
            f"{self.core.origin}) and megatron.training from {self.training.package} "
            f"({self.training.version or 'no version'}, {self.training.origin}): "
            "put one tree first on PYTHONPATH"
        )


def find(path: SearchPath) -> Megatron:
    """The copies of megatron on the search path and what importing it would get."""
    portions = _portions(path)
    regular = next((entry for entry in portions if text.is_file(entry.path / "__init__.py")), None)
    visible = [regular] if regular else portions  # one regular package hides every portion, even earlier ones
    core = _winner("core", visible, path)
    training = _winner("training", visible, path)
    entries = dict.fromkeys([*portions, *(entry for entry in (core, training) if entry)])
    copies = {entry.path: copy for entry in entries if (copy := read_copy(entry)) is not None}
    return Megatron(
        tuple(copies.values()),
        copies.get(core.path) if core else None,
        copies.get(training.path) if training else None,
    )


def _portions(path: SearchPath) -> list[Entry]:
    """Directories named megatron, in the order of Python's search; editable finders come last."""
    found = [Entry(entry.path / "megatron", entry.origin) for entry in path.entries]
    found += path.namespaces.get("megatron", ())
    if "megatron" in path.packages:
        found.append(path.packages["megatron"])
    first: dict[Path, Entry] = {}
    for entry in found:
        if text.is_directory(entry.path):
            first.setdefault(entry.path, entry)
    return list(first.values())


def _winner(child: str, visible: list[Entry], path: SearchPath) -> Entry | None:
    for entry in visible:
        if text.is_file(entry.path / child / "__init__.py"):
            return entry
    mapped = path.packages.get(f"megatron.{child}")
    if mapped is not None and text.is_directory(mapped.path):
        return Entry(mapped.path.parent, mapped.origin)
    return next((entry for entry in visible if text.is_directory(entry.path / child)), None)


def at(path: Path) -> Copy | None:
    """The copy in a tree that the user names: a checkout, a site-packages, `megatron` or `megatron/core`."""
    for package in (path / "megatron", path, path.parent):
        if package.name == "megatron" and text.is_directory(package / "core"):
            return read_copy(Entry(package, "--mcore"))
    return None


def read_copy(entry: Entry) -> Copy | None:
    """The identity of the copy in the directory `entry.path`; None when neither half of megatron is there."""
    if not any(text.is_directory(entry.path / child) for child in ("core", "training")):
        return None
    root = entry.path.parent
    installed = metadata.distributions([root]).get("megatron-core")
    record = metadata.read(installed) if installed else None
    version = declared(text.read(entry.path / "core" / "package_info.py"))
    commit = git.commit(root) or (record.commit if record else None)
    return Copy(entry.path, entry.origin, version or (record.version if record else None), commit)


def declared(source: str | None) -> str | None:
    """The version that the constants of a package_info.py's text make; None when they are not literals.

    `__version__` itself is not read: from 0.19 on importing the file runs git and appends whatever commit the
    surrounding directory is at, which need not be megatron's.
    """
    import ast

    try:
        body = ast.parse(source or "").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values = {
        target.id: node.value.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not all(isinstance(values.get(name), int | str) for name in _FIELDS):
        return None
    major, minor, patch, pre = (str(values[name]) for name in _FIELDS)
    return f"{major}.{minor}.{patch}{pre}"
