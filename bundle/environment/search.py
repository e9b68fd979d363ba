"""The places where a worker's `import` finds packages, and the distributions there with their commits.

All of it is read from files; nothing is imported or run.

The view is that of a worker, which is started as `python -m bundle`: the current directory comes first. The
command that asks may be a console script, whose own first entry is its directory of scripts.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from email.parser import HeaderParser
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name

from bundle import files

# How setuptools names the modules of its editable installs, and the entries that these put on the path.
EDITABLE_PREFIX = "__editable__"
_COMMIT_PATTERN = r"[0-9a-f]{40}([0-9a-f]{24})?"


class PathEntry(NamedTuple):
    """One directory of the search path, or a package in it, and the reason why it is there."""

    path: Path
    origin: str


class EditableInstall(NamedTuple):
    """The packages and namespaces that the finder of an editable install knows, with their directories."""

    mapping: Mapping[str, str]
    namespaces: Mapping[str, tuple[str, ...]]

    def find_path(self, name: str) -> str | None:
        """Return the path of a package of this install, or of a module in it; None where it has none."""
        for package, path in self.mapping.items():
            if name == package:
                return path
            if name.startswith(f"{package}."):
                return str(Path(path, *name[len(package) + 1 :].split(".")))
        return None


class SearchPath(NamedTuple):
    """The directories in order.

    `raw_entries` also has the hooks of editable installs, for Python's finders.
    """

    entries: tuple[PathEntry, ...]
    raw_entries: tuple[str, ...]
    editable: tuple[EditableInstall, ...] | None = (
        None  # of another interpreter; None: ask the finders of this one
    )

    def list_directories(self) -> tuple[Path, ...]:
        """Return the directories alone, in order."""
        return tuple(entry.path for entry in self.entries)

    def find(self, name: str, parent: "Location | None" = None) -> "Location | None":
        """Return where importing `name`, in the package at `parent`, finds it, by Python's own finders.

        Among the finders that are installed in this interpreter, only those of editable installs are asked:
        any other may do more than look.
        """
        # By its last part: a namespace would look for its parent among the modules that were imported.
        search_locations = self.raw_entries if parent is None else parent.paths
        last = name.rpartition(".")[2]
        spec = PathFinder.find_spec(last, search_locations)
        for finder in sys.meta_path if self.editable is None else ():
            if spec is None and getattr(finder, "__module__", "").startswith(EDITABLE_PREFIX):
                spec = finder.find_spec(name, search_locations)
        paths = [path for install in self.editable or () if (path := install.find_path(name))]
        for path in paths if spec is None else ():
            spec = spec or PathFinder.find_spec(last, [str(Path(path).parent)])
        shared = [path for install in self.editable or () for path in install.namespaces.get(name, ())]
        if spec is None:  # an install may name a namespace that is empty
            is_namespace = any(name in install.namespaces for install in self.editable or ())
            return Location(tuple(shared), False, None) if is_namespace else None
        directories = tuple(spec.submodule_search_locations or ())
        regular, archive = spec.loader is not None, getattr(spec.loader, "archive", None)
        return Location(directories if regular else (*directories, *shared), regular, archive)

    def list_package_directories(self, location: "Location | None") -> list[PathEntry]:
        """Return the directories of a package, in the order of the search; none for a package in a zip."""
        origins = {entry.path: entry.origin for entry in self.entries}
        paths = map(Path, location.paths if location else ())
        return [
            PathEntry(path, origins.get(path.parent, "an editable install"))
            for path in paths
            if files.is_directory(path)
        ]


def parse_literals(source: str | None) -> dict[str, Any]:
    """Return the literals that a module's text assigns to its names; none where the text cannot be read."""
    values: dict[str, Any] = {}
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(source or "").body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                with suppress(ValueError, TypeError, RecursionError, MemoryError):
                    value = ast.literal_eval(node.value)
                    values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return values


class Location(NamedTuple):
    """The places of one package: one where it is regular (has an `__init__.py`), several of a namespace."""

    paths: tuple[str, ...]
    is_regular: bool
    archive: str | None  # the zip that it lies in


def build_worker_path() -> SearchPath:
    """Return the search path of a worker that is started here with this interpreter and environment."""
    paths = sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path[1:]]  # noqa: PTH109 - as sys.path has it
    return build_search_path(paths, os.environ.get("PYTHONPATH", ""), Path.cwd())


def build_process_path() -> SearchPath:
    """Return the present search path of this process, for a process that is not a worker of ours."""
    return build_search_path(sys.path, os.environ.get("PYTHONPATH", ""), Path.cwd())


