"""A hook that runs right after a module was imported, before its importer sees it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Finder in front of all others that lets them find, and calls back once the module has run.

    An exception of the callback fails the import: nobody gets a module that was to be patched and was not.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[[ModuleType], None]] = {}

    def call(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Calls back when the module is imported, once."""
        self._callbacks[name] = callback
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Drops what has not been called yet."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def waiting(self) -> tuple[str, ...]:
        """The modules that have not been imported yet."""
        return tuple(self._callbacks)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for the module, its loader calling back."""
        if name not in self._callbacks:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _CallingBack(spec.loader, self._callbacks.pop(name))
                return spec
        return None


class _CallingBack(Loader):
    """The loader that was found, calling back after it has run the module."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]) -> None:
        self._loader, self._callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What the loader creates."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module under its own loader, so that it cannot tell the difference."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
