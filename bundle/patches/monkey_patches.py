"""What a framework puts in the place of megatron-core's own functions, read in the framework's source.

A statement like `MLASelfAttention.forward = forward` is a monkey patch; the names on both sides are followed
through the imports of its file. Nothing is imported and no version is asked. What cannot be followed is left
out: an object whose class nobody can tell, a name that is put together while the program runs.
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
from bundle.patches.source import SourceTree, Unreadable, absolute, bound

_MOST_FILES, _MOST_BYTES = 20_000, 128 << 20  # of one framework; the largest read was 2,000 files of 25 MB
_LIMIT = 1 << 20  # of one file
_HOPS = 4  # functions that call one another, from an import to a monkey patch
_HARMLESS = re.compile(r"isinstance\(|hasattr\(|is not None$|^TYPE_CHECKING$|^not getattr\(")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class MonkeyPatch:
    """One replacement of a name of megatron-core by a framework."""

    framework: str
    module: str  # of megatron-core, where the name is bound
    name: str  # there: "f" or "Class.f"
    place: str  # "verl/models/mcore/patch.py:332"
    code: Function | None  # what takes the place; None where that cannot be told
    wraps: bool  # it calls what was there
    conditions: tuple[str, ...] = ()  # under which it is put there, as they are written
    called: tuple[str, ...] = ()  # where the function is called that puts it there; () for on import

    @property
    def target(self) -> str:
        """The replaced name, as the catalogue writes targets."""
        return f"{self.module}:{self.name}"

    @property
    def when(self) -> str:
        """When it is in place: "on import", or by which calls and conditions."""
        where = [f"where {', '.join(self.called[:3])} calls it"] if self.called else []
        conditions = [f"if {' and '.join(self.conditions)}"] if self.conditions else []
        return ", ".join(where + conditions) or "on import"


@dataclass
class _Scope:
    """One function, or a module: what its names are bound to."""

    node: ast.Module | Function
    parent: "_Scope | None"
    conditions: tuple[str, ...]  # under which it is defined
    names: dict[str, list[ast.stmt]] = field(default_factory=dict)

    def chain(self) -> Iterator["_Scope"]:
        """This one and those around it, the innermost first."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def statements(self, name: str) -> list[ast.stmt]:
        """What binds a name here, or in the nearest scope around that binds it."""
        return next((scope.names[name] for scope in self.chain() if name in scope.names), [])


@dataclass(frozen=True)
class _Statement:
    """A statement, its scope, and the conditions under which it runs there."""

    node: ast.stmt
    scope: _Scope
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class _Text:
    """A file of a framework that speaks of megatron, or calls what does."""

    module: str
    package: str  # what a relative import starts from
    place: str  # relative to what holds the package
    text: str

    @cached_property
    def statements(self) -> list[_Statement]:
        """Every statement of the file; none where it cannot be parsed."""
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        found: list[_Statement] = []
        waiting: list[tuple[list[ast.stmt], _Scope, tuple[str, ...]]] = [
            (tree.body, _Scope(tree, None, ()), ())
        ]
        while waiting:
            body, scope, conditions = waiting.pop()
            for node in body:
                found.append(_Statement(node, scope, conditions))
                for name, binding in bound(node):
                    scope.names.setdefault(name, []).append(binding)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    waiting.append((node.body, _Scope(node, scope, conditions), ()))
                elif isinstance(node, ast.If):
                    test = ast.unparse(node.test)
                    kept = () if _HARMLESS.search(test) else (test,)
                    waiting.append((node.body, scope, (*conditions, *kept)))
                    waiting.append((node.orelse, scope, (*conditions, *(f"not ({t})" for t in kept))))
                else:
                    inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
                    inner += [handler.body for handler in getattr(node, "handlers", [])]
                    waiting += [(part, scope, conditions) for part in inner if part]
        return found


def found(package: Package, megatron: Definitions, targets: Iterable[str]) -> tuple[MonkeyPatch, ...]:
    """The monkey patches of one package of a framework on these targets, wherever megatron defines them."""
    texts, wanted = _texts(package), {pair for target in targets for pair in _places(target, megatron)}
    attribute = "|".join(sorted({re.escape(name) for _, name in wanted}))
    set_by = re.compile(
        rf"^[ \t]*(?!self\.)[A-Za-z_][\w.]*\.({attribute})[ \t]*=[^=]|setattr\([^\n]*['\"]({attribute})['\"]",
        re.M,
    )
    patches = [
        patch
        for text in texts
        if "megatron" in text.text and set_by.search(text.text)
        for patch in _of_text(text, package, megatron, wanted, texts)
    ]
    return tuple(sorted(patches, key=lambda patch: (patch.target, patch.place)))


def _places(target: str, megatron: Definitions) -> Iterator[tuple[str, str]]:
    """(module, last part of the name) of a target, and of where it is defined."""
    module, _, name = target.partition(":")
    yield module, name.rpartition(".")[2]
    with suppress(Unreadable):
        defined = megatron[target]
        if defined is not None:
            yield defined.module, name.rpartition(".")[2]


