"""What a job needs of this machine's disks before ranks start: data, tokenizer, weights, run directory."""

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
from bundle.planning.datafiles import STDLIB, expand, find_index, needs_pyarrow
from bundle.planning.problems import Problem, hardware_problem, recipe_problem
from bundle.planning.rewards import find_reward_problems
from bundle.pretrained.directory import unread_tokenizer
from bundle.recipe import Recipe
from bundle.recipe.data import Data
from bundle.recipe.rules import unfit_source

_TOKENIZER_BYTES = 2**28  # published ones have some 2**25


class Weights(NamedTuple):
    """What a model begins with, for people; "" where that cannot be loaded: then there are problems."""

    described: str
    problems: tuple[Problem, ...] = ()
    loaded: bool = False  # from model.path


def weights(recipe: Recipe) -> Weights:
    """What the recipe's model begins with, by the headers of its files."""
    described, found = "", None
    problems: list[Problem] = []
    try:
        found = pretrained.of_recipe(recipe)
        described = pretrained.described(recipe, found)
        problems += _package("safetensors", "model.path with weights") if found else ()
    except UsageError as error:
        problems += problems_of(error, "model.path: ")
    try:
        pretrained.adapter_of_recipe(recipe)
    except UsageError as error:
        problems += problems_of(error, "model.lora.path: ")
    return Weights(described, tuple(problems), found is not None)


def problems_of(error: UsageError, before: str = "") -> Iterator[Problem]:
    """What an error says, a problem a line, each behind the same words."""
    for line in (str(error).partition("\n")[0], *error.violations):
        yield recipe_problem(f"{before}{line}")


def input_problems(recipe: Recipe, directory: Path, begins: Weights | None = None) -> Iterator[Problem]:
    """Everything that is not there or cannot be used; `directory` is where the run would live.

    `begins` is what the model begins with, where that has been looked at before.
    """
    yield from missing_files(recipe)
    yield from (begins or weights(recipe)).problems
    yield from _find_write_problems("run directory", directory, "--run-directory")
    if recipe.data.cache is not None:
        yield from _find_write_problems("data.cache", Path(recipe.data.cache), "data.cache")


def missing_files(recipe: Recipe) -> Iterator[Problem]:
    """The data and the tokenizer that are not here: of another machine they may be, or are to be mounted."""
    yield from _data(recipe)
    yield from _tokenizer(recipe)
    yield from find_reward_problems(recipe)


def absent_inputs(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is wrong with the data, the tokenizer and the weights here; other machines may have them.

    A package that is not installed here says nothing of another machine.
    """
    problems = (*missing_files(recipe), *weights(recipe).problems)
    yield from (problem for problem in problems if problem.code is ExitCode.USAGE)


class Input(NamedTuple):
    """What of a job's inputs is here: the key that names it, the name, and what that means."""

    key: str
    written: str
    paths: tuple[Path, ...]


def found(recipe: Recipe, origin: Path | None = None) -> Iterator[Input]:
    """The inputs of a job that are on this machine, `origin` being the checkpoint that it begins with."""
    kind, _, tokenizer = recipe.data.tokenizer.partition(":")
    lora = recipe.model.lora
    named = (
        ("model.path", recipe.model.path),
        ("model.lora.path", lora.path if lora else None),
        ("data.tokenizer", tokenizer if kind == "hf" else None),
        ("--from", str(origin) if origin else None),
    )
    for key, written in named:
        if written and _here(Path(written)):
            yield Input(key, written, (Path(written),))
    for key, data in _read(recipe).items():
        for written in data.path:
            one = find_index(written, data.source)
            paths = [one] if _here(Path(one)) else glob.glob(one, recursive=True)  # noqa: PTH207
            if paths and written != STDLIB:
                yield Input(key, written, tuple(map(Path, paths)))


def _here(path: Path) -> bool:
    return files.is_directory(path) or files.is_file(path)


def _read(recipe: Recipe) -> dict[str, Data]:
    """All data that a job reads, by the key of its paths."""
    sets = {f"data.validation_sets.{name}.path": name for name in recipe.data.validation_sets}
    data = {"data.path": recipe.data} | {key: recipe.validating(name).data for key, name in sets.items()}
    if recipe.rl is not None and (settings := recipe.rl.evaluation) is not None:
        only = {"path": settings.path, "source": settings.source or recipe.data.source, "weights": None}
        data["rl.evaluation.path"] = recipe.data.model_copy(update=only)
    return data


def _data(recipe: Recipe) -> Iterator[Problem]:
    for key, data in _read(recipe).items():
        for paths in data.data_sets:
            try:
                sources = expand([path for path in paths if path != STDLIB], data.source, key)
            except UsageError as error:
                yield from map(recipe_problem, error.violations)
                continue
            if any(needs_pyarrow(source) for source in sources):
                yield from _package("pyarrow", f"{key}: {sources[0].name}")
            kind = sources[0].kind if sources else "text"
            if data.source is None and (reason := unfit_source(recipe.task, kind)):
                yield recipe_problem(f"{key}: {reason}, and these are {kind} files")


def _tokenizer(recipe: Recipe) -> Iterator[Problem]:
    """Why there is no tokenizer, or its ids do not fit; files that say nothing of these are left to ranks."""
    kind, _, place = recipe.data.tokenizer.partition(":")
    vocabulary, directory = recipe.architecture.vocab_size, Path(hub.local_path(place))
    if kind != "hf":
        return
    if not files.is_directory(directory):
        yield recipe_problem(
            f"data.tokenizer: {place} is no directory. Name one, or a repository of the Hub: hf:ORG/NAME"
        )
    elif why := unread_tokenizer(directory):
        yield recipe_problem(f"data.tokenizer: {why}")
    elif not has_tokenizer(directory):
        yield recipe_problem(f"data.tokenizer: {place} holds no tokenizer (tokenizer.json, ...)")
    yield from _package("transformers", "data.tokenizer: hf:")
    if (highest := _highest_id(directory / "tokenizer.json")) >= vocabulary:
        yield recipe_problem(
            f"data.tokenizer: {place} has ids up to {highest}, the model's vocab_size is {vocabulary}"
        )


def _highest_id(path: Path) -> int:
    """The highest id in a tokenizer.json, added tokens included; -1 where nothing says."""
    try:
        found = json.loads(files.content(path, _TOKENIZER_BYTES))
        vocabulary: Any = found["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in found.get("added_tokens") or ()]
        return max((number for number in (*ids, *added) if isinstance(number, int)), default=-1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return -1


def _package(name: str, what: str) -> Iterator[Problem]:
    if importlib.util.find_spec(name) is None:
        yield hardware_problem(f"{what} needs {name}: pip install 'mcore-bundle[data]'")


def _find_write_problems(what: str, directory: Path, key: str) -> Iterator[Problem]:
    """Why a directory, which need not be there yet, cannot be written to."""
    try:
        there = next(path for path in (directory, *directory.parents) if _exists(path))
        usable = there.is_dir()
    except (OSError, ValueError) as error:
        yield recipe_problem(f"{what} {str(directory)[:200]}: {error}")
        return
    if not usable:
        yield recipe_problem(f"{what} {directory}: {there} is no directory")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield hardware_problem(
            f"{what} {directory}: {there} may not be written to, by this user or on this file system; "
            f"name another place with {key}"
        )


def _exists(path: Path) -> bool:
    """Whether something has this name, be it a link to nothing. Raises OSError or ValueError for no name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
