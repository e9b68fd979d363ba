"""Where a reference of an operator says what is forbidden, and where it refused a call."""

import ast
import inspect
import traceback
from pathlib import Path
from types import ModuleType

Place = tuple[str, int]  # file, line


def of(*modules: ModuleType) -> set[Place]:
    """Every place at which one of the modules may refuse."""
    places = set()
    for file in (Path(inspect.getfile(module)) for module in modules):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        places |= {(file.name, call.lineno) for call in calls if getattr(call.func, "id", "") == "need"}
    return places


def refused_at(error: BaseException) -> Place:
    """The place at which it was raised, by `need`."""
    caller = traceback.extract_tb(error.__traceback__)[-2]
    return Path(caller.filename).name, caller.lineno or 0
