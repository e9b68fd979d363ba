"""Replacements of megatron-core's own functions by a framework, read in the framework's source.

A statement like `MLASelfAttention.forward = forward` is a monkey patch. The names on both sides are followed
through the imports of its file. Nothing is imported, and no version is asked. Names that cannot be followed
are left out: an object of unknown class, or a name that the program puts together while it runs.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bundle import files
from bundle.environment.packages import Package
from bundle.patches.definitions import Definitions
from bundle.patches.source import SourceTree, UnreadableSource, iter_narrowed_bindings, resolve_import

_MAX_FILES, _MAX_BYTES = 20_000, 128 << 20  # of one framework; the largest read was 2,000 files of 25 MB
_MAX_FILE_BYTES = 1 << 20  # of one file
_MAX_CALLER_HOPS = 4  # functions that call one another, from an import to a monkey patch
_UNRECORDED_CONDITION_PATTERN = re.compile(
    r"isinstance\(|hasattr\(|is not None$|^TYPE_CHECKING$|^not getattr\("
)
CodeNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class MonkeyPatch:
    """One replacement of a name of megatron-core by a framework."""

    framework: str
    module: str  # of megatron-core, where the name is bound
    name: str  # there: "f" or "Class.f"
    location: str  # "verl/models/mcore/patch.py:332"
    code: CodeNode | None  # the replacement; None where it is unknown
    wraps: bool  # it calls the original
    conditions: tuple[str, ...] = ()  # under which it is put there, as they are written
    call_sites: tuple[str, ...] = ()  # where the function is called that puts it there; () for on import

    @property
    def target(self) -> str:
        """The replaced name, as the catalogue writes targets."""
        return f"{self.module}:{self.name}"

    @property
    def when(self) -> str:
        """The words for when it is in place: "on import", or the calls and conditions that put it there."""
        where = [f"called at {', '.join(self.call_sites[:3])}"] if self.call_sites else []
        conditions = [f"if {' and '.join(self.conditions)}"] if self.conditions else []
        return ", ".join(where + conditions) or "on import"


@dataclass
class _Scope:
    """One function, class or module, and what its names are bound to."""

    node: ast.Module | CodeNode
    parent: "_Scope | None"
    conditions: tuple[str, ...]  # under which it is defined
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)

    def iter_enclosing(self) -> Iterator["_Scope"]:
        """Yield this scope and those around it, the innermost first."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find_nearest_bindings(self, name: str) -> list[ast.stmt]:
        """Return the statements that bind a name, here or in the nearest enclosing scope that binds it."""
        return next((scope.bindings[name] for scope in self.iter_enclosing() if name in scope.bindings), [])


@dataclass(frozen=True)
class _Statement:
    """A statement, its scope, and the conditions under which it runs there."""

    node: ast.stmt
    scope: _Scope
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class _SourceFile:
    """A file of a framework that mentions megatron, or calls code that does."""

    module: str
    package: str  # the package from which a relative import starts
    path: str  # relative to the directory that holds the package
    text: str

    @cached_property
    def statements(self) -> list[_Statement]:
        """Every statement of the file; none where the file cannot be parsed."""
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        collected: list[_Statement] = []
        waiting: list[tuple[list[ast.stmt], _Scope, tuple[str, ...]]] = [
            (tree.body, _Scope(tree, None, ()), ())
        ]
        while waiting:
            body, scope, conditions = waiting.pop()
            for node in body:
                collected.append(_Statement(node, scope, conditions))
                for name, binding in iter_narrowed_bindings(node):
                    scope.bindings.setdefault(name, []).append(binding)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    waiting.append((node.body, _Scope(node, scope, conditions), ()))
                elif isinstance(node, ast.If):
                    test = ast.unparse(node.test)
                    condition = () if _UNRECORDED_CONDITION_PATTERN.search(test) else (test,)
                    waiting.append((node.body, scope, (*conditions, *condition)))
                    waiting.append((node.orelse, scope, (*conditions, *(f"not ({t})" for t in condition))))
                else:
                    inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
                    inner += [handler.body for handler in getattr(node, "handlers", [])]
                    waiting += [(part, scope, conditions) for part in inner if part]
        return collected


