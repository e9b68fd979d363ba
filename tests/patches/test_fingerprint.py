"""A fingerprint says what the code says: equal for equal code, on every Python."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest

from bundle.patches.megatron_core import load_review_table
from bundle.patches.syntax import fingerprint_code, fingerprint_signature


def of(source: str) -> str:
    return fingerprint_code(ast.parse(source).body)


SAME = [
    ("def f(a): return a", "def f(a):\n    # why\n    return (a)\n"),
    ("def f(a):\n    'says'\n    return a", "def f(a):\n    'says something else'\n    return a"),
    ("class A:\n    'says'\n    x = 1", "class A:\n    x = 1"),
    ("x = 'a' 'b'", "x = 'ab'"),
    ("x = u'a'", "x = 'a'"),
    ("x = 0x10", "x = 16"),
    ("x = f'a' f'{b}' 'c'", "x = f'a{b}c'"),
    ("x = f'{b:}'", "x = f'{b}'"),
    ("x = 1  # type: int", "x = 1"),
]
DIFFERENT = [
    ("def f(a): return a", "def f(b): return b"),
    ("def f(a): return a", "def f(a, b=None): return a"),
    ("def f(a): return a", "async def f(a): return a"),
    ("@g\ndef f(a): return a", "def f(a): return a"),
    ("def f(a: int): return a", "def f(a): return a"),
    ("x = 1", "x = True"),
    ("x = 1", "x = 1.0"),
    ("x = 'a'", "x = b'a'"),
    ("x = None", "x = ..."),
    ("x = 'ab', 'c'", "x = 'a', 'bc'"),
    ("x = f'{a!r}'", "x = f'{a}'"),
    ("x = f'{a:>3}'", "x = f'{a:>4}'"),
    ("f(a, b)", "f(*a, b)"),
    ("x = a.b", "x = a.c"),
    ("if a: pass\nelse: b", "if a: pass\nb"),
    ("x = [a, [b]]", "x = [[a], b]"),
    ("def f():\n    x = 1\n    'not a docstring'", "def f():\n    x = 1"),
    ("x[1:2]", "x[1, 2]"),
    ("x = [None]", "x = []"),
]


CALLED_ALIKE = [
    ("def f(a): return a", "def f(a): return a + 1"),
    ("def f(a: int = 1) -> int: return a", "def f(a=1): pass"),
    ("def f(*a: int, **b: str): pass", "def f(*a, **b): return 1"),
    ("def f(a, /, *, b: int = 2): pass", "def f(a, /, *, b=2): 'says'"),
    ("if x:\n  def f(a): return 1", "if x:\n  def f(a): return 2"),
]
CALLED_DIFFERENTLY = [
    ("def f(a): pass", "def f(b): pass"),
    ("def f(a): pass", "def f(a, b): pass"),
    ("def f(a=1): pass", "def f(a=2): pass"),
    ("def f(a, b=1): pass", "def f(a, *, b=1): pass"),
    ("def f(*, a): pass", "def f(*, a=None): pass"),
    ("def f(*a): pass", "def f(**a): pass"),
    ("def f(a, /): pass", "def f(a): pass"),
    ("def f(a): pass", "async def f(a): pass"),
    ("@g\ndef f(a): pass", "def f(a): pass"),
    ("@g\ndef f(a): pass", "@h\ndef f(a): pass"),
    ("f = g", "f = h"),
    ("class f(A): pass", "class f(B): pass"),
]


def called(source: str) -> str:
    """The signature of the definition in a source, which may stand under an `if`."""
    node = ast.parse(source).body[0]
    return fingerprint_signature(node.body if isinstance(node, ast.If) else [node])


@pytest.mark.parametrize(("one", "other"), CALLED_ALIKE)
def test_the_body_and_annotations_do_not_count_in_a_signature(one: str, other: str):
    assert called(one) == called(other)


@pytest.mark.parametrize(("one", "other"), CALLED_DIFFERENTLY)
def test_how_it_is_called_counts_in_a_signature(one: str, other: str):
    assert called(one) != called(other)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_layout_and_comments_do_not_count(one: str, other: str):
    assert of(one) == of(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_code_counts(one: str, other: str):
    assert of(one) != of(other)


@pytest.mark.parametrize(
    "source",
    ["x = " + "-" * 20000 + "1", "x = " + "+".join(["1"] * 2000), "x = " + "9" * 4000, "x = '\\ud800'"],
    ids=["deep", "long", "big number", "half a character"],
)
def test_hostile_source_is_hashed_or_refused_but_not_fatal(source: str):
    try:
        tree = ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return
    assert len(fingerprint_code(tree.body)) == 16


READ_EVERY_RELEASE = """
import json, sys
from pathlib import Path
from bundle.patches.definitions import Definitions
from bundle.patches.source import SourceTree
from bundle.patches.megatron_core import load_review_table
found = {}
for reference in sys.argv[2:]:
    definitions = Definitions(SourceTree(Path(sys.argv[1], reference)))
    for target in load_review_table().targets:
        definition = definitions[target]
        found[f"{reference} {target}"] = definition and definition.fingerprint
print(json.dumps(found))
"""


@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_every_python_finds_the_fingerprints_of_the_list(minor: str, release_trees: dict[str, Path]):
    root = str(next(iter(release_trees.values())).parent)
    paths = [str(Path.cwd()), str(Path(packaging.__file__).parents[1])]
    command = [interpreter(minor), "-c", READ_EVERY_RELEASE, root, *release_trees]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    table = load_review_table()
    expected = {f"{r} {t}": table.find_fingerprint(t, r) for r in release_trees for t in table.targets}
    assert json.loads(ran.stdout) == expected


def interpreter(minor: str) -> str:
    if sys.version_info[:2] == tuple(map(int, minor.split("."))):
        return sys.executable
    managed = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
    found = shutil.which(f"python{minor}")
    usable = [str(path) for path in managed] or ([found] if found else [])
    if not usable:
        pytest.skip(f"there is no Python {minor} here")
    return usable[-1]
