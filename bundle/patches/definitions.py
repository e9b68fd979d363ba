"""Definitions by name in a source tree, as Python finds them: inherited, re-exported, under if and try."""

import ast
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from bundle.errors import find_nearest
from bundle.patches.source import Module, SourceTree, collect_bindings, resolve_import
from bundle.patches.syntax import find_matches, fingerprint_code, fingerprint_signature

_Node = TypeVar("_Node", bound=ast.AST)


class Definition(NamedTuple):
    """The statements that bind the name of a target: all alternatives, in the order of the source."""

    module: str  # where it is defined, which is not the target's module when that re-exports it
    file: str  # of that module, relative to the tree
    nodes: tuple[ast.stmt, ...]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the code."""
        return fingerprint_code(self.nodes)

    @property
    def signature_fingerprint(self) -> str:
        """The fingerprint of the signature."""
        return fingerprint_signature(self.nodes)

    @property
    def is_function_or_class(self) -> bool:
        """True if the definition is a function or a class, and not a variable."""
        return any(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for n in self.nodes)

    @property
    def parameters(self) -> frozenset[str]:
        """The names of the parameters of the function, of all its alternatives."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                names |= {arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        return frozenset(names)

    @property
    def identifiers(self) -> frozenset[str]:
        """Every identifier that the code mentions: names, attributes, and keywords of its calls."""
        names = set()
        for node in self.walk():
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                names.add(node.arg)
        return frozenset(names)

    def find_calls(self, name: str) -> tuple[ast.Call, ...]:
        """Return the calls of a function of that name, or of a method of that name on any object."""
        return tuple(
            node
            for node in self.iter_nodes(ast.Call)
            if name == (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None))
        )

    def find_keyword_values(self, name: str, keyword: str) -> tuple[str, ...]:
        """Return the values that calls of a function or method pass for a keyword, as Python source."""
        keywords = (argument for call in self.find_calls(name) for argument in call.keywords)
        return tuple(ast.unparse(argument.value) for argument in keywords if argument.arg == keyword)

    def find_assigned_values(self, name: str) -> frozenset[str]:
        """Return the values assigned to a name or an attribute ("self.x"), as Python source.

        Finds the name alone or as an element of a tuple.
        """
        return frozenset(
            ast.unparse(node.value)
            for node in self.iter_nodes(ast.Assign)
            for target in node.targets
            for element in (target.elts if isinstance(target, ast.Tuple) else [target])
            if ast.unparse(element) == name
        )

    def has_pattern(self, code: str) -> bool:
        """Return whether this expression or statement occurs, in any layout; see `syntax.parse_pattern`."""
        return bool(find_matches(code, self.walk()))

    def has_string(self, text: str) -> bool:
        """Return whether the code has this string."""
        return any(constant.value == text for constant in self.iter_nodes(ast.Constant))

    def iter_nodes(self, kind: type[_Node]) -> Iterator[_Node]:
        """Yield every node of a kind."""
        return (node for node in self.walk() if isinstance(node, kind))

    def walk(self) -> Iterator[ast.AST]:
        """Yield every node of the code."""
        for node in self.nodes:
            yield from ast.walk(node)


_MAX_DEPTH = 64  # names that lead to one another; a hostile tree must not reach the end of our own stack


