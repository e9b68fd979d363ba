"""Pieces of code are found as written, whatever their layout, and nothing else is."""

import ast
from pathlib import Path

import pytest

from bundle.patches.syntax import find_matches
from tests.patches.trees import written

FOUND = [
    ("self.a is not None", "if (self . a is\\\n not None): pass"),
    ("_ is not None", "x = f(1)[2] is not None"),
    ("f(...)", "f()"),
    ("f(...)", "y = f(a, *b, c=d)"),
    ("self.f(_, b=None)", "self.f(a[0], b=None)"),
    ("f(_)(...)", "f(a)(b)"),
    ("assert a is None, _", "assert a is None, f'{b}'"),
    ("a[..., 0]", "a[..., 0]"),
    ("setattr(w, 'x', _)", 'setattr(w, "x", not y)'),
]
NOT_FOUND = [
    ("self.a is not None", "self.a is None"),
    ("self.a is not None", "not self.a is not other"),
    ("f(...)", "g.f()"),
    ("f(_)", "f(a, b)"),
    ("f(_)", "f(a=b)"),
    ("f(a)", "f(b)"),
    ("a[..., 0]", "a[1, 0]"),
    ("f(1)", "f(True)"),
    ("assert a is None", "assert a is None, 'b'"),
]


@pytest.mark.parametrize(("pattern", "code"), FOUND)
def test_a_piece_is_found(pattern: str, code: str):
    assert find_matches(pattern, ast.walk(ast.parse(code)))


@pytest.mark.parametrize(("pattern", "code"), NOT_FOUND)
def test_what_is_not_the_piece_is_not_found(pattern: str, code: str):
    assert not find_matches(pattern, ast.walk(ast.parse(code)))


def test_an_expression_is_matched_as_deep_as_the_pattern_only(tmp_path: Path):
    deep = "x = " + "(" * 90 + "a" + " + a)" * 90 + "\n"
    code = written(tmp_path, {"m": f"def f():\n    {deep}    y = " + "+".join(["b"] * 900)})["m:f"]
    assert code is not None and code.has_pattern("_ + b") and not code.has_pattern("_ + (b + b)")
