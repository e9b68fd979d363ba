"""The checks for rollouts by servers on this machine before ranks start: packages, and room for weights."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from bundle import files
from bundle.errors import format_bytes
from bundle.planning.problems import Problem, to_hardware_problem
from bundle.planning.rollout import OLDEST_SGLANG, count_weights_folder_bytes
from bundle.recipe import Recipe


def find_rollout_machine_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what this machine lacks for rollouts by servers: packages, and room for two versions."""
    rollout = recipe.rl.rollout if recipe.rl else None
    if rollout is None or rollout.engine != "sglang" or rollout.path is not None:
        return
    if importlib.util.find_spec("xxhash") is None:
        yield to_hardware_problem(
            "rl.rollout.engine: sglang needs xxhash. Install it: pip install 'mcore-bundle[rl]'."
        )
    if not rollout.urls and rollout.python is None:
        version = _find_version("sglang")
        if version is None or Version(version) < Version(OLDEST_SGLANG):
            yield to_hardware_problem(
                f"rl.rollout.engine: SGLang {version or 'is not installed'}"
                f"{' is too old' if version else ''}. Install {OLDEST_SGLANG} or newer, or name another"
                " environment's Python in rl.rollout.python."
            )
    elif rollout.python is not None and shutil.which(rollout.python) is None:
        yield to_hardware_problem(
            f"rl.rollout.python: {rollout.python} is missing or not executable. Name the Python of an"
            " environment with SGLang."
        )
    needed, folder = count_weights_folder_bytes(recipe), Path(rollout.weights_folder or ".")
    if (free := files.find_free_bytes(folder)) < needed:
        yield to_hardware_problem(
            f"rl.rollout.weights_folder: {folder} has {format_bytes(free)} free, but two versions of the"
            f" weights need {format_bytes(needed)}. Name a folder with more room."
        )


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