def find_in_package(
    package: Package, megatron: Definitions, targets: Iterable[str]
) -> tuple[MonkeyPatch, ...]:
    """Return a framework package's monkey patches on these targets, wherever megatron defines them."""
    source_files, wanted_names = (
        _read_source_files(package),
        {pair for target in targets for pair in _iter_target_and_definition_names(target, megatron)},
    )
    attribute = "|".join(sorted({re.escape(name) for _, name in wanted_names}))
    assignment = re.compile(
        rf"^[ \t]*(?!self\.)[A-Za-z_][\w.]*\.({attribute})[ \t]*=[^=]|setattr\([^\n]*['\"]({attribute})['\"]",
        re.M,
    )
    patches = [
        patch
        for source_file in source_files
        if "megatron" in source_file.text and assignment.search(source_file.text)
        for patch in _iter_file_patches(source_file, package, megatron, wanted_names, source_files)
    ]
    return tuple(sorted(patches, key=lambda patch: (patch.target, patch.location)))


def _iter_target_and_definition_names(target: str, megatron: Definitions) -> Iterator[tuple[str, str]]:
    """Yield (module, last part of the name) of a target, and of the place where it is defined."""
    module, _, name = target.partition(":")
    yield module, name.rpartition(".")[2]
    with suppress(UnreadableSource):
        definition = megatron[target]
        if definition is not None:
            yield definition.module, name.rpartition(".")[2]


def _read_source_files(package: Package) -> list[_SourceFile]:
    """Return the Python files of a package."""
    assert package.path is not None
    top = _find_import_root(package.path)
    source_files, size = [], 0
    for number, file in enumerate(sorted(package.path.rglob("*.py"))):
        data = files.read_text_if_small(file, _MAX_FILE_BYTES) or ""
        size += len(data)
        if number >= _MAX_FILES or size >= _MAX_BYTES:
            break
        relative = file.relative_to(top)
        parts = relative.with_suffix("").parts
        package_name = ".".join(parts[:-1])
        module = package_name if parts[-1] == "__init__" else ".".join(parts)
        source_files.append(_SourceFile(module, package_name, files.to_printable(relative.as_posix()), data))
    return source_files


def _find_import_root(package: Path) -> Path:
    """Return the directory from which the package's modules are named.

    megatron.bridge lies one directory deeper than other packages.
    """
    return package.parents[1] if package.parent.name == "megatron" else package.parent


def _iter_file_patches(
    source_file: _SourceFile,
    package: Package,
    megatron: Definitions,
    wanted_names: Collection[tuple[str, str]],
    source_files: list[_SourceFile],
) -> Iterator[MonkeyPatch]:
    """Yield the monkey patches of one file."""
    for statement in source_file.statements:
        for base, name, value in _iter_assignments(statement.node):
            function = _extract_bound_function(value, base)
            if function is None:
                target = _resolve_target(base, name, statement.scope, source_file, megatron)
            else:
                target = _resolve_target_by_isinstance(name, statement, source_file, megatron)
            if target is None or (target[0], name) not in wanted_names:
                continue
            code = _find_code(function or value, statement.scope, source_file, package)
            conditions, call_sites = _find_conditions_and_call_sites(statement, source_file, source_files)
            if function is not None:
                conditions = (*conditions, f"this {target[1].partition('.')[0]} is passed to the call")
            yield MonkeyPatch(
                package.name,
                *target,
                f"{source_file.path}:{statement.node.lineno}",
                code,
                code is not None and _wraps(code, name, statement.scope),
                conditions,
                call_sites,
            )


