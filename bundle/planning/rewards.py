"""The checks of the rewards of task rl on this machine before ranks start: files, functions, packages."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from bundle import files
from bundle.planning.problems import Problem, to_hardware_problem, to_recipe_problem
from bundle.recipe import Recipe
from bundle.recipe.rl_rules import split_function

_MAX_SOURCE_BYTES = 2**24


def find_reward_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what the rewards of a recipe, and answers from files, lack here; no file is executed."""
    answers = recipe.rl.rollout.path if recipe.rl else None
    if answers is not None and not files.is_file(Path(answers) / "step-00000000.jsonl"):
        yield to_recipe_problem(
            f"rl.rollout.path: {answers} has no step-00000000.jsonl. Name the folder `rollouts` of a run."
        )
    for number, reward in enumerate(recipe.rl.rewards if recipe.rl else ()):
        key = f"rl.rewards.{number}"
        if reward.function is not None and (
            reason := _explain_missing_function(*split_function(reward.function))
        ):
            yield to_recipe_problem(f"{key}.function: {reward.function}: {reason}")
        if reward.kind == "math" and importlib.util.find_spec("math_verify") is None:
            yield to_hardware_problem(
                f"{key}.kind: math needs math-verify. Install it: pip install 'mcore-bundle[rl]'."
            )
        if reward.kind == "code" and sys.platform != "linux":
            yield to_hardware_problem(
                f"{key}.kind: code needs the limits of Linux, but this is {sys.platform}. Run it on Linux."
            )


def list_reward_keys_and_files(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the key and the file of every reward that is a function."""
    rewards = recipe.rl.rewards if recipe.rl else ()
    return [
        (f"rl.rewards.{number}.function", split_function(reward.function)[0])
        for number, reward in enumerate(rewards)
        if reward.function is not None
    ]


def _explain_missing_function(file: str, name: str) -> str | None:
    """Return why a file has no function of that name; None where it seems to have one."""
    try:
        module = ast.parse(files.read_content(Path(file), _MAX_SOURCE_BYTES))
    except OSError as error:
        return f"{error.strerror}. Name a file as FILE.py:NAME, relative to the working directory."
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"not valid Python: {error}. Correct the file."
    if name in _list_potential_names(module) or "*" in _list_potential_names(module):
        return None
    return (
        f"the file has no {name}. Name one of its functions: {', '.join(_list_functions(module)) or 'none'}."
    )


def _list_functions(module: ast.Module) -> list[str]:
    return [node.name for node in module.body if isinstance(node, ast.FunctionDef)]


def _list_potential_names(module: ast.Module) -> set[str]:
    """Return the names that a module may define, those in its branches too."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
