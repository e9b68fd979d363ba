"""What is imported by a name that stands in data: in these places only, and every name there is."""

import ast
import importlib.util
from pathlib import Path

import pytest

from bundle.acceptance import COLLECTIVE_MEASUREMENT_FUNCTION, OPERATORS
from bundle.cli import VERB_SUMMARIES
from bundle.environment import BACKENDS
from bundle.patches.catalogue import PATCHES
from bundle.verification.check import CHECKS_BY_PATCH_ID

PACKAGE = Path(importlib.util.find_spec("bundle").submodule_search_locations[0])  # type: ignore[union-attr,index]
PLACES = {
    "cli/__init__.py",  # a verb
    "backends/__init__.py",  # a backend
    "patches/patcher.py",  # a patch's replacement
    "verification/rank.py",  # a patch's check
    "mcore/unpickling.py",  # not ours: the classes that a checkpoint may name
}
NAMES = [
    *(f"bundle.cli.{verb}:app" for verb in VERB_SUMMARIES),
    *(f"bundle.backends.{backend}:set_up_runtime" for backend in BACKENDS),
    *sorted({replacement.wrapper for patch in PATCHES for replacement in patch.replacements}),
    *sorted({check.measurement for check in CHECKS_BY_PATCH_ID.values()}),
    *sorted(
        {
            COLLECTIVE_MEASUREMENT_FUNCTION,
            *(operator.measurement for each in OPERATORS.values() for operator in each),
        }
    ),
]


def imports_by_name(tree: ast.AST) -> bool:
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {getattr(function, "attr", getattr(function, "id", "")) for function in called}
    return bool(names & {"import_module", "__import__"})


def test_nothing_else_is_imported_by_a_name_in_data():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert {name for name, path in files.items() if imports_by_name(ast.parse(path.read_text()))} == PLACES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_bound_in_its_module(name: str):
    module, _, bound = name.partition(":")
    file = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    file = file if file.is_file() else file.with_suffix("") / "__init__.py"
    names = set()
    for node in ast.parse(file.read_text()).body:
        names |= {getattr(node, "name", None)}
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
    assert bound in names
