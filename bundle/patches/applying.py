"""Applies a plan to this process, lazily, and takes it back exactly.

The one part of this room that touches imported code: it imports a wrapper, by name, when its target is there.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from bundle.errors import PatchError
from bundle.patches import source
from bundle.patches.plan import PatchPlan, Step


class AfterImport(MetaPathFinder):
    """Finder in front of all others that lets them find, and calls back once the module has run.

    An exception of the callback fails the import, the next one too: nobody gets a module that was to be
    patched and was not. Who only looks for the module, or fails to import it, uses nothing up.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[[ModuleType], None]] = {}

    def call(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Calls back when the module is imported, until the callback has returned once."""
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
                spec.loader = _CallingBack(spec.loader, self)
                return spec
        return None

    def ran(self, module: ModuleType) -> None:
        """Calls back for a module that has run."""
        name = module.__name__
        if name in self._callbacks:
            self._callbacks[name](module)
            self._callbacks.pop(name, None)


class _CallingBack(Loader):
    """The loader that was found, calling back after it has run the module."""

    def __init__(self, loader: Any, hook: AfterImport) -> None:
        self._loader, self._hook = loader, hook

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
        self._hook.ran(module)


_ABSENT = object()  # a name that only a branch not taken would have bound


@dataclass(frozen=True, eq=False)
class _Applied:
    """One replaced attribute: where, what was there (the raw descriptor), and what is there now."""

    step: Step
    owner: Any
    name: str
    before: Any
    now: Any
    elsewhere: tuple[tuple[ModuleType, str], ...]  # names that held the original by value


class _Process:
    """What has been done to this process."""

    def __init__(self) -> None:
        self.plan: PatchPlan | None = None
        self.applied: list[_Applied] = []
        self.hook = AfterImport()


_process = _Process()


def apply(plan: PatchPlan) -> None:
    """Patches what is imported already at once, everything else when it is imported. Again is no change.

    Raises PatchError, with nothing changed, where a module or its code is not what was planned, and where
    another plan is in force. What is imported later fails to import instead.
    """
    if _process.plan is not None:
        if _process.plan != plan:
            raise PatchError("Another plan of patches is in force in this process: revert it first")
        return
    by_module: dict[str, list[Step]] = {}
    for step in plan.steps:
        by_module.setdefault(step.target.partition(":")[0], []).append(step)
    try:
        for name, steps in by_module.items():
            if name in sys.modules:
                _apply_to(sys.modules[name], steps)
            else:
                _process.hook.call(name, lambda module, steps=steps: _apply_to(module, steps))  # type: ignore[misc]
    except BaseException:
        _start_over()
        raise
    _process.plan = plan


def revert() -> None:
    """Puts back every attribute as it was, the very descriptor; objects built meanwhile keep what they have.

    Raises PatchError, with nothing changed, where somebody has replaced one of ours since.
    """
    strangers = [
        f"{applied.step.target} in {getattr(owner, '__name__', owner)} is now {_described(_raw(owner, name))}"
        for applied in _topmost()
        for owner, name in ((applied.owner, applied.name), *applied.elsewhere)
        if _raw(owner, name) is not applied.now
    ]
    if strangers:
        raise PatchError("Patches cannot be taken back from under somebody else's:", strangers)
    _start_over()


def in_force() -> PatchPlan | None:
    """The plan that is applied to this process."""
    return _process.plan


def applied() -> tuple[str, ...]:
    """The targets that are patched now, in the order of patching."""
    return tuple(applied.step.target for applied in _process.applied)


def waiting() -> tuple[str, ...]:
    """The modules that will be patched when they are imported."""
    return _process.hook.waiting()


def out_of_reach(plan: PatchPlan) -> list[str]:
    """The planned functions that modules of others imported by value already: no patch reaches them there."""
    found = []
    for step in plan.steps:
        module, _, name = step.target.partition(":")
        original = getattr(sys.modules.get(module), name, None) if step.everywhere else None
        found += [  # one module may go by two names, as __main__ does
            f"{step.patch}: {holder.__name__} has imported {step.target}"
            for holder, _ in _holders(original, module, inside=False)
        ]
    return list(dict.fromkeys(found))


def _topmost() -> list[_Applied]:
    """The outermost of ours on each attribute."""
    return list({(id(a.owner), a.name): a for a in _process.applied}.values())


def _start_over() -> None:
    _take_back(list(_process.applied))
    _process.hook.forget()
    _process.plan = None


def _take_back(replaced: list[_Applied]) -> None:
    """Takes these replacements back, the latest first."""
    for applied in reversed(replaced):
        original = _function(applied.before) if applied.before is not _ABSENT else None
        for module, name in applied.elsewhere:
            setattr(module, name, original)
        if applied.before is _ABSENT:
            delattr(applied.owner, applied.name)
        else:
            setattr(applied.owner, applied.name, applied.before)
        _process.applied.remove(applied)


def _apply_to(module: ModuleType, steps: list[Step]) -> None:
    """All of the steps, or none: a wrapper that is imported may import other modules, which stay patched."""
    ours: list[_Applied] = []
    try:
        for step in steps:
            ours.append(_applied(module, step))
            _process.applied.append(ours[-1])
    except BaseException:
        _take_back(ours)
        raise


def _applied(module: ModuleType, step: Step) -> _Applied:
    owner, name = _owner(module, step)
    _check_file(module, step)
    before = _raw(owner, name)
    original = getattr(owner, name, None)
    if inspect.isfunction(original) or inspect.ismethod(original):
        _check_code(module, original, step)
    inherited = before is _ABSENT and original is not None
    wrapped = _wrapper(step)(_function(original) if inherited else _function(before))
    now = type(before)(wrapped) if isinstance(before, staticmethod | classmethod) else wrapped
    setattr(owner, name, now)
    elsewhere = _rebound(original, now, step) if step.everywhere else ()
    return _Applied(step, owner, name, before, now, elsewhere)


def _owner(module: ModuleType, step: Step) -> tuple[Any, str]:
    *path, name = step.target.partition(":")[2].split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
        if owner is None:
            raise PatchError(f"{step.patch}: {step.target} was planned, but there is no {part}")
    return owner, name


def _raw(owner: Any, name: str) -> Any:
    """What stands under the name in the owner itself, unbound; _ABSENT where it is inherited or nowhere."""
    return vars(owner).get(name, _ABSENT)


def _function(raw: Any) -> Any:
    """What a wrapper is given: the function in a static or class method; None where there is nothing."""
    if raw is _ABSENT:
        return None
    if isinstance(raw, property):
        raise PatchError("a property cannot be wrapped")
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _wrapper(step: Step) -> Any:
    module, _, name = step.wrapper.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_file(module: ModuleType, step: Step) -> None:
    """That the module is the planned one, to the byte: another tree may be first on this rank's path."""
    file = Path(module.__file__ or "")
    if not file.as_posix().endswith(f"/{step.file}"):
        raise PatchError(f"{step.patch}: {module.__name__} comes from {file}, not from a {step.file}")
    root = file.parents[step.file.count("/")]
    if source.digest(root, module.__name__) != step.file_digest:
        raise PatchError(f"{step.patch}: {file} is not the file that the patches were planned for")


def _check_code(module: ModuleType, original: Any, step: Step) -> None:
    """That the code under everybody's wrappers is upstream's own."""
    code = getattr(inspect.unwrap(original), "__code__", None)
    file = Path(code.co_filename) if code else Path()
    root = Path(module.__file__ or "").parents[step.file.count("/")]
    if file != root / step.code_file:
        raise PatchError(
            f"{step.patch}: {step.target} is {_described(original)}, and not the code in {step.code_file} "
            "that the patch was planned for: another patcher has replaced it"
        )


def _rebound(original: Any, now: Any, step: Step) -> tuple[tuple[ModuleType, str], ...]:
    """The names in modules of the same top package that held the original by value; they hold `now` now."""
    found = _holders(original, step.target, inside=True)
    for module, name in found:
        setattr(module, name, now)
    return found


def _holders(original: Any, target: str, *, inside: bool) -> tuple[tuple[ModuleType, str], ...]:
    """The names in modules, inside the target's top package or outside, that hold an object by value."""
    top = target.partition(".")[0]
    return tuple(
        (module, name)
        for module_name, module in list(sys.modules.items())
        if original is not None and (module_name.partition(".")[0] == top) is inside
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is original
    )


def _described(thing: Any) -> str:
    if thing is _ABSENT:
        return "gone"
    function = inspect.unwrap(thing) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    where = f" of {code.co_filename}" if code else ""
    return f"{getattr(function, '__qualname__', repr(function))}{where}"
