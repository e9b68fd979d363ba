"""Every wrapper that the list names exists, is a function of one argument, and says what it returns."""

import ast
import importlib.util
from pathlib import Path

import pytest

from bundle.patches.catalogue import PATCHES

WRAPPERS = sorted({replacement.wrapper for patch in PATCHES for replacement in patch.replacements})
ROOT = Path(importlib.util.find_spec("bundle").submodule_search_locations[0]).parent  # type: ignore[union-attr,index]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_a_documented_function_of_the_original(wrapper: str):
    module, _, name = wrapper.partition(":")
    file = ROOT / f"{module.replace('.', '/')}.py"
    functions = {n.name: n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert name in functions
    names = [argument.arg for argument in functions[name].args.args]
    around = [ast.unparse(decorator) for decorator in functions[name].decorator_list] == ["make_wrapper"]
    assert names[:1] == ["original"] if around else names == ["original"]
    assert (ast.get_docstring(functions[name]) or "").startswith("Return ")