def _iter_assignments(node: ast.stmt) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """Yield (object, attribute, value) that a statement sets: `a.b = c` or `setattr(a, "b", c)`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                yield target.value, target.attr, node.value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
            name = call.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield call.args[0], name.value, call.args[2]


def _resolve_dotted_name(
    value: ast.expr, scope: _Scope, source_file: _SourceFile, hops: int = 8
) -> str | None:
    """Return the dotted name of an expression, by the imports of its file; None where they do not tell."""
    if hops == 0:
        return None
    if isinstance(value, ast.Attribute):
        base = _resolve_dotted_name(value.value, scope, source_file, hops - 1)
        return f"{base}.{value.attr}" if base else None
    if isinstance(value, ast.Call | ast.Subscript):  # importlib.import_module("..."), sys.modules["..."]
        argument = value.args[0] if isinstance(value, ast.Call) and value.args else None
        key_node = value.slice if isinstance(value, ast.Subscript) else argument
        callee = ast.unparse(value).partition("(")[0].partition("[")[0]
        known = callee in ("importlib.import_module", "import_module", "sys.modules", "sys.modules.get")
        return str(key_node.value) if known and isinstance(key_node, ast.Constant) else None
    if not isinstance(value, ast.Name):
        return None
    for node in reversed(scope.find_nearest_bindings(value.id)):
        if isinstance(node, ast.ImportFrom):
            return f"{resolve_import(node, source_file.package)}.{node.names[0].name}"
        if isinstance(node, ast.Import):
            return node.names[0].name if node.names[0].asname else value.id
        if isinstance(node, ast.Assign):
            return _resolve_dotted_name(node.value, scope, source_file, hops - 1)
    return None


def _resolve_target(
    base: ast.expr, name: str, scope: _Scope, source_file: _SourceFile, megatron: Definitions
) -> tuple[str, str] | None:
    """Return (module, name in it) of an attribute of megatron-core that is set; None for other objects."""
    dotted = _resolve_dotted_name(base, scope, source_file)
    if dotted is None or not dotted.startswith("megatron.core."):
        return None
    try:
        if megatron.tree.find_module(dotted) is not None:
            return dotted, name
        module, _, owner = dotted.rpartition(".")
        definition = megatron[f"{module}:{owner}"] if megatron.tree.find_module(module) else None
    except UnreadableSource:
        return None
    classes = [node for node in definition.nodes if isinstance(node, ast.ClassDef)] if definition else []
    return (definition.module, f"{classes[0].name}.{name}") if definition and classes else None


def _extract_bound_function(value: ast.expr, owner: ast.expr) -> ast.expr | None:
    """Return the function in a method of one object; None where the value is not such a method.

    The method is `f.__get__(owner)` or `MethodType(f, owner)`.
    """
    if not isinstance(value, ast.Call):
        return None
    if isinstance(value.func, ast.Attribute) and value.func.attr == "__get__":
        function, bound_to = value.func.value, value.args[:1]
    elif ast.unparse(value.func).rpartition(".")[2] == "MethodType" and len(value.args) == 2:
        function, bound_to = value.args[0], value.args[1:]
    else:
        return None
    return function if [ast.unparse(arg) for arg in bound_to] == [ast.unparse(owner)] else None


def _resolve_target_by_isinstance(
    name: str, statement: _Statement, source_file: _SourceFile, megatron: Definitions
) -> tuple[str, str] | None:
    """Return (module, name in it) of an object's method, by the class that the code checks it for; else None.

    The check is an `isinstance(model, GPTModel)` in the function around the statement, or in a function of
    the file that it calls.
    """
    function = _find_outermost_function_and_conditions(statement)[1]
    if function is None:
        return None
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    function_names = {function.name, *(call.id for call in calls if isinstance(call, ast.Name))}
    checked_classes = [
        (call.args[1], other.scope)
        for other in source_file.statements
        if isinstance(other.node, ast.If)
        and getattr(_find_outermost_function_and_conditions(other)[1], "name", None) in function_names
        for call in ast.walk(other.node.test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance" and len(call.args) == 2
    ]
    targets = {_resolve_target(owner, name, scope, source_file, megatron) for owner, scope in checked_classes}
    candidates = [target for target in targets if target and megatron[":".join(target)] is not None]
    return candidates[0] if len(candidates) == 1 else None


def _find_code(value: ast.expr, scope: _Scope, source_file: _SourceFile, package: Package) -> CodeNode | None:
    """Return the function or class that a value names, in this file or in another of the package."""
    if isinstance(value, ast.Call) and len(value.args) == 1 and ast.unparse(value.func) == "staticmethod":
        value = value.args[0]
    if isinstance(value, ast.Name):
        for node in reversed(scope.find_nearest_bindings(value.id)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return node
    dotted = (
        _resolve_dotted_name(value, scope, source_file)
        if isinstance(value, ast.Name | ast.Attribute)
        else None
    )
    if dotted is None or package.path is None:
        return None
    module, _, name = dotted.rpartition(".")
    try:
        definition = Definitions(SourceTree(_find_import_root(package.path)))[f"{module}:{name}"]
    except UnreadableSource:
        return None
    codes = [node for node in definition.nodes if isinstance(node, CodeNode)] if definition else []
    return codes[-1] if codes else None


def _wraps(code: CodeNode, name: str, scope: _Scope) -> bool:
    """Return whether the code mentions the saved original of the attribute: then it wraps the original.

    The original may be saved in this scope or in one around it.
    """
    saved: set[str] = set()
    for enclosing in scope.iter_enclosing():
        for node in (
            ast.walk(enclosing.node) if not isinstance(enclosing.node, ast.Module) else enclosing.node.body
        ):
            if isinstance(node, ast.Assign) and _is_attribute_access(node.value, name):
                saved |= {t.id if isinstance(t, ast.Name) else getattr(t, "attr", "") for t in node.targets}
    mentioned = {n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(code)}
    return bool((saved - {"", name}) & mentioned)


def _is_attribute_access(value: ast.expr, name: str) -> bool:
    """Return whether a value is `something.name`, or `getattr(something, "name", ...)`."""
    if isinstance(value, ast.Attribute):
        return value.attr == name
    is_getattr = isinstance(value, ast.Call) and ast.unparse(value.func) == "getattr" and len(value.args) > 1
    return is_getattr and isinstance(value.args[1], ast.Constant) and value.args[1].value == name  # type: ignore[attr-defined]


def _find_conditions_and_call_sites(
    statement: _Statement, source_file: _SourceFile, source_files: list[_SourceFile]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (conditions, places of the calls) on the way to a statement; no places if an import runs it."""
    conditions, function = _find_outermost_function_and_conditions(statement)
    if function is None:
        return conditions, ()
    calls = _find_calls(function.name, source_file, source_files)
    if not calls:
        decorators = [f"@{ast.unparse(decorator)}".partition(",")[0] for decorator in function.decorator_list]
        return (
            *conditions,
            f"{decorators[0]}...) applies it" if decorators else f"{function.name}() is called",
        ), ()
    call_sites = tuple(f"{file.path}:{call.node.lineno}" for call, file in calls)
    for hop in range(_MAX_CALLER_HOPS):
        callers = [(*_find_outermost_function_and_conditions(call), file) for call, file in calls]
        nearest, function, source_file = min(callers, key=lambda way: (len(way[0]), way[1] is not None))
        if hop == 0 or function is None:
            conditions = (*nearest, *conditions)
        if function is None:
            return tuple(dict.fromkeys(conditions)), ()
        calls = _find_calls(function.name, source_file, source_files)
        if not calls:
            break
    return tuple(dict.fromkeys(conditions)), call_sites


