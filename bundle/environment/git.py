"""The commit of a checkout, read from its git directory without running git (the tree may be anybody's)."""

import re
from pathlib import Path

from bundle import files

_SHA = r"[0-9a-f]{40}([0-9a-f]{24})?"


def commit(directory: Path) -> str | None:
    """The full hash that HEAD of the checkout rooted exactly at `directory` names, or None."""
    git = _git_directory(directory / ".git")
    if git is None:
        return None
    head = _line(git / "HEAD")
    if head is None or not head.startswith("ref: "):
        return _hash(head)
    return _reference(git, head.removeprefix("ref: ").strip())


def enclosing_commit(package: Path) -> str | None:
    """The commit of the checkout that an import package stands in, at its root or one directory below."""
    return commit(package.parent) or commit(package.parent.parent)


def _git_directory(path: Path) -> Path | None:
    """The directory itself, or the one that a worktree's or submodule's `.git` file points at."""
    if files.is_directory(path):
        return path
    pointer = _line(path)
    if pointer is None or not pointer.startswith("gitdir: "):
        return None
    target = path.parent / pointer.removeprefix("gitdir: ").strip()
    return target if files.is_directory(target) else None


def _reference(git: Path, name: str) -> str | None:
    if not name.startswith("refs/") or ".." in name.split("/"):
        return None
    shared = _line(git / "commondir")  # a worktree keeps its branches in the main checkout's directory
    for base in (git, git / shared) if shared else (git,):
        found = _hash(_line(base / name)) or _packed(base / "packed-refs", name)
        if found:
            return found
    return None


def _packed(path: Path, name: str) -> str | None:
    for line in (files.read(path) or "").splitlines():
        sha, _, ref = line.partition(" ")
        if ref == name:
            return _hash(sha)
    return None


def _hash(line: str | None) -> str | None:
    return line if line is not None and re.fullmatch(_SHA, line) else None


def _line(path: Path) -> str | None:
    lines = (files.read(path) or "").splitlines()
    return lines[0].strip() if lines else None
