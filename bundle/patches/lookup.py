"""One name looked up in a source tree as Python would, each module and class once, whoever imports whom."""

import ast

from bundle.patches.definition import Definition
from bundle.patches.source import Module, SourceTree, absolute, bindings

_DEPTH = 64  # names that lead to one another; a hostile tree must not reach the end of our own stack


class Lookup:
    """Follows re-exports, `import *`, aliases and base classes from one name. Good for that name only.

    What is being looked up already leads nowhere: in a circle of imports Python finds nothing new either.
    """

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._globals: dict[tuple[str, str], Definition | None] = {}
        self._members: dict[tuple[int, str], Definition | None] = {}
        self._depth = 0

    def attribute(self, module_name: str, path: list[str]) -> Definition | None:
        """What a dotted name is bound to in a module; None where it has no such name."""
        module = self.tree.module(module_name)
        found = self._global(module, path[0]) if module else None
        for name in path[1:]:
            found = self._member(found, name) if found else None
        return found

    def bindings(self, module_name: str, name: str) -> tuple[ast.stmt, ...]:
        """The statements that bind a name, in the module or in one whose every name it imports."""
        waiting, seen = [module_name], set()
        while waiting:
            module = self.tree.module(waiting.pop())
            if module is None or module.name in seen:
                continue
            if name in module.bindings:
                return tuple(module.bindings[name])
            seen.add(module.name)
            waiting += reversed(module.stars)
        return ()

    def _global(self, module: Module, name: str) -> Definition | None:
        key = module.name, name
        if key not in self._globals:
            self._globals[key] = None
            if self._depth < _DEPTH:
                self._depth += 1
                self._globals[key] = self._bound(module, name)
                self._depth -= 1
        return self._globals[key]

    def _bound(self, module: Module, name: str) -> Definition | None:
        nodes = module.bindings.get(name)
        if nodes is None:
            stars = (self.attribute(star, [name]) for star in module.stars)
            return next((found for found in stars if found is not None), None)
        found = None
        if len(nodes) == 1:  # with a fallback it is a variable
            (node,) = nodes
            if isinstance(node, ast.ImportFrom):
                found = self.attribute(absolute(node, module.package), [node.names[0].name])
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                found = self._expression(module, node.value)
        return found or Definition(module.name, module.file, tuple(nodes))

    def _member(self, owner: Definition, name: str) -> Definition | None:
        classes = [node for node in owner.nodes if isinstance(node, ast.ClassDef)]
        if not classes:
            return None
        key = id(classes[0]), name
        if key in self._members:
            return self._members[key]
        self._members[key] = None
        nodes = [node for cls in classes for node in bindings(cls.body).get(name, ())]
        if nodes:
            self._members[key] = Definition(owner.module, owner.file, tuple(nodes))
        elif self._depth < _DEPTH:
            self._depth += 1
            self._members[key] = self._inherited(owner, classes, name)
            self._depth -= 1
        return self._members[key]

    def _inherited(self, owner: Definition, classes: list[ast.ClassDef], name: str) -> Definition | None:
        module = self.tree.module(owner.module)
        for base in (base for cls in classes for base in cls.bases):
            expression = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            found = self._expression(module, expression) if module else None
            found = self._member(found, name) if found else None
            if found is not None:
                return found
        return None

    def _expression(self, module: Module, expression: ast.expr) -> Definition | None:
        """What `name`, `Class.name` or `package.module.name` is in a module."""
        path: list[str] = []
        while isinstance(expression, ast.Attribute):
            path.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return None
        path.reverse()
        if not path:
            return self._global(module, expression.id)
        source = self._imported(module, expression.id)
        while source and len(path) > 1 and self.tree.module(f"{source}.{path[0]}"):
            source = f"{source}.{path.pop(0)}"
        if source and self.tree.module(source):
            return self.attribute(source, path)
        return self.attribute(module.name, [expression.id, *path])

    @staticmethod
    def _imported(module: Module, name: str) -> str | None:
        """The dotted name of what an import may have bound as a module."""
        for node in module.bindings.get(name, ()):
            if isinstance(node, ast.ImportFrom):
                return f"{absolute(node, module.package)}.{node.names[0].name}"
            if isinstance(node, ast.Import):
                return node.names[0].name if node.names[0].asname else name
        return None
