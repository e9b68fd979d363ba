"""Pieces of code as one would write them, found in a syntax tree whatever their layout."""

import ast
from collections.abc import Iterable
from functools import cache

ANY = "_"  # in a pattern: any expression


@cache
def pattern(code: str) -> ast.AST:
    """The tree of one expression or statement, in which `_` is anything and `f(...)` has any arguments."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(wanted: ast.AST, node: ast.AST) -> bool:
    """Whether the node is what the pattern says. Recursion is as deep as the pattern, whatever the node."""
    if isinstance(wanted, ast.Name) and wanted.id == ANY:
        return isinstance(node, ast.expr)
    if type(wanted) is not type(node):
        return False
    if isinstance(wanted, ast.Call) and isinstance(node, ast.Call) and _takes_any(wanted):
        return matches(wanted.func, node.func)
    return all(
        _same(value, getattr(node, name, None))
        for name, value in ast.iter_fields(wanted)
        if name not in ("ctx", "kind", "type_comment")
    )


def _same(wanted: object, found: object) -> bool:
    if isinstance(wanted, ast.AST):
        return isinstance(found, ast.AST) and matches(wanted, found)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(map(_same, wanted, found))
    return type(wanted) is type(found) and wanted == found


def _takes_any(call: ast.Call) -> bool:
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value is ...


def found(code: str, nodes: Iterable[ast.AST]) -> list[ast.AST]:
    """Those of the nodes that are what the pattern says."""
    wanted = pattern(code)
    return [node for node in nodes if matches(wanted, node)]