def _texts(package: Package) -> list[_Text]:
    """The Python files of a package."""
    assert package.path is not None
    top = _root(package.path)
    found, size = [], 0
    for number, file in enumerate(sorted(package.path.rglob("*.py"))):
        data = files.read(file, _LIMIT) or ""
        size += len(data)
        if number >= _MOST_FILES or size >= _MOST_BYTES:
            break
        relative = file.relative_to(top)
        parts = relative.with_suffix("").parts
        package_name = ".".join(parts[:-1])
        module = package_name if parts[-1] == "__init__" else ".".join(parts)
        found.append(_Text(module, package_name, files.printable(relative.as_posix()), data))
    return found


def _root(package: Path) -> Path:
    """The directory that its modules are named from: megatron.bridge lies one deeper than others."""
    return package.parents[1] if package.parent.name == "megatron" else package.parent


def _of_text(
    text: _Text,
    package: Package,
    megatron: Definitions,
    wanted: Collection[tuple[str, str]],
    texts: list[_Text],
) -> Iterator[MonkeyPatch]:
    """The monkey patches of one file."""
    for statement in text.statements:
        for base, name, value in _set(statement.node):
            function = _bound(value, base)
            if function is None:
                target = _target(base, name, statement.scope, text, megatron)
            else:
                target = _of_an_object(name, statement, text, megatron)
            if target is None or (target[0], name) not in wanted:
                continue
            code = _code(function or value, statement.scope, text, package)
            conditions, called = _way(statement, text, texts)
            if function is not None:
                conditions = (*conditions, f"this {target[1].partition('.')[0]} is given to it")
            yield MonkeyPatch(
                package.name,
                *target,
                f"{text.place}:{statement.node.lineno}",
                code,
                code is not None and _wraps(code, name, statement.scope),
                conditions,
                called,
            )


def _set(node: ast.stmt) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """(object, attribute, value) of what a statement sets: `a.b = c` or `setattr(a, "b", c)`."""
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


def _dotted(value: ast.expr, scope: _Scope, text: _Text, hops: int = 8) -> str | None:
    """The dotted name of what an expression is, by the imports of its file; None where they do not tell."""
    if hops == 0:
        return None
    if isinstance(value, ast.Attribute):
        base = _dotted(value.value, scope, text, hops - 1)
        return f"{base}.{value.attr}" if base else None
    if isinstance(value, ast.Call | ast.Subscript):  # importlib.import_module("..."), sys.modules["..."]
        argument = value.args[0] if isinstance(value, ast.Call) and value.args else None
        said = value.slice if isinstance(value, ast.Subscript) else argument
        asked = ast.unparse(value).partition("(")[0].partition("[")[0]
        known = asked in ("importlib.import_module", "import_module", "sys.modules", "sys.modules.get")
        return str(said.value) if known and isinstance(said, ast.Constant) else None
    if not isinstance(value, ast.Name):
        return None
    for node in reversed(scope.statements(value.id)):
        if isinstance(node, ast.ImportFrom):
            return f"{absolute(node, text.package)}.{node.names[0].name}"
        if isinstance(node, ast.Import):
            return node.names[0].name if node.names[0].asname else value.id
        if isinstance(node, ast.Assign):
            return _dotted(node.value, scope, text, hops - 1)
    return None


def _target(
    base: ast.expr, name: str, scope: _Scope, text: _Text, megatron: Definitions
) -> tuple[str, str] | None:
    """(module, name in it) of an attribute that is set, where the object is megatron-core's; else None."""
    dotted = _dotted(base, scope, text)
    if dotted is None or not dotted.startswith("megatron.core."):
        return None
    try:
        if megatron.tree.module(dotted) is not None:
            return dotted, name
        module, _, owner = dotted.rpartition(".")
        defined = megatron[f"{module}:{owner}"] if megatron.tree.module(module) else None
    except Unreadable:
        return None
    classes = [node for node in defined.nodes if isinstance(node, ast.ClassDef)] if defined else []
    return (defined.module, f"{classes[0].name}.{name}") if defined and classes else None


def _bound(value: ast.expr, owner: ast.expr) -> ast.expr | None:
    """The function in a method of one object, `f.__get__(owner)` or `MethodType(f, owner)`; else None."""
    if not isinstance(value, ast.Call):
        return None
    if isinstance(value.func, ast.Attribute) and value.func.attr == "__get__":
        function, given = value.func.value, value.args[:1]
    elif ast.unparse(value.func).rpartition(".")[2] == "MethodType" and len(value.args) == 2:
        function, given = value.args[0], value.args[1:]
    else:
        return None
    return function if [ast.unparse(arg) for arg in given] == [ast.unparse(owner)] else None


