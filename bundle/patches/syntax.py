"""Code compared by meaning and not by layout: its fingerprints, and patterns that find parts of it."""

import ast
import copy
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache

# Not part of the meaning, or not there in every Python (type_params came with 3.12).
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params"})
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fingerprint_code(nodes: Sequence[ast.AST]) -> str:
    """Return 16 hexadecimal digits over the code: no positions, docstrings, empty fields or type parameters.

    The walk is our own, because `ast.dump` of one source differs between Python 3.11, 3.12 and 3.13. The
    stack is our own as well: the depth of a hostile expression must not be the depth of our recursion.
    """
    digest = hashlib.sha256()
    stack: list[object] = list(reversed(nodes))
    while stack:
        item = stack.pop()
        if isinstance(item, bytes):
            digest.update(item)
        elif isinstance(item, ast.AST):
            digest.update(b"(%s" % type(item).__name__.encode())
            stack.append(b")")
            for name, value in reversed(_list_fields(item)):
                stack += [value, b"." + name.encode()]
        elif isinstance(item, list):
            digest.update(b"[")
            stack.append(b"]")
            stack += reversed(item)
        else:
            text = _encode_constant(item)
            digest.update(b"%d:%s" % (len(text), text))
    return digest.hexdigest()[:16]


def fingerprint_signature(nodes: Sequence[ast.AST]) -> str:
    """Return 16 hexadecimal digits over how functions are called: parameters, defaults and decorators.

    Annotations do not count. A node that is not a function counts with all its code.
    """
    return fingerprint_code([_strip_body_and_annotations(node) for node in nodes])


def _strip_body_and_annotations(node: ast.AST) -> ast.AST:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node
    arguments = copy.copy(node.args)
    for kind in ("posonlyargs", "args", "kwonlyargs"):
        setattr(arguments, kind, [ast.arg(argument.arg) for argument in getattr(arguments, kind)])
    for kind in ("vararg", "kwarg"):
        argument = getattr(arguments, kind)
        setattr(arguments, kind, argument and ast.arg(argument.arg))
    return type(node)(node.name, arguments, [], node.decorator_list)


def _list_fields(node: ast.AST) -> list[tuple[str, object]]:
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, _WITH_DOCSTRING):
            value = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = _join_literals(node.values)
        elif name == "format_spec" and isinstance(value, ast.JoinedStr) and not _join_literals(value.values):
            continue  # f"{x:}"
        # the value of a constant counts even when it is None
        if name not in _IGNORED and (value not in (None, []) or isinstance(node, ast.Constant)):
            fields.append((name, value))
    return fields


def _join_literals(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string, with neighbouring literals joined.

    Parsers before 3.12 split the literals elsewhere.
    """
    pieces: list[ast.expr] = []
    for value in values:
        last = pieces[-1] if pieces else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            pieces[-1] = ast.Constant(str(last.value) + str(value.value))
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            pieces.append(value)
    return pieces


def _encode_constant(value: object) -> bytes:
    """Return a constant and its type as bytes.

    It does not use repr for a string, because that depends on Python's Unicode tables.
    """
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, bool) or value is None or value is ...:
        return str(value).encode()
    if isinstance(value, int):
        return b"i" + hex(value).encode()  # decimal digits are limited to 4300
    return f"{type(value).__name__}{value!r}".encode()


WILDCARD = "_"  # in a pattern: any expression


@cache
def parse_pattern(code: str) -> ast.AST:
    """Return the tree of one expression or statement. `_` is anything, and `f(...)` has any arguments."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern_node: ast.AST, node: ast.AST) -> bool:
    """Return whether the node is what the pattern says.

    The recursion is as deep as the pattern, whatever the node.
    """
    if isinstance(pattern_node, ast.Name) and pattern_node.id == WILDCARD:
        return isinstance(node, ast.expr)
    if type(pattern_node) is not type(node):
        return False
    if (
        isinstance(pattern_node, ast.Call)
        and isinstance(node, ast.Call)
        and _has_only_ellipsis_argument(pattern_node)
    ):
        return matches(pattern_node.func, node.func)
    return all(
        _matches_value(value, getattr(node, name, None))
        for name, value in ast.iter_fields(pattern_node)
        if name not in ("ctx", "kind", "type_comment")
    )


def _matches_value(expected: object, actual: object) -> bool:
    if isinstance(expected, ast.AST):
        return isinstance(actual, ast.AST) and matches(expected, actual)
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(expected) == len(actual)
            and all(map(_matches_value, expected, actual))
        )
    return type(expected) is type(actual) and expected == actual


def _has_only_ellipsis_argument(call: ast.Call) -> bool:
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value is ...


def find_matches(code: str, nodes: Iterable[ast.AST]) -> list[ast.AST]:
    """Return the nodes that the pattern matches."""
    pattern_node = parse_pattern(code)
    return [node for node in nodes if matches(pattern_node, node)]
