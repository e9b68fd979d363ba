"""One definition in a source tree: its code, and what predicates ask about it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from bundle.patches.fingerprint import fingerprint, signature
from bundle.patches.pattern import found


@dataclass(frozen=True)
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

    def assigned(self, name: str) -> frozenset[str]:
        """What is assigned to a name or an attribute ("self.x"), alone or in a tuple, as Python writes it."""
        return frozenset(
            ast.unparse(node.value)
            for node in self.walk()
            if isinstance(node, ast.Assign)
            for target in node.targets
            for one in (target.elts if isinstance(target, ast.Tuple) else [target])
            if ast.unparse(one) == name
        )

    def has(self, code: str) -> bool:
        """Whether this expression or statement occurs, however laid out; patterns as in `pattern`."""
        return bool(found(code, self.walk()))

    def walk(self) -> Iterator[ast.AST]:
        """Every node of the code."""
        for node in self.nodes:
            yield from ast.walk(node)
