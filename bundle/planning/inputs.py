"""The checks of a job's inputs here before ranks start: data, tokenizer, weights, run directory."""

import glob
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files, hub, pretrained
from bundle.architectures.contents import has_tokenizer
from bundle.errors import ExitCode, UsageError
from bundle.planning.problems import Problem, to_hardware_problem, to_recipe_problem
from bundle.planning.rewards import find_reward_problems, list_reward_keys_and_files
from bundle.planning.servers import find_rollout_machine_problems
from bundle.pretrained.directory import explain_tiktoken_tokenizer
from bundle.recipe import Recipe
from bundle.recipe.data import Data
from bundle.recipe.datafiles import STDLIB_CORPUS_KEYWORD, expand, needs_pyarrow, resolve_idx_file
from bundle.recipe.rules import explain_unfit_source

_MAX_TOKENIZER_BYTES = 2**28  # published ones have some 2**25


class InitialWeights(NamedTuple):
    """A description of a model's first weights; "" where they cannot be loaded and there are problems."""

    description: str
    problems: tuple[Problem, ...] = ()
    is_loaded: bool = False  # from model.path


def inspect_weights(recipe: Recipe) -> InitialWeights:
    """Return the description of the weights that the recipe's model begins with, by their file headers."""
    description, pretrained_weights = "", None
    problems: list[Problem] = []
    try:
        pretrained_weights = pretrained.find_recipe_weights(recipe)
        description = pretrained.describe_weights(recipe, pretrained_weights)
        problems += (
            _find_missing_package_problems("safetensors", "model.path with weights")
            if pretrained_weights
            else ()
        )
    except UsageError as error:
        problems += to_problems(error, "model.path: ")
    try:
        pretrained.find_recipe_adapter(recipe)
    except UsageError as error:
        problems += to_problems(error, "model.lora.path: ")
    return InitialWeights(description, tuple(problems), pretrained_weights is not None)


def to_problems(error: UsageError, prefix: str = "") -> Iterator[Problem]:
    """Yield one problem for each line of an error, each behind the same prefix."""
    for line in (str(error).partition("\n")[0], *error.violations):
        yield to_recipe_problem(f"{prefix}{line}")


def find_input_output_problems(
    recipe: Recipe, directory: Path, initial_weights: InitialWeights | None = None
) -> Iterator[Problem]:
    """Yield every input that is missing or unusable; `directory` is where the run would live.

    `initial_weights` is what the model begins with, where that was inspected before.
    """
    yield from find_non_weight_problems(recipe)
    yield from (initial_weights or inspect_weights(recipe)).problems
    yield from _find_write_problems("run directory", directory, "--run-directory")
    if recipe.data.cache is not None:
        yield from _find_write_problems("data.cache", Path(recipe.data.cache), "data.cache")


def find_non_weight_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of data and tokenizer here; another machine may have them or mount them."""
    yield from _find_data_problems(recipe)
    yield from _find_tokenizer_problems(recipe)
    yield from find_reward_problems(recipe)
    yield from find_rollout_machine_problems(recipe)


def find_input_problems_except_packages(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the data, the tokenizer and the weights here; other machines may have them.

    A package that is not installed here is not reported, because another machine may have it.
    """
    problems = (*find_non_weight_problems(recipe), *inspect_weights(recipe).problems)
    yield from (problem for problem in problems if problem.code is ExitCode.USAGE)


class LocalInput(NamedTuple):
    """An input of a job that is on this machine: the key that names it, its name, and its paths."""

    key: str
    value: str
    paths: tuple[Path, ...]


def find_existing_local_inputs(recipe: Recipe, origin: Path | None = None) -> Iterator[LocalInput]:
    """Yield the inputs of a job that are on this machine; `origin` is the checkpoint that it begins with."""
    kind, _, tokenizer = recipe.data.tokenizer.partition(":")
    lora = recipe.model.lora
    named_values = (
        ("model.path", recipe.model.path),
        ("model.lora.path", lora.path if lora else None),
        ("data.tokenizer", tokenizer if kind == "hf" else None),
        ("rl.rollout.path", recipe.rl.rollout.path if recipe.rl else None),
        *list_reward_keys_and_files(recipe),
        ("--from", str(origin) if origin else None),
    )
    for key, value in named_values:
        if value and _is_present(Path(value)):
            yield LocalInput(key, value, (Path(value),))
    for key, data in _list_data(recipe).items():
        for value in data.path:
            index_path = resolve_idx_file(value, data.source)
            paths = [index_path] if _is_present(Path(index_path)) else glob.glob(index_path, recursive=True)  # noqa: PTH207
            if paths and value != STDLIB_CORPUS_KEYWORD:
                yield LocalInput(key, value, tuple(map(Path, paths)))


