"""Definitions by name in a source tree, as Python finds them: inherited, re-exported, under if and try."""

import ast
from dataclasses import dataclass, field

from bundle.errors import nearest
from bundle.patches.definition import Definition
from bundle.patches.lookup import Lookup
from bundle.patches.source import SourceTree, bindings


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Evidence:
    """The definitions that a patch or a trap declares as its evidence, and no others.

    What a patch reads must be declared, or nobody would notice when it changes.
    """

    definitions: Definitions
    declared: frozenset[str]

    def __getitem__(self, target: str) -> Definition | None:
        """The definition of a declared target; None where the tree has no such name."""
        return self.definitions[self._checked(target)]

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
