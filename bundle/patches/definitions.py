"""Definitions by name in a source tree, as Python finds them: inherited, re-exported, under if and try."""

import ast
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from bundle.errors import nearest
from bundle.patches.source import Module, SourceTree, absolute, bindings
from bundle.patches.syntax import fingerprint, found, signature

_Node = TypeVar("_Node", bound=ast.AST)


class Definition(NamedTuple):
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
            for node in self.each(ast.Call)
            if name == (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None))
        )

    def given(self, name: str, keyword: str) -> tuple[str, ...]:
        """What the calls of a function or method give for a keyword, as Python writes it."""
        given = (argument for call in self.calls(name) for argument in call.keywords)
        return tuple(ast.unparse(argument.value) for argument in given if argument.arg == keyword)

    def assigned(self, name: str) -> frozenset[str]:
        """What is assigned to a name or an attribute ("self.x"), alone or in a tuple, as Python writes it."""
        return frozenset(
            ast.unparse(node.value)
            for node in self.each(ast.Assign)
            for target in node.targets
            for one in (target.elts if isinstance(target, ast.Tuple) else [target])
            if ast.unparse(one) == name
        )

    def has(self, code: str) -> bool:
        """Whether this expression or statement occurs, however laid out; patterns as in `syntax.pattern`."""
        return bool(found(code, self.walk()))

    def says(self, text: str) -> bool:
        """Whether the code has this string."""
        return any(constant.value == text for constant in self.each(ast.Constant))

    def each(self, kind: type[_Node]) -> Iterator[_Node]:
        """Every node of a kind."""
        return (node for node in self.walk() if isinstance(node, kind))

    def walk(self) -> Iterator[ast.AST]:
        """Every node of the code."""
        for node in self.nodes:
            yield from ast.walk(node)


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


class Definitions:
    """The definitions of one source tree."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._found: dict[str, Definition | None] = {}

    def __getitem__(self, target: str) -> Definition | None:
        """What "package.module:Qualified.name" is bound to; None where the tree has no such name.

        Raises source.Unreadable where the file that should tell cannot be parsed.
        """
        if target not in self._found:
            module, _, name = target.partition(":")
            self._found[target] = Lookup(self.tree).attribute(module, name.split("."))
        return self._found[target]

    def bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """The statements that bind a module-level name, where they stand: only `import *` is followed."""
        module, _, name = target.partition(":")
        return Lookup(self.tree).bindings(module, name)

    def nearest(self, target: str) -> tuple[str, ...]:
        """Targets of the same module or class whose names are the most like the missing one."""
        module_name, _, qualified = target.partition(":")
        module = self.tree.module(module_name)
        if module is None:
            return ()
        owner, _, name = qualified.rpartition(".")
        found = self[f"{module_name}:{owner}"] if owner else None
        classes = [node for node in found.nodes if isinstance(node, ast.ClassDef)] if found else []
        if owner and not classes:
            owner, name = "", owner.partition(".")[0]  # the class itself is gone
        scope = [known for node in classes for known in bindings(node.body)] if owner else module.bindings
        close = nearest(name, scope, most=3, cutoff=0.5)
        return tuple(
            f"{module_name}:{owner}.{match}" if owner else f"{module_name}:{match}" for match in close
        )


class Evidence:
    """The definitions that a patch or a trap declares as its evidence, and no others.

    What a patch reads must be declared, or nobody would notice when it changes.
    """

    def __init__(self, definitions: Definitions, declared: frozenset[str]) -> None:
        self.definitions, self.declared = definitions, declared

    def __getitem__(self, target: str) -> Definition | None:
        """The definition of a declared target; None where the tree has no such name."""
        return self.definitions[self._checked(target)]

    def there(self, *targets: str) -> list[Definition]:
        """The definitions of those declared targets that the tree has."""
        return [found for target in targets if (found := self[target]) is not None]

    def has_module(self, target: str) -> bool:
        """Whether the tree has the module of a declared name."""
        return self.definitions.tree.module(self._checked(target).partition(":")[0]) is not None

    def bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """The statements that bind a declared name, where they stand: only `import *` is followed."""
        return self.definitions.bindings(self._checked(target))

    def _checked(self, target: str) -> str:
        if target not in self.declared:
            raise KeyError(f"{target} is not declared as evidence")
        return target