def _of_an_object(
    name: str, statement: _Statement, text: _Text, megatron: Definitions
) -> tuple[str, str] | None:
    """(module, name in it) of an object's method, by the class that it is asked to be of; None for none.

    Who says `isinstance(model, GPTModel)`, or calls a function of the file that does, has one in hand.
    """
    function = _around(statement)[1]
    if function is None:
        return None
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    near = {function.name, *(call.id for call in calls if isinstance(call, ast.Name))}
    asked = [
        (call.args[1], other.scope)
        for other in text.statements
        if isinstance(other.node, ast.If) and getattr(_around(other)[1], "name", None) in near
        for call in ast.walk(other.node.test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance" and len(call.args) == 2
    ]
    targets = {_target(owner, name, scope, text, megatron) for owner, scope in asked}
    having = [target for target in targets if target and megatron[":".join(target)] is not None]
    return having[0] if len(having) == 1 else None


def _code(value: ast.expr, scope: _Scope, text: _Text, package: Package) -> Function | None:
    """The function or class that a value is, in this file or in another of the package."""
    if isinstance(value, ast.Call) and len(value.args) == 1 and ast.unparse(value.func) == "staticmethod":
        value = value.args[0]
    if isinstance(value, ast.Name):
        for node in reversed(scope.statements(value.id)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return node
    dotted = _dotted(value, scope, text) if isinstance(value, ast.Name | ast.Attribute) else None
    if dotted is None or package.path is None:
        return None
    module, _, name = dotted.rpartition(".")
    try:
        defined = Definitions(SourceTree(_root(package.path)))[f"{module}:{name}"]
    except Unreadable:
        return None
    codes = [node for node in defined.nodes if isinstance(node, Function)] if defined else []
    return codes[-1] if codes else None


def _wraps(code: Function, name: str, scope: _Scope) -> bool:
    """Whether the code mentions what was saved of the attribute before, in this scope or one around it."""
    saved: set[str] = set()
    for around in scope.chain():
        for node in ast.walk(around.node) if not isinstance(around.node, ast.Module) else around.node.body:
            if isinstance(node, ast.Assign) and _reads(node.value, name):
                saved |= {t.id if isinstance(t, ast.Name) else getattr(t, "attr", "") for t in node.targets}
    mentioned = {n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(code)}
    return bool((saved - {"", name}) & mentioned)


def _reads(value: ast.expr, name: str) -> bool:
    """Whether a value is `something.name`, or `getattr(something, "name", ...)`."""
    if isinstance(value, ast.Attribute):
        return value.attr == name
    asked = isinstance(value, ast.Call) and ast.unparse(value.func) == "getattr" and len(value.args) > 1
    return asked and isinstance(value.args[1], ast.Constant) and value.args[1].value == name  # type: ignore[attr-defined]


def _way(statement: _Statement, text: _Text, texts: list[_Text]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(conditions, places of the calls) on the way to a statement; no places where an import leads to it."""
    conditions, function = _around(statement)
    if function is None:
        return conditions, ()
    calls = _calls(function.name, text, texts)
    if not calls:
        said = [f"@{ast.unparse(decorator)}".partition(",")[0] for decorator in function.decorator_list]
        return (*conditions, f"{said[0]}...) says so" if said else f"{function.name}() is called"), ()
    called = tuple(f"{by.place}:{call.node.lineno}" for call, by in calls)
    for hop in range(_HOPS):
        ways = [(*_around(call), by) for call, by in calls]
        nearest, function, text = min(ways, key=lambda way: (len(way[0]), way[1] is not None))
        if hop == 0 or function is None:
            conditions = (*nearest, *conditions)
        if function is None:
            return tuple(dict.fromkeys(conditions)), ()
        calls = _calls(function.name, text, texts)
        if not calls:
            break
    return tuple(dict.fromkeys(conditions)), called


def _around(statement: _Statement) -> tuple[tuple[str, ...], Function | None]:
    """(conditions, the outermost function) around a statement; None at the top of its module."""
    conditions, function = statement.conditions, None
    for scope in statement.scope.chain():
        if not isinstance(scope.node, ast.Module):
            conditions, function = (*scope.conditions, *conditions), scope.node
    return conditions, function


def _calls(name: str, home: _Text, texts: list[_Text]) -> list[tuple[_Statement, _Text]]:
    """The statements that call the function of that name in that file, with their files."""
    return [
        (statement, text)
        for text in texts
        if f"{name}(" in text.text
        for statement in text.statements
        if isinstance(statement.node, ast.Expr | ast.Assign | ast.Return)
        and isinstance(statement.node.value, ast.Call)
        and _is(statement.node.value.func, name, statement.scope, text, home)
    ]


def _is(called: ast.expr, name: str, scope: _Scope, text: _Text, home: _Text) -> bool:
    """Whether what is called is the function of that name in the file `home`, as far as its name tells."""
    if ast.unparse(called).rpartition(".")[2] != name:
        return False
    if isinstance(called, ast.Name) and any(isinstance(n, Function) for n in scope.statements(name)):
        return text is home
    dotted = _dotted(called, scope, text)
    if dotted is None:  # a method of an object, where the function is a method
        return isinstance(called, ast.Attribute) and text is home
    # A package may hand it on: verl.models.mcore for verl.models.mcore.patch.
    return home.module.startswith(dotted.rpartition(".")[0])
