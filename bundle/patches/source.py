"""A megatron tree as text: its modules are parsed on demand, and nothing is imported."""

import ast
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bundle import files

_MAX_MODULE_BYTES = 1 << 20  # bytes of one module; the largest of megatron-core is 160 kB
# Limits of one tree: decisions about 0.19 read 38 modules of 1.7 MB; a MiB takes 3 s at worst.
_MAX_MODULES = 256
_MAX_TREE_BYTES = 3 << 20


class UnreadableSource(Exception):
    """A source file that cannot be parsed here; the message says which and why."""


class Module(NamedTuple):
    """One parsed module: its name, its file relative to the tree, its body and what each name is bound to."""

    name: str
    file: str
    package: str  # the package from which a relative import starts
    bindings: dict[str, list[ast.stmt]]
    star_imports: tuple[str, ...]  # modules that are imported by `import *`


@dataclass(frozen=True)
class SourceTree:
    """The directory that holds `megatron`, and its modules that were asked for."""

    root: Path
    _modules: dict[str, Module | None] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # of the files that were parsed, in bytes

    def find_module(self, name: str) -> Module | None:
        """Return the parsed module by its dotted name; None where the tree has no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse_file(name)
        return self._modules[name]

    def list_requested_modules(self) -> tuple[str, ...]:
        """Return the names of the modules that were asked for, including those that do not exist."""
        return tuple(sorted(self._modules))

    def _parse_file(self, name: str) -> Module | None:
        file = find_module_file(self.root, name)
        if file is None:
            return None
        source = files.read_bytes_or_none(self.root / file, _MAX_MODULE_BYTES)
        if source is None:
            raise UnreadableSource(
                f"{file} is not a readable regular file below {_MAX_MODULE_BYTES >> 20} MiB"
            )
        self._sizes[name] = len(source)
        if len(self._sizes) > _MAX_MODULES or sum(self._sizes.values()) > _MAX_TREE_BYTES:
            limits = f"{_MAX_MODULES} modules or {_MAX_TREE_BYTES >> 20} MiB"
            raise UnreadableSource(
                f"{file} is not read: the search for definitions exceeds its limit of {limits}"
            )
        return parse_module(name, file, source)


def parse_module(name: str, file: str, source: bytes) -> Module:
    """Return the module that a file's bytes make. Raises UnreadableSource."""
    try:
        with warnings.catch_warnings(action="ignore"):  # their invalid escapes are not our user's business
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableSource(f"{file} cannot be parsed: {type(error).__name__}: {error}") from None
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    imports = [node for node in iter_statements(tree.body) if isinstance(node, ast.ImportFrom)]
    stars = [resolve_import(node, package) for node in imports if node.names[0].name == "*"]
    return Module(name, file, package, collect_bindings(tree.body), tuple(stars))


def find_module_file(root: Path, name: str) -> str | None:
    """Return the module's file relative to its tree, a package before a module of the same name."""
    stem = name.replace(".", "/")
    for file in (f"{stem}/__init__.py", f"{stem}.py"):
        if files.is_file(root / file):
            return file
    return None


def compute_module_digest(root: Path, name: str) -> str:
    """Return 16 hexadecimal digits over the bytes of a module's file; "" where no file can be read."""
    file = find_module_file(root, name)
    data = files.read_bytes_or_none(root / file, _MAX_MODULE_BYTES) if file else None
    return "" if data is None else hashlib.sha256(data).hexdigest()[:16]


def resolve_import(node: ast.ImportFrom, package: str) -> str:
    """Return the dotted name of the module that a `from ... import` statement of `package` reads."""
    base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def iter_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run in this scope, in order, with those under if, try, with and loops."""
    stack = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If | ast.Try | ast.TryStar | ast.With | ast.For | ast.While):
            inner = [*node.body]
            if not isinstance(node, ast.With):
                inner += node.orelse
            if isinstance(node, ast.Try | ast.TryStar):
                inner += [statement for handler in node.handlers for statement in handler.body]
                inner += node.finalbody
            stack += reversed(inner)


def collect_bindings(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the statements that bind each name of a scope, each narrowed to its name.

    They are definitions, imports and assignments.
    """
    bound_statements: dict[str, list[ast.stmt]] = {}
    for node in iter_statements(body):
        for name, statement in iter_narrowed_bindings(node):
            bound_statements.setdefault(name, []).append(statement)
    return bound_statements


def _unpack_assignment(
    target: ast.Tuple | ast.List, value: ast.expr
) -> Iterator[tuple[ast.Name, ast.expr | None]]:
    """Yield the names in `a, b = x, y`, each with its own value; None where the values cannot be matched."""
    values: list[ast.expr | None] = [None] * len(target.elts)
    if (
        isinstance(value, ast.Tuple | ast.List)
        and len(value.elts) == len(values)
        and not any(isinstance(element, ast.Starred) for element in (*target.elts, *value.elts))
    ):
        values = list(value.elts)
    for name, bound_value in zip(target.elts, values, strict=True):
        if isinstance(name, ast.Name):
            yield name, bound_value


def iter_narrowed_bindings(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that one statement binds in its own scope, each with the statement narrowed to it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, ast.ImportFrom(node.module, [alias], node.level)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], ast.Import([alias])
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node
            elif isinstance(target, ast.Tuple | ast.List):
                for name, value in _unpack_assignment(target, node.value):
                    yield name.id, ast.Assign([name], value) if value else node