def _find_outermost_function_and_conditions(statement: _Statement) -> tuple[tuple[str, ...], CodeNode | None]:
    """Return (conditions, the outermost function) around a statement; None at the top of its module."""
    conditions, function = statement.conditions, None
    for scope in statement.scope.iter_enclosing():
        if not isinstance(scope.node, ast.Module):
            conditions, function = (*scope.conditions, *conditions), scope.node
    return conditions, function


def _find_calls(
    name: str, definition_file: _SourceFile, source_files: list[_SourceFile]
) -> list[tuple[_Statement, _SourceFile]]:
    """Return the statements that call the function `name` of `definition_file`, with their files."""
    return [
        (statement, source_file)
        for source_file in source_files
        if f"{name}(" in source_file.text
        for statement in source_file.statements
        if isinstance(statement.node, ast.Expr | ast.Assign | ast.Return)
        and isinstance(statement.node.value, ast.Call)
        and _is_call_of(statement.node.value.func, name, statement.scope, source_file, definition_file)
    ]


def _is_call_of(
    called: ast.expr, name: str, scope: _Scope, source_file: _SourceFile, definition_file: _SourceFile
) -> bool:
    """Return whether the called expression names `name` of `definition_file`, as far as the names tell."""
    if ast.unparse(called).rpartition(".")[2] != name:
        return False
    if isinstance(called, ast.Name) and any(
        isinstance(n, CodeNode) for n in scope.find_nearest_bindings(name)
    ):
        return source_file is definition_file
    dotted = _resolve_dotted_name(called, scope, source_file)
    if dotted is None:  # a method of an object, where the function is a method
        return isinstance(called, ast.Attribute) and source_file is definition_file
    # A package may re-export it: verl.models.mcore for verl.models.mcore.patch.
    return definition_file.module.startswith(dotted.rpartition(".")[0])
