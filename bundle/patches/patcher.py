"""Apply a plan to this process, lazily, and take it back exactly.

This module is the only one of its room that touches imported code. It imports a wrapper, by name, once the
wrapper's target exists.
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
from bundle.patches.plan import PatchPlan, PatchStep


class PostImportFinder(MetaPathFinder):
    """The first finder of all: it lets the others find, and calls back once the module has run.

    An exception of the callback fails the import, and the next one too: nobody gets a module that should be
    patched and is not. A search for the module, or a failed import, does not use the callback up.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[[ModuleType], None]] = {}

    def add_callback(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call back when the module is imported, until the callback has returned once."""
        self._callbacks[name] = callback
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def clear_callbacks(self) -> None:
        """Drop the callbacks that have not been called yet."""
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def list_pending_modules(self) -> tuple[str, ...]:
        """Return the modules that have not been imported yet."""
        return tuple(self._callbacks)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module; its loader calls back."""
        if name not in self._callbacks:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _CallbackLoader(spec.loader, self)
                return spec
        return None

    def run_callback(self, module: ModuleType) -> None:
        """Run the callback for a module that has run."""
        name = module.__name__
        if name in self._callbacks:
            self._callbacks[name](module)
            self._callbacks.pop(name, None)


class _CallbackLoader(Loader):
    """The loader that the other finders found. It calls back after the loader has run the module."""

    def __init__(self, loader: Any, hook: PostImportFinder) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the loader creates."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Run the module under its own loader, so that it cannot tell the difference."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook.run_callback(module)


_ABSENT = object()  # a name that only a branch not taken would have bound


@dataclass(frozen=True, eq=False)
class _ReplacedAttribute:
    """One replaced attribute: its place, the original as a raw descriptor, and the replacement."""

    step: PatchStep
    owner: Any
    name: str
    raw_original: Any
    replacement: Any
    references: tuple[tuple[ModuleType, str], ...]  # names that held the original by value


class _PatchState:
    """The patches of this process: the plan, the replaced attributes, and the finder for later imports."""

    def __init__(self) -> None:
        self.plan: PatchPlan | None = None
        self.replaced: list[_ReplacedAttribute] = []
        self.hook = PostImportFinder()


_state = _PatchState()


def apply(plan: PatchPlan) -> None:
    """Patch the imported modules at once and others on import. A second call with the plan does nothing.

    Raises PatchError, with nothing changed, where a module or its code is not what was planned, and where
    another plan is in force. A module that is imported later fails to import instead.
    """
    if _state.plan is not None:
        if _state.plan != plan:
            raise PatchError("Another plan of patches is active in this process. Revert it first")
        return
    by_module: dict[str, list[PatchStep]] = {}
    for step in plan.steps:
        by_module.setdefault(step.target.partition(":")[0], []).append(step)
    try:
        for name, steps in by_module.items():
            if name in sys.modules:
                _apply_to(sys.modules[name], steps)
            else:
                _state.hook.add_callback(name, lambda module, steps=steps: _apply_to(module, steps))  # type: ignore[misc]
    except BaseException:
        _undo_all()
        raise
    _state.plan = plan


def revert() -> None:
    """Put back every original descriptor. Objects that were built meanwhile keep what they have.

    Raises PatchError, with nothing changed, where somebody has replaced one of our replacements since.
    """
    foreign_patches = [
        f"in `{getattr(owner, '__name__', owner)}`, `{attribute.step.target}` is now"
        f" {_describe(_get_raw_attribute(owner, name))}"
        for attribute in _list_outermost()
        for owner, name in ((attribute.owner, attribute.name), *attribute.references)
        if _get_raw_attribute(owner, name) is not attribute.replacement
    ]
    if foreign_patches:
        raise PatchError(
            "Patches cannot be reverted, because other code has replaced their targets. Undo its replacements"
            " first, or start a new process:",
            foreign_patches,
        )
    _undo_all()


def get_active_plan() -> PatchPlan | None:
    """Return the plan that is applied to this process."""
    return _state.plan


def list_applied_targets() -> tuple[str, ...]:
    """Return the targets that are patched now, in the order of patching."""
    return tuple(attribute.step.target for attribute in _state.replaced)


def list_pending_modules() -> tuple[str, ...]:
    """Return the modules that will be patched when they are imported."""
    return _state.hook.list_pending_modules()


def describe_unpatchable_references(plan: PatchPlan) -> list[str]:
    """Return the planned functions that other packages hold by value already: no patch reaches them."""
    early_imports = []
    for step in plan.steps:
        module, _, name = step.target.partition(":")
        original = getattr(sys.modules.get(module), name, None) if step.everywhere else None
        early_imports += [  # one module may go by two names, as __main__ does
            f"{step.patch}: {holder.__name__} has imported {step.target}"
            for holder, _ in _find_references(original, module, inside=False)
        ]
    return list(dict.fromkeys(early_imports))


def _list_outermost() -> list[_ReplacedAttribute]:
    """Return our outermost replacement of each attribute."""
    return list({(id(attribute.owner), attribute.name): attribute for attribute in _state.replaced}.values())


def _undo_all() -> None:
    _undo(list(_state.replaced))
    _state.hook.clear_callbacks()
    _state.plan = None


def _undo(replaced: list[_ReplacedAttribute]) -> None:
    """Take these replacements back, the latest first."""
    for attribute in reversed(replaced):
        original = _unwrap_method(attribute.raw_original) if attribute.raw_original is not _ABSENT else None
        for module, name in attribute.references:
            setattr(module, name, original)
        if attribute.raw_original is _ABSENT:
            delattr(attribute.owner, attribute.name)
        else:
            setattr(attribute.owner, attribute.name, attribute.raw_original)
        _state.replaced.remove(attribute)


def _apply_to(module: ModuleType, steps: list[PatchStep]) -> None:
    """Apply all of the steps, or none. A wrapper's import may import other modules, which stay patched."""
    replaced: list[_ReplacedAttribute] = []
    try:
        for step in steps:
            replaced.append(_replace_attribute(module, step))
            _state.replaced.append(replaced[-1])
    except BaseException:
        _undo(replaced)
        raise


def _replace_attribute(module: ModuleType, step: PatchStep) -> _ReplacedAttribute:
    owner, name = _find_owner(module, step)
    _check_file(module, step)
    raw_original = _get_raw_attribute(owner, name)
    original = getattr(owner, name, None)
    if inspect.isfunction(original) or inspect.ismethod(original):
        _check_planned_code_file(module, original, step)
    inherited = raw_original is _ABSENT and original is not None
    wrapped = _load_wrapper(step)(_unwrap_method(original) if inherited else _unwrap_method(raw_original))
    replacement = (
        type(raw_original)(wrapped) if isinstance(raw_original, staticmethod | classmethod) else wrapped
    )
    setattr(owner, name, replacement)
    references = _rebind_package_references(original, replacement, step) if step.everywhere else ()
    return _ReplacedAttribute(step, owner, name, raw_original, replacement, references)


def _find_owner(module: ModuleType, step: PatchStep) -> tuple[Any, str]:
    *path, name = step.target.partition(":")[2].split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
        if owner is None:
            raise PatchError(f"{step.patch}: {step.target} was planned, but {part} is missing")
    return owner, name


def _get_raw_attribute(owner: Any, name: str) -> Any:
    """Return the owner's own attribute, unbound; _ABSENT where it is inherited or does not exist."""
    return vars(owner).get(name, _ABSENT)


def _unwrap_method(raw: Any) -> Any:
    """Return the function in a static or class method, for a wrapper; None for _ABSENT."""
    if raw is _ABSENT:
        return None
    if isinstance(raw, property):
        raise PatchError("a property cannot be wrapped")
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _load_wrapper(step: PatchStep) -> Any:
    module, _, name = step.wrapper.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_file(module: ModuleType, step: PatchStep) -> None:
    """Raise PatchError where the module's file is not the planned one, byte for byte.

    Another tree may be first on this rank's path.
    """
    file = Path(module.__file__ or "")
    if not file.as_posix().endswith(f"/{step.file}"):
        raise PatchError(f"{step.patch}: {module.__name__} comes from {file}, not from a {step.file}")
    root = file.parents[step.file.count("/")]
    if source.compute_module_digest(root, module.__name__) != step.file_digest:
        raise PatchError(f"{step.patch}: {file} differs from the file that the patches were planned for")


def _check_planned_code_file(module: ModuleType, original: Any, step: PatchStep) -> None:
    """Raise PatchError where the code below all wrappers is not upstream's own."""
    code = getattr(inspect.unwrap(original), "__code__", None)
    file = Path(code.co_filename) if code else Path()
    root = Path(module.__file__ or "").parents[step.file.count("/")]
    if file != root / step.code_file:
        raise PatchError(
            f"{step.patch}: {step.target} is {_describe(original)}, not the planned code in"
            f" {step.code_file}. Another patcher has replaced it"
        )


def _rebind_package_references(
    original: Any, replacement: Any, step: PatchStep
) -> tuple[tuple[ModuleType, str], ...]:
    """Bind `replacement` to the names in the top package that held the original by value; return them."""
    references = _find_references(original, step.target, inside=True)
    for module, name in references:
        setattr(module, name, replacement)
    return references


def _find_references(original: Any, target: str, *, inside: bool) -> tuple[tuple[ModuleType, str], ...]:
    """Return the names in modules that hold an object by value.

    Searches the modules inside the target's top package, or those outside.
    """
    top = target.partition(".")[0]
    return tuple(
        (module, name)
        for module_name, module in list(sys.modules.items())
        if original is not None and (module_name.partition(".")[0] == top) is inside
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is original
    )


def _describe(value: Any) -> str:
    if value is _ABSENT:
        return "gone"
    function = inspect.unwrap(value) if callable(value) else value
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"the function `{name}` of the file `{code.co_filename}`" if code else f"`{name}`"
