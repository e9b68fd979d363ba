"""Where `import` would look: the entries of the module search path and what put them there.

The view is that of a worker, which is started as `python -m bundle`: the current directory comes first,
although the command that asks may be a console script, whose own first entry is its directory of scripts.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from bundle.frozen import frozen
from bundle.stack import text


@frozen
class Entry:
    """One directory of the search path and the reason why it is there."""

    path: Path
    origin: str


@frozen
class SearchPath:
    """The directories in order, and what setuptools' editable finders add behind them."""

    entries: tuple[Entry, ...]
    packages: Mapping[str, Entry] = field(default_factory=dict)  # dotted name -> its own directory
    namespaces: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)  # dotted name -> its portions

    def archives(self, member: str) -> tuple[Path, ...]:
        """The zip files among the entries that hold a path, in order: Python would import from them."""
        return tuple(
            entry.path for entry in self.entries if text.is_file(entry.path) and _holds(entry.path, member)
        )

    def directories(self) -> tuple[Path, ...]:
        """The directories alone, in order."""
        return tuple(entry.path for entry in self.entries)


def current() -> SearchPath:
    """The search path of a worker started from this directory with this interpreter and environment."""
    paths = sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path[1:]]  # noqa: PTH109 - as sys.path has it
    return search_path(paths, os.environ.get("PYTHONPATH", ""), Path.cwd())


def search_path(paths: Sequence[str], python_path: str, cwd: Path) -> SearchPath:
    """The search path whose entries are `paths` ("" is `cwd`), each with its origin."""
    directories = list(dict.fromkeys(cwd / path for path in paths))
    named = {cwd / path for path in python_path.split(os.pathsep) if path}
    added = _added_by_pth(directories)
    entries = []
    for path in directories:
        if path in named:
            origin = "PYTHONPATH"
        elif path == cwd:
            origin = "the current directory"
        else:
            origin = added.get(path, "sys.path")
        entries.append(Entry(path, origin))
    packages: dict[str, Entry] = {}
    namespaces: dict[str, tuple[Entry, ...]] = {}
    for finder in _matching(directories, "__editable___*_finder.py"):
        _read_finder(finder, packages, namespaces)
    return SearchPath(tuple(entries), packages, namespaces)


def _holds(archive: Path, member: str) -> bool:
    import zipfile

    try:
        with zipfile.ZipFile(archive) as file:
            return any(name.startswith(member) for name in file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _added_by_pth(directories: Iterable[Path]) -> dict[Path, str]:
    """The directories that .pth files name, with the file's name."""
    added: dict[Path, str] = {}
    for file in _matching(directories, "*.pth"):
        for line in (text.read(file, 1 << 16) or "").splitlines():
            if line and not line.startswith(("#", "import ", "import\t")):
                added.setdefault(file.parent / line.strip(), file.name)
    return added


def _matching(directories: Iterable[Path], pattern: str) -> list[Path]:
    there = [directory for directory in directories if text.is_directory(directory)]
    return [file for directory in there for file in sorted(directory.glob(pattern))]


def _read_finder(file: Path, packages: dict[str, Entry], namespaces: dict[str, tuple[Entry, ...]]) -> None:
    """Adds what an editable finder of setuptools maps: two literals in its source text."""
    import ast  # 20 ms that only editable installs should pay

    try:
        literals = {
            target.id: ast.literal_eval(node.value)
            for node in ast.parse(text.read(file) or "").body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and target.id in ("MAPPING", "NAMESPACES")
        }
        mapped = {
            str(name): Entry(Path(path), file.name) for name, path in literals.get("MAPPING", {}).items()
        }
        portions = {
            str(name): tuple(Entry(Path(path), file.name) for path in paths)
            for name, paths in literals.get("NAMESPACES", {}).items()
        }
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return  # not written by setuptools as we know it
    packages.update({name: entry for name, entry in mapped.items() if name not in packages})
    namespaces.update({name: entries for name, entries in portions.items() if name not in namespaces})