def _is_present(path: Path) -> bool:
    return files.is_directory(path) or files.is_file(path)


def _list_data(recipe: Recipe) -> dict[str, Data]:
    """Return all data that a job reads, by the key of its paths."""
    sets = {f"data.validation_sets.{name}.path": name for name in recipe.data.validation_sets}
    data = {"data.path": recipe.data} | {
        key: recipe.with_validation_set_as_data(name).data for key, name in sets.items()
    }
    if recipe.rl is not None and (settings := recipe.rl.evaluation) is not None:
        changes = {"path": settings.path, "source": settings.source or recipe.data.source, "weights": None}
        data["rl.evaluation.path"] = recipe.data.model_copy(update=changes)
    return data


def _find_data_problems(recipe: Recipe) -> Iterator[Problem]:
    for key, data in _list_data(recipe).items():
        for paths in data.training_set_paths:
            try:
                sources = expand([path for path in paths if path != STDLIB_CORPUS_KEYWORD], data.source, key)
            except UsageError as error:
                yield from map(to_recipe_problem, error.violations)
                continue
            if any(needs_pyarrow(source) for source in sources):
                yield from _find_missing_package_problems("pyarrow", f"{key}: {sources[0].name}")
            kind = sources[0].kind if sources else "text"
            if data.source is None and (reason := explain_unfit_source(recipe.task, kind)):
                yield to_recipe_problem(f"{key}: {reason}")


def _find_tokenizer_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the reasons why there is no tokenizer, or why its ids do not fit.

    Files that do not tell their ids are left to the ranks.
    """
    kind, _, location = recipe.data.tokenizer.partition(":")
    vocabulary, directory = recipe.architecture.vocab_size, Path(hub.build_cache_path_if_pinned(location))
    if kind != "hf":
        return
    if not files.is_directory(directory):
        yield to_recipe_problem(
            f"data.tokenizer: {location!r} is not a directory. Name a directory, or a Hub repository:"
            " hf:ORG/NAME"
        )
    elif reason := explain_tiktoken_tokenizer(directory):
        yield to_recipe_problem(f"data.tokenizer: {reason}")
    elif not has_tokenizer(directory):
        yield to_recipe_problem(f"data.tokenizer: {location!r} has no tokenizer file (tokenizer.json, ...)")
    yield from _find_missing_package_problems("transformers", "data.tokenizer: hf:")
    if (highest := _find_highest_tokenizer_id(directory / "tokenizer.json")) >= vocabulary:
        yield to_recipe_problem(
            f"data.tokenizer: {location!r} has ids up to {highest}, but the model's vocab_size is"
            f" {vocabulary}"
        )


def _find_highest_tokenizer_id(path: Path) -> int:
    """Return the highest id in a tokenizer.json, added tokens included; -1 where it tells no ids."""
    try:
        tokenizer = json.loads(files.read_content(path, _MAX_TOKENIZER_BYTES))
        vocabulary: Any = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return max((number for number in (*ids, *added) if isinstance(number, int)), default=-1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return -1


def _find_missing_package_problems(name: str, purpose: str) -> Iterator[Problem]:
    if importlib.util.find_spec(name) is None:
        yield to_hardware_problem(f"{purpose} needs {name}. Install it: pip install 'mcore-bundle[data]'")


def _find_write_problems(label: str, directory: Path, key: str) -> Iterator[Problem]:
    """Yield the reason why a directory, which need not exist yet, cannot be written to."""
    try:
        existing_path = next(
            path for path in (directory, *directory.parents) if _is_existing_path_or_link(path)
        )
        is_usable = existing_path.is_dir()
    except (OSError, ValueError) as error:
        yield to_recipe_problem(f"{label} {str(directory)[:200]}: {error}")
        return
    if not is_usable:
        yield to_recipe_problem(
            f"{label} '{directory}': '{existing_path}' is not a directory. Name another place with {key}"
        )
    elif not os.access(existing_path, os.W_OK | os.X_OK):
        yield to_hardware_problem(
            f"{label} '{directory}': this user cannot write to {existing_path}, or its file system is"
            f" read-only. Name another place with {key}"
        )


def _is_existing_path_or_link(path: Path) -> bool:
    """Return whether a path exists, even as a link to nothing. Raise OSError or ValueError for a bad name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
