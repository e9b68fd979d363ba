"""`python -m tools.names`: a new name that breaks a rule fails, and the list of exceptions only shrinks."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.names import EXCEPTIONS, Violation, find_violations, is_verb_phrase, read_exceptions

ROOT = Path(__file__).parents[2]
VERBS = """
read read_header set put split_rows cut run embed feed need_room seed exceed __read from_row to_row with_dtype
as_dict find_given _build_of main shed
"""
NO_VERBS = """
found made_plan _told of_rank by_phase without_room in_process why_none how which written placed named judged
summed __gathered left kept lost beside until
"""


def write_package(root: Path, exceptions: str = "", **sources: str) -> Path:
    (root / "bundle").mkdir(exist_ok=True)
    for name, source in sources.items():
        (root / "bundle" / f"{name}.py").write_text(source)
    (root / "names.txt").write_text(exceptions)
    return root


def run_names(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.names", *words]
    return subprocess.run(
        [*command, f"--root={root}", f"--exceptions={root / 'names.txt'}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", VERBS.split())
def test_a_verb_begins_a_function(name):
    assert is_verb_phrase(name)


@pytest.mark.parametrize("name", NO_VERBS.split())
def test_a_participle_a_preposition_and_a_question_word_do_not(name):
    assert not is_verb_phrase(name)


@pytest.mark.parametrize(
    ("source", "kind", "name", "lines"),
    [
        ("def found():\n    def of_rank(): ...\n", "function", "of_rank", [2]),
        ("class A:\n    async def told(self): ...\n", "function", "told", [2]),
        ("x = 1\nfound = 1\nfor found in (): ...\n", "identifier", "found", [2, 3]),
        ("def read(*given, **kept): ...\n", "identifier", "given", [1]),
        ("def read(*given, **kept): ...\n", "identifier", "kept", [1]),
        ("class A:\n    here: int\n", "identifier", "here", [2]),
        ("class A:\n    def read(self):\n        self.own = 1\n", "identifier", "own", [3]),
        ("import json as what\n", "identifier", "what", [1]),
        ("try: ...\nexcept OSError as said: ...\n", "identifier", "said", [2]),
        ("match 1:\n    case whole: ...\n", "identifier", "whole", [2]),
        ("def each(): ...\n", "identifier", "each", [1]),
        ("_there = lambda some: some\n", "identifier", "_there", [1]),
        ("if (asked := 1): ...\n", "identifier", "asked", [1]),
    ],
)
def test_a_name_is_found_where_it_is_given(tmp_path, source, kind, name, lines):
    violations = find_violations(write_package(tmp_path, a=source))
    assert violations[Violation("bundle/a.py", kind, name)] == lines


@pytest.mark.parametrize(
    "source",
    [
        "from hypothesis import given\n@given\ndef read(): ...\n",
        "class A:\n    @property\n    def placed(self): ...\n    def __of__(self): ...\n",
        "class A:\n    @functools.cached_property\n    def named(self): ...\n",
        "class A: ...\nclass A: ...\n",
        "read(found=1, of=other.said)\n",
    ],
)
def test_names_of_others_and_values_are_no_violations(tmp_path, source):
    assert find_violations(write_package(tmp_path, a=source)) == {}


def test_a_class_name_has_one_owner_and_a_module_is_an_identifier(tmp_path):
    rule = "class Rule: ...\n"
    root = write_package(tmp_path, a=rule, b="\n" + rule, there="class There: ...\n")
    assert find_violations(root) == {
        Violation("bundle/a.py", "class", "Rule"): [1],
        Violation("bundle/b.py", "class", "Rule"): [2],
        Violation("bundle/there.py", "identifier", "there"): [1],
    }


def read_places(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what each message is about: a file with lines, or the list of exceptions."""
    return [line.removeprefix("  - ").split(": ")[0] for line in result.stderr.splitlines()[1:]]


def test_a_new_violation_fails_with_its_place(tmp_path):
    exceptions = "bundle/a.py identifier found 1\n"
    assert run_names(write_package(tmp_path, exceptions, a="found = 1\n")).returncode == 0
    write_package(tmp_path, exceptions, a="found = 1\nfound = 2\n", b="def told(): ...\n")
    result = run_names(tmp_path)
    assert result.returncode == 1
    assert read_places(result) == ["bundle/a.py:1, 2", "bundle/b.py:1"]


def test_an_exception_that_no_longer_occurs_fails_until_the_list_shrinks(tmp_path):
    exceptions = (
        "bundle/a.py identifier found 2\nbundle/b.py function told 1\nbundle/c.py identifier each 1\n"
    )
    write_package(tmp_path, exceptions, a="found = 1\nkept = 1\n", b="each = 1\n", c="each = each = 1\n")
    new = ["bundle/a.py:2", "bundle/b.py:1", "bundle/c.py:1, 1"]
    result = run_names(tmp_path)
    assert result.returncode == 1
    assert sorted(read_places(result)) == [*new, "names.txt", "names.txt"]
    assert run_names(tmp_path, "shrink").returncode == 0
    # Nothing new was added: neither another name nor one more of the same.
    smaller = "bundle/a.py identifier found 1\nbundle/c.py identifier each 1\n"
    assert (tmp_path / "names.txt").read_text() == smaller
    assert read_places(run_names(tmp_path)) == new


@pytest.mark.parametrize("line", ["bundle/a.py identifier found", "bundle/a.py identifier found -1", "x"])
def test_a_line_of_another_form_is_refused_with_its_number(tmp_path, line):
    write_package(tmp_path, f"bundle/a.py identifier found 1\n{line}\n", a="found = 1\n")
    result = run_names(tmp_path)
    assert result.returncode == 2 and "names.txt:2" in result.stderr


def test_the_list_of_exceptions_is_sorted_and_has_each_once():
    lines = EXCEPTIONS.read_text().splitlines()
    allowed = read_exceptions(EXCEPTIONS)
    assert [Violation(*line.split()[:3]) for line in lines] == sorted(allowed)
