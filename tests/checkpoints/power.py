"""A disk that loses what was not synced: what a folder may hold after the power fails, at every moment."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tree = dict[str, Any]  # a name -> a file's bytes, or a folder's tree


class Disk:
    """Watches syncs and renames below `root`, and asks `check` about every tree that may be left at each.

    Two are possible after a failure: names and contents as they were synced last, and names as they are now
    with contents as they were synced last, since a file system may write names whenever it likes.
    """

    def __init__(self, root: Path, check: Callable[[Tree], None]) -> None:
        self._root, self._check = root, check
        self._files: dict[int, bytes] = {}  # by inode, as last synced
        self._folders: dict[int, dict[str, int]] = {}  # by inode: names of inodes, as last synced
        self._is_folder: dict[int, bool] = {}
        self._sync(root)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes part in this process's syncs and renames."""
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self._sync(Path(f"/proc/self/fd/{descriptor}").readlink())
            self._ask()

        def renamed(move: Any) -> Any:
            def moved(*args: Any, **kwargs: Any) -> None:
                move(*args, **kwargs)
                self._ask()

            return moved

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed(rename))
        monkeypatch.setattr(os, "replace", renamed(replace))

    def synced(self) -> Tree:
        """What is certainly there after a failure now."""
        return self._tree(self._root.stat().st_ino, self._root, now=False)

    def _sync(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self._folders[inode] = self._names(path)
        else:
            self._files[inode] = path.read_bytes()

    def _names(self, folder: Path) -> dict[str, int]:
        names = {}
        for path in folder.iterdir():
            names[path.name] = path.stat().st_ino
            self._is_folder[names[path.name]] = path.is_dir()
        return names

    def _ask(self) -> None:
        self._check(self.synced())
        self._check(self._tree(self._root.stat().st_ino, self._root, now=True))

    def _tree(self, inode: int, folder: Path, *, now: bool) -> Tree:
        names = self._names(folder) if now else self._folders.get(inode, {})
        return {
            name: self._tree(of, folder / name, now=now) if self._is_folder[of] else self._files.get(of, b"")
            for name, of in names.items()
        }