def build_search_path(paths: Sequence[str], python_path: str, cwd: Path) -> SearchPath:
    """Return the search path whose entries are `paths` ("" is `cwd`), each with its origin, as of now."""
    PathFinder.invalidate_caches()
    names = dict.fromkeys(path if path.startswith(EDITABLE_PREFIX) else str(cwd / path) for path in paths)
    directories = [Path(name) for name in names if not name.startswith(EDITABLE_PREFIX)]
    named = {cwd / path for path in python_path.split(os.pathsep) if path}
    added = read_pth_entries(directories)
    entries = []
    for path in directories:
        if path in named:
            origin = "PYTHONPATH"
        elif path == cwd:
            origin = "the current directory"
        else:
            origin = added.get(path, "sys.path")
        entries.append(PathEntry(path, origin))
    return SearchPath(tuple(entries), tuple(names))


def read_pth_entries(directories: Iterable[Path]) -> dict[Path, str]:
    """Return the directories that the .pth files of these directories name, each with the file's name."""
    added: dict[Path, str] = {}
    for directory in filter(files.is_directory, directories):
        for file in sorted(directory.glob("*.pth")):
            for line in (files.read_text_if_small(file, 1 << 16) or "").splitlines():
                if line and not line.startswith(("#", "import ", "import\t")):
                    added.setdefault(file.parent / line.strip(), file.name)
    return added


class Distribution(NamedTuple):
    """The contents of one dist-info (or egg-info) directory."""

    name: str
    version: str
    commit: str | None = None  # direct_url.json, when it was installed from a repository


def find_distributions(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the dist-info directory of every distribution on `paths`, by normalised name; the first wins.

    Only names are read: `importlib.metadata.distributions` opens the contents, where a pipe has no end.
    """
    directories: dict[str, Path] = {}
    for path in paths:
        try:
            names = sorted(os.listdir(path))  # noqa: PTH208 - a Path of each of thousands of names is slow
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                directories.setdefault(
                    canonicalize_name(name[: -len(".dist-info")].partition("-")[0]), path / name
                )
    return directories


def read_distribution(directory: Path | None) -> Distribution | None:
    """Return the contents of a dist-info directory; None when it names no version.

    Only the headers are read, because a long description follows them. `importlib.metadata.version` is not
    used: MindSpeed replaces that function, and then it answers for packages that are not installed.
    """
    if directory is None:
        return None
    text = next(
        filter(None, (files.read_text_if_small(directory / name) for name in ("METADATA", "PKG-INFO"))), ""
    )
    headers = HeaderParser().parsestr(text)
    name, version = headers["Name"], headers["Version"]
    if not name or not version:
        return None
    return Distribution(
        name, version, _parse_direct_url_commit(files.read_text_if_small(directory / "direct_url.json"))
    )


def _parse_direct_url_commit(record: str | None) -> str | None:
    """Return the commit in a PEP 610 direct_url.json; None for a broken record."""
    try:
        commit = json.loads(record or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return commit if isinstance(commit, str) else None


def read_commit(directory: Path) -> str | None:
    """Return the full hash that HEAD of the checkout rooted exactly at `directory` names, or None.

    It is read from the git directory without running git, because the tree may be untrusted.
    """
    git = _resolve_dot_git(directory / ".git")
    if git is None:
        return None
    head = _read_first_line(git / "HEAD")
    if head is None or not head.startswith("ref: "):
        return _parse_commit_hash(head)
    return _resolve_reference(git, head.removeprefix("ref: ").strip())


def find_enclosing_commit(package: Path) -> str | None:
    """Return the commit of the checkout whose root is the import package's parent or that one's parent."""
    return read_commit(package.parent) or read_commit(package.parent.parent)


def _resolve_dot_git(path: Path) -> Path | None:
    """Return the directory itself, or the one that a worktree's or submodule's `.git` file points at."""
    if files.is_directory(path):
        return path
    pointer = _read_first_line(path)
    if pointer is None or not pointer.startswith("gitdir: "):
        return None
    target = path.parent / pointer.removeprefix("gitdir: ").strip()
    return target if files.is_directory(target) else None


def _resolve_reference(git: Path, name: str) -> str | None:
    if not name.startswith("refs/") or ".." in name.split("/"):
        return None
    shared = _read_first_line(
        git / "commondir"
    )  # a worktree keeps its branches in the main checkout's directory
    for base in (git, git / shared) if shared else (git,):
        commit_hash = _parse_commit_hash(_read_first_line(base / name)) or _read_packed_reference(
            base / "packed-refs", name
        )
        if commit_hash:
            return commit_hash
    return None


def _read_packed_reference(path: Path, name: str) -> str | None:
    for line in (files.read_text_if_small(path) or "").splitlines():
        sha, _, ref = line.partition(" ")
        if ref == name:
            return _parse_commit_hash(sha)
    return None


def _parse_commit_hash(line: str | None) -> str | None:
    return line if line is not None and re.fullmatch(_COMMIT_PATTERN, line) else None


def _read_first_line(path: Path) -> str | None:
    lines = (files.read_text_if_small(path) or "").splitlines()
    return lines[0].strip() if lines else None