class DefinitionSearch:
    """A search from one name through re-exports, `import *`, aliases and base classes.

    A lookup serves one name only. A name that is already being looked up counts as not found: Python finds
    nothing new in a circle of imports either.
    """

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._globals: dict[tuple[str, str], Definition | None] = {}
        self._members: dict[tuple[int, str], Definition | None] = {}
        self._depth = 0

    def find_attribute(self, module_name: str, path: list[str]) -> Definition | None:
        """Return the definition of a dotted name in a module; None where the module has no such name."""
        module = self.tree.find_module(module_name)
        definition = self._find_global(module, path[0]) if module else None
        for name in path[1:]:
            definition = self._find_member(definition, name) if definition else None
        return definition

    def find_bindings(self, module_name: str, name: str) -> tuple[ast.stmt, ...]:
        """Return the statements that bind a name, in the module or in one that it imports by `import *`."""
        waiting, seen = [module_name], set()
        while waiting:
            module = self.tree.find_module(waiting.pop())
            if module is None or module.name in seen:
                continue
            if name in module.bindings:
                return tuple(module.bindings[name])
            seen.add(module.name)
            waiting += reversed(module.star_imports)
        return ()

    def _find_global(self, module: Module, name: str) -> Definition | None:
        key = module.name, name
        if key not in self._globals:
            self._globals[key] = None
            if self._depth < _MAX_DEPTH:
                self._depth += 1
                self._globals[key] = self._resolve_binding(module, name)
                self._depth -= 1
        return self._globals[key]

    def _resolve_binding(self, module: Module, name: str) -> Definition | None:
        nodes = module.bindings.get(name)
        if nodes is None:
            stars = (self.find_attribute(star, [name]) for star in module.star_imports)
            return next((definition for definition in stars if definition is not None), None)
        definition = None
        if len(nodes) == 1:  # with a fallback it is a variable
            (node,) = nodes
            if isinstance(node, ast.ImportFrom):
                definition = self.find_attribute(resolve_import(node, module.package), [node.names[0].name])
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                definition = self._resolve_expression(module, node.value)
        return definition or Definition(module.name, module.file, tuple(nodes))

    def _find_member(self, owner: Definition, name: str) -> Definition | None:
        classes = [node for node in owner.nodes if isinstance(node, ast.ClassDef)]
        if not classes:
            return None
        key = id(classes[0]), name
        if key in self._members:
            return self._members[key]
        self._members[key] = None
        nodes = [node for cls in classes for node in collect_bindings(cls.body).get(name, ())]
        if nodes:
            self._members[key] = Definition(owner.module, owner.file, tuple(nodes))
        elif self._depth < _MAX_DEPTH:
            self._depth += 1
            self._members[key] = self._find_inherited(owner, classes, name)
            self._depth -= 1
        return self._members[key]

    def _find_inherited(self, owner: Definition, classes: list[ast.ClassDef], name: str) -> Definition | None:
        module = self.tree.find_module(owner.module)
        for base in (base for cls in classes for base in cls.bases):
            expression = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
            definition = self._resolve_expression(module, expression) if module else None
            definition = self._find_member(definition, name) if definition else None
            if definition is not None:
                return definition
        return None

    def _resolve_expression(self, module: Module, expression: ast.expr) -> Definition | None:
        """Return the definition of `name`, `Class.name` or `package.module.name` in a module."""
        path: list[str] = []
        while isinstance(expression, ast.Attribute):
            path.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return None
        path.reverse()
        if not path:
            return self._find_global(module, expression.id)
        source = self._find_import(module, expression.id)
        while source and len(path) > 1 and self.tree.find_module(f"{source}.{path[0]}"):
            source = f"{source}.{path.pop(0)}"
        if source and self.tree.find_module(source):
            return self.find_attribute(source, path)
        return self.find_attribute(module.name, [expression.id, *path])

    @staticmethod
    def _find_import(module: Module, name: str) -> str | None:
        """Return the dotted name of the module that an import may have bound to a name."""
        for node in module.bindings.get(name, ()):
            if isinstance(node, ast.ImportFrom):
                return f"{resolve_import(node, module.package)}.{node.names[0].name}"
            if isinstance(node, ast.Import):
                return node.names[0].name if node.names[0].asname else name
        return None


class Definitions:
    """The definitions of one source tree."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._definitions: dict[str, Definition | None] = {}

    def __getitem__(self, target: str) -> Definition | None:
        """Return the definition of "package.module:Qualified.name"; None where the tree has no such name.

        Raises source.UnreadableSource where the file that defines the name cannot be parsed.
        """
        if target not in self._definitions:
            module, _, name = target.partition(":")
            self._definitions[target] = DefinitionSearch(self.tree).find_attribute(module, name.split("."))
        return self._definitions[target]

    def find_bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """Return the statements that bind a module-level name, as they stand; only `import *` is followed."""
        module, _, name = target.partition(":")
        return DefinitionSearch(self.tree).find_bindings(module, name)

    def find_nearest(self, target: str) -> tuple[str, ...]:
        """Return targets of the same module or class whose names are the most like the missing one."""
        module_name, _, qualified = target.partition(":")
        module = self.tree.find_module(module_name)
        if module is None:
            return ()
        owner, _, name = qualified.rpartition(".")
        definition = self[f"{module_name}:{owner}"] if owner else None
        classes = [node for node in definition.nodes if isinstance(node, ast.ClassDef)] if definition else []
        if owner and not classes:
            owner, name = "", owner.partition(".")[0]  # the class itself is gone
        scope = (
            [known for node in classes for known in collect_bindings(node.body)] if owner else module.bindings
        )
        matches = find_nearest(name, scope, most=3, cutoff=0.5)
        return tuple(
            f"{module_name}:{owner}.{match}" if owner else f"{module_name}:{match}" for match in matches
        )


class EvidenceDefinitions:
    """The definitions that a patch or a trap declares as its evidence, and no others.

    A patch may read declared definitions only: a change of an undeclared one would not be noticed.
    """

    def __init__(self, definitions: Definitions, declared: frozenset[str]) -> None:
        self.definitions, self.declared = definitions, declared

    def __getitem__(self, target: str) -> Definition | None:
        """Return the definition of a declared target; None where the tree has no such name."""
        return self.definitions[self._require_declared(target)]

    def find_existing(self, *targets: str) -> list[Definition]:
        """Return the definitions of those declared targets that the tree has."""
        return [definition for target in targets if (definition := self[target]) is not None]

    def has_module(self, target: str) -> bool:
        """Return whether the tree has the module of a declared name."""
        return self.definitions.tree.find_module(self._require_declared(target).partition(":")[0]) is not None

    def find_bindings(self, target: str) -> tuple[ast.stmt, ...]:
        """Return the statements that bind a declared name, as they stand; only `import *` is followed."""
        return self.definitions.find_bindings(self._require_declared(target))

    def _require_declared(self, target: str) -> str:
        if target not in self.declared:
            raise KeyError(f"{target} is not declared as evidence")
        return target
