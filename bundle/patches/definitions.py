"""Definitions by name in a source tree, as Python finds them: inherited, re-exported, under if and try."""

import ast
import difflib
from collections.abc import Iterator
from dataclasses import field

from bundle.frozen import frozen
from bundle.patches.fingerprint import fingerprint, signature
from bundle.patches.pattern import found
from bundle.patches.source import Module, SourceTree, absolute, bindings

_HOPS = 32  # re-exports and base classes followed for one name; a hostile tree may go in circles


@frozen
class Definition:
    """What a target's name is bound to: every alternative of it, in the order of the source."""

    module: str  # where it is defined, which is not the target's module when that re-exports it
    file: str  # of that module, relative to the tree
    nodes: tuple[ast.stmt, ...]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the code."""
        return fingerprint(self.nodes)

    @property
    def signature(self) -> str:
        """The fingerprint of how it is called."""
        return signature(self.nodes)

    @property
    def is_code(self) -> bool:
        """Whether it is a function or a class, and not a variable."""
        return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for n in self.nodes)

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the parameters of the function, of all its alternatives."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                found |= {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        return frozenset(found)

    @property
    def names(self) -> frozenset[str]:
        """Every identifier that the code mentions: names, attributes, and keywords of its calls."""
        found = set()
        for node in self.walk():
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
        return frozenset(found)

    def calls(self, name: str) -> tuple[ast.Call, ...]:
        """The calls of a function of that name, or of a method of that name of anything."""
        return tuple(
            node
            for node in self.walk()
            if isinstance(node, ast.Call)
            and name
            == (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None))
        )

    def has(self, code: str) -> bool:
        """Whether this expression or statement occurs, however laid out; patterns as in `pattern`."""
        return bool(found(code, self.walk()))

    def walk(self) -> Iterator[ast.AST]:
        """Every node of the code."""
        for node in self.nodes:
            yield from ast.walk(node)


@frozen
class Definitions:
    """The definitions of one source tree."""

    tree: SourceTree
    _found: dict[str, Definition | None] = field(default_factory=dict)

    def __getitem__(self, target: str) -> Definition | None:
        """What "package.module:Qualified.name" is bound to; None where the tree has no such name.

        Raises source.Unreadable where the file that should tell cannot be parsed.
        """
        if target not in self._found:
            module, _, name = target.partition(":")
            self._found[target] = self._attribute(module, name.split("."), _HOPS)
        return self._found[target]

    def bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """The statements that bind a module-level name in its own module, imports not followed."""
        module_name, _, name = target.partition(":")
        module = self.tree.module(module_name)
        return tuple(module.bindings.get(name, ())) if module else ()

    def nearest(self, target: str) -> tuple[str, ...]:
        """Targets of the same module or class whose names are the most like the missing one."""
        module_name, _, qualified = target.partition(":")
        module = self.tree.module(module_name)
        if module is None:
            return ()
        owner, _, name = qualified.rpartition(".")
        found = self._attribute(module_name, owner.split("."), _HOPS) if owner else None
        classes = [node for node in found.nodes if isinstance(node, ast.ClassDef)] if found else []
        if owner and not classes:
            owner, name = "", owner.partition(".")[0]  # the class itself is gone
        scope = [known for node in classes for known in bindings(node.body)] if owner else module.bindings
        close = difflib.get_close_matches(name, scope, n=3, cutoff=0.5)
        return tuple(
            f"{module_name}:{owner}.{match}" if owner else f"{module_name}:{match}" for match in close
        )

    def _attribute(self, module_name: str, path: list[str], hops: int) -> Definition | None:
        module = self.tree.module(module_name)
        if module is None or hops == 0:
            return None
        found = self._global(module, path[0], hops)
        for depth, name in enumerate(path[1:], start=1):
            if found is None:
                return None
            found = self._member(found, name, hops - depth)
        return found

    def _global(self, module: Module, name: str, hops: int) -> Definition | None:
        nodes = module.bindings.get(name)
        if nodes is None:
            for star in module.stars:
                found = self._attribute(star, [name], hops - 1)
                if found is not None:
                    return found
            return None
        if len(nodes) == 1 and isinstance(
            nodes[0], ast.ImportFrom
        ):  # a re-export; with a fallback, a variable
            source, original = absolute(nodes[0], module.package), nodes[0].names[0].name
            found = self._attribute(source, [original], hops - 1)
            if found is not None:
                return found
        return Definition(module.name, module.file, tuple(nodes))

    def _member(self, owner: Definition, name: str, hops: int) -> Definition | None:
        classes = [node for node in owner.nodes if isinstance(node, ast.ClassDef)]
        nodes = [node for cls in classes for node in bindings(cls.body).get(name, ())]
        if nodes:
            return Definition(owner.module, owner.file, tuple(nodes))
        for base in (base for cls in classes for base in cls.bases):
            found = self._base(owner.module, base, hops - 1)
            found = self._member(found, name, hops - 1) if found is not None and hops > 0 else None
            if found is not None:
                return found
        return None

    def _base(self, module: str, base: ast.expr, hops: int) -> Definition | None:
        """The class that an expression in a class statement names: `Base`, `Base[T]` or `module.Base`."""
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Name):
            return self._attribute(module, [base.id], hops)
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            parsed = self.tree.module(module)
            for node in parsed.bindings.get(base.value.id, ()) if parsed else ():
                if isinstance(node, ast.ImportFrom) and parsed:
                    source = f"{absolute(node, parsed.package)}.{node.names[0].name}"
                    return self._attribute(source, [base.attr], hops)
        return None


@frozen
class Evidence:
    """The definitions that a patch declares as its evidence, and no others.

    What a patch reads must be declared, or nobody would notice when it changes.
    """

    definitions: Definitions
    declared: frozenset[str]

    def __getitem__(self, target: str) -> Definition | None:
        """The definition of a declared target; None where the tree has no such name."""
        return self.definitions[self._checked(target)]

    def bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """The statements that bind a declared name in its own module, imports not followed."""
        return self.definitions.bindings(self._checked(target))

    def _checked(self, target: str) -> str:
        if target not in self.declared:
            raise KeyError(f"{target} is not declared as evidence")
        return target
