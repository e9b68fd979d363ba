"""Make a Recipe of a name or a file and a command line's overrides, and report every violation at once."""

import copy
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from bundle import files, hub
from bundle.architectures import adapters, from_config, read_config
from bundle.architectures.tensors import Tensors
from bundle.errors import EnvironmentUnfit, UsageError, find_nearest, format_suggestion, format_value
from bundle.recipe import chat_template, rules
from bundle.recipe.completion import SHOWN_SETTING_KEYS, complete
from bundle.recipe.document import MOST_CHARACTERS, KeyPath, YamlDocument, parse, parse_value
from bundle.recipe.recipe import Recipe, flatten

# pydantic's mark of an invalid key in a mapping, and the words of its messages that are replaced.
_PYDANTIC_KEY_MARKER = "[key]"
_PYDANTIC_MESSAGE_REPLACEMENTS = {
    "Input should": "must",
    "String should": "must",
    "Value should": "must",
    "Tuple should": "must",
    " after validation": "",
    "tuple": "list",
    "dictionary": "mapping",
    "item, not 0": "item",
}

# In a checkout a link to launch/recipes; a wheel holds the files themselves.
RECIPE_DIRECTORY = pathlib.Path(__file__).parent / "recipes"


def list_built_in() -> list[str]:
    """Return the names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in RECIPE_DIRECTORY.glob("*.yaml"))


def describe_built_in(name: str) -> str:
    """Return the first comment of a built-in recipe as one line; it says what the recipe is for."""
    lines = find_recipe(name).read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


def load(name_or_path: str | pathlib.Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a built-in name or of a file, changed by overrides like "train.steps=10".

    Raise UsageError with everything that is wrong, each with its file and line or its `--set`.
    """
    return _build_recipe(_read_document(name_or_path, overrides), f"recipe {name_or_path}")


def load_values(name_or_path: str | pathlib.Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values in the file of a recipe, changed by overrides; keys that are left out stay so."""
    return _read_document(name_or_path, overrides).values


def _read_document(name_or_path: str | pathlib.Path, overrides: Sequence[str]) -> YamlDocument:
    path = find_recipe(name_or_path)
    try:
        text = files.read_content(path, MOST_CHARACTERS).decode()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text: {error}") from error
    document = parse(text, str(path))
    for override in overrides:
        _apply_override(document, override)
    return document


def from_mapping(values: Mapping[str, Any], origin: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a mapping, such as a saved dump, with overrides as `load` takes them.

    Raise UsageError with everything that is wrong. Missing keys may be filled into the mapping's sections.
    """
    document = YamlDocument(dict(values))
    for override in overrides:
        _apply_override(document, override)
    return _build_recipe(document, origin)


def with_epochs_as_steps(recipe: Recipe, samples: int) -> Recipe:
    """Return the recipe with the steps of its epochs over `samples` samples; unchanged where it has none.

    Raise UsageError where these steps break a rule, such as a warm-up that is longer.
    """
    if (epochs := recipe.train.epochs) is None:
        return recipe
    values, steps = recipe.dump(), recipe.train.count_steps(epochs, samples)
    values["train"] |= {"epochs": None, "steps": steps}
    return from_mapping(values, f"recipe {recipe.name} (epochs: {epochs:g}, {samples:,} samples each)")


def find_recipe(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """Return the file of a recipe: a path as it is, a bare name among the built-in recipes."""
    text = str(name_or_path)
    if "/" in text or text.endswith((".yaml", ".yml")):
        return pathlib.Path(text)
    names = list_built_in()
    if text in names:
        return RECIPE_DIRECTORY / f"{text}.yaml"
    raise UsageError(
        f"no recipe named {text!r}{format_suggestion(find_nearest(text, names))}",
        [f"built in: {', '.join(names)}", "to name a file, give its path, such as ./mine.yaml"],
    )


def _apply_override(document: YamlDocument, override: str) -> None:
    """Set "a.b=value" in the document; sections that are missing or null are made."""
    name, equals, text = override.partition("=")
    parts = tuple(name.strip().split("."))
    # Variables may be secrets: their values are never shown.
    is_hidden = equals and parts[0] == "environment"
    origin = f"--set {name.strip()}=..." if is_hidden else f"--set {override[:100]}"
    if not equals or not all(parts):
        document.violations.append(f"{origin}: must look like section.key=value")
        return
    mapping = document.values
    for depth, part in enumerate(parts[:-1], start=1):
        if mapping.get(part) is None:
            mapping[part] = {}
            document.locations[parts[:depth]] = origin
        mapping = mapping[part]
        if not isinstance(mapping, dict):
            document.violations.append(f"{origin}: {'.'.join(parts[:depth])} is not a section")
            return
    mapping[parts[-1]] = parse_value(text, origin)
    # What was written below it is gone.
    for path in [path for path in document.locations if path[: len(parts)] == parts]:
        del document.locations[path]
    document.locations[parts] = origin


def _build_recipe(document: YamlDocument, origin: str) -> Recipe:
    violations = list(document.violations)
    _pin_commits(document, violations)
    _fill_missing_config_keys(document, violations)
    _merge_adapter_config(document, violations)
    present_keys = {key for key, _ in flatten(document.values)}
    origins = complete(document.values) | _inline_template_and_get_origin(document, violations)
    recipe = _validate_without_unknown_keys(document, violations)
    is_readable = _check_architecture(document, violations)
    if recipe is not None and is_readable:
        recipe = _with_expanded_lora_targets(recipe)
        for key, reason in rules.find_violations(recipe):
            violations.append(_format_violation(document, _split_key(key), reason))
    if recipe is None or violations:
        raise UsageError(f"{origin} cannot be used", violations)
    locations = {
        key: document.find_location(tuple(key.split("."))) or "the recipe"
        for key in SHOWN_SETTING_KEYS
        if key in present_keys
    }
    vars(recipe)["origins"] = locations | origins
    return recipe


def _with_expanded_lora_targets(recipe: Recipe) -> Recipe:
    """Return the recipe with the names of all projections, where model.lora asks for all."""
    if recipe.model.lora is None or recipe.model.lora.targets != (adapters.ALL_LINEAR,):
        return recipe
    values = recipe.dump()
    values["model"]["lora"]["targets"] = adapters.list_shortest_linear_suffixes(Tensors(recipe.architecture))
    return Recipe.model_validate(values)


def _validate_without_unknown_keys(document: YamlDocument, violations: list[str]) -> Recipe | None:
    """Return the recipe without its unknown keys; None where the other keys break the schema."""
    values = document.values
    while True:
        try:
            return Recipe.model_validate(values)
        except ValidationError as error:
            violations += _explain_errors(error, document)
            unknown = {detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"}
            if len(unknown) < error.error_count():
                return None
            values = _remove_keys(values, unknown)  # which may lack what only a misspelt key would have given


def _remove_keys(values: dict[str, Any], paths: set[KeyPath], prefix: KeyPath = ()) -> dict[str, Any]:
    """Return `values` without the keys under `paths`."""

    def remove_keys(value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return _remove_keys(value, paths, path)
        if isinstance(value, list | tuple):
            return [remove_keys(item, (*path, number)) for number, item in enumerate(value)]
        return value

    return {
        name: remove_keys(value, (*prefix, name))
        for name, value in values.items()
        if (*prefix, name) not in paths
    }


def _pin_commits(document: YamlDocument, violations: list[str]) -> None:
    """Pin the recipe's models and data sets of the Hugging Face Hub to commits.

    The files of these commits are then in the Hub's cache.
    """
    document.values = document.values | {
        name: copy.deepcopy(document.values[name])
        for name in ("model", "data", "rl")
        if name in document.values
    }
    model, data, rl = (document.values.get(name) for name in ("model", "data", "rl"))
    if isinstance(rl, dict) and isinstance(evaluation := rl.get("evaluation"), dict):
        _download_and_pin_key(document, evaluation, ("rl", "evaluation", "path"), "dataset", violations)
    if isinstance(model, dict):
        _download_and_pin_key(document, model, ("model", "path"), "model", violations)
        if isinstance(lora := model.get("lora"), dict):
            _download_and_pin_key(document, lora, ("model", "lora", "path"), "model", violations)
    if not isinstance(data, dict):
        return
    _download_and_pin_key(document, data, ("data", "path"), "dataset", violations)
    _download_and_pin_key(document, data, ("data", "tokenizer"), "model", violations, "hf:")
    sets = data.get("validation_sets")
    for name, validation_set in sets.items() if isinstance(sets, dict) else ():
        if isinstance(validation_set, dict):
            _download_and_pin_key(
                document, validation_set, ("data", "validation_sets", name, "path"), "dataset", violations
            )


def _download_and_pin_key(
    document: YamlDocument,
    section: dict[str, Any],
    path: KeyPath,
    kind: hub.Kind,
    violations: list[str],
    prefix: str = "",
) -> None:
    """Replace each repository that a key names by the pinned one; other values stay as they are."""
    key = str(path[-1])
    value = section.get(key)
    try:
        if isinstance(value, str) and value.startswith(prefix):
            section[key] = prefix + hub.download_and_pin(value.removeprefix(prefix), kind)
        elif isinstance(value, list | tuple):
            section[key] = [
                hub.download_and_pin(repository, kind) if isinstance(repository, str) else repository
                for repository in value
            ]
    except UsageError as error:
        violations.append(_format_violation(document, path, str(error)))
    except EnvironmentUnfit as error:
        raise EnvironmentUnfit(_format_violation(document, path, str(error))) from error


def _fill_missing_config_keys(document: YamlDocument, violations: list[str]) -> None:
    """Merge model.path's config.json into model.config, whose keys count first; the dump is complete then."""
    model = document.values.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str):
        return
    config = model.get("config") or {}
    try:
        file_config = read_config(pathlib.Path(hub.build_cache_path_if_pinned(model["path"])))
    except UsageError as error:
        violations.append(_format_violation(document, ("model", "path"), str(error)))
        return
    if isinstance(config, dict):
        document.values["model"] = model | {"config": file_config | config}


def _merge_adapter_config(document: YamlDocument, violations: list[str]) -> None:
    """Fill in the settings of model.lora.path's adapter_config.json; only dropout may differ from them."""
    model = document.values.get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(lora, dict) or not isinstance(lora.get("path"), str):
        return
    try:
        adapter_config = adapters.read_lora_settings(
            pathlib.Path(hub.build_cache_path_if_pinned(lora["path"]))
        )
    except UsageError as error:
        path = ("model", "lora", "path")
        violations += [
            _format_violation(document, path, reason) for reason in error.violations or (str(error),)
        ]
        document.values["model"] = model | {"lora": None}  # all that it lacks would be said as well
        return
    adapter_config["dropout"] = lora.get("dropout", adapter_config["dropout"])
    violations += [
        _format_violation(
            document,
            ("model", "lora", key),
            f"{format_value(lora[key])} differs from {format_value(value)} in {lora['path']}. Remove the key",
        )
        for key, value in adapter_config.items()
        if key in lora and _sort_if_list(lora[key]) != _sort_if_list(value)
    ]
    document.values["model"] = model | {"lora": lora | adapter_config}


def _inline_template_and_get_origin(document: YamlDocument, violations: list[str]) -> dict[str, str]:
    """Replace the name of a chat template by its text, which makes a dump complete; return its origin."""
    data = document.values.get("data")
    name = data.get("template") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(name, str) or chat_template.is_text(name):
        return {}
    if name in chat_template.NAMES_WITHOUT_FILE:
        return {}
    path = ("data", "template")
    try:
        document.values["data"] = data | {"template": chat_template.read_built_in_or_file(name)}
    except UsageError as error:
        violations.append(_format_violation(document, path, str(error)))
        document.values["data"] = data | {"template": chat_template.PLAIN_TEMPLATE}
    location = document.find_location(path)
    return {"data.template": f"{name}, {location}" if location else name}


def _sort_if_list(value: Any) -> Any:
    """Return a list of names in sorted order, and any other value as it is."""
    return sorted(map(str, value)) if isinstance(value, list | tuple) else value


def _check_architecture(document: YamlDocument, violations: list[str]) -> bool:
    """Return whether model.config describes an architecture; add the reasons why not to `violations`."""
    model = document.values.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(config, dict) or not config:
        return False  # the schema has said so
    try:
        from_config(config)
    except UsageError as error:
        for violation in error.violations:
            key, _, reason = violation.partition(" ")
            name = key.removesuffix(":")
            path, text = (
                (("model", "config", name), reason) if name in config else (("model", "config"), violation)
            )
            violations.append(_format_violation(document, path, text))
        return False
    return True


def _split_key(key: str) -> KeyPath:
    """Return the parts of a dotted key; the place of a reward in its list is a number."""
    parts: list[str | int] = [*key.split(".")]
    if key.startswith("rl.rewards."):
        parts[2] = int(parts[2])
    return tuple(parts)


def _format_violation(document: YamlDocument, path: KeyPath, reason: str) -> str:
    """Return a line such as "demo.yaml:12: train.steps: reason"."""
    location = document.find_location(path)
    name = ".".join(map(str, path))
    return f"{location}: {name}: {reason}" if location else f"{name}: {reason}"


def _explain_errors(error: ValidationError, document: YamlDocument) -> Iterator[str]:
    """Yield one line for each violation that pydantic found, in the words of a recipe's user."""
    known = list(Recipe.list_key_paths())
    for detail in error.errors(include_url=False, include_context=False):
        path: KeyPath = tuple(part for part in detail["loc"] if part != _PYDANTIC_KEY_MARKER)
        match detail["type"]:
            case "extra_forbidden":
                reason = f"unknown key{_suggest_keys('.'.join(map(str, path)), known)}"
            case "missing":
                reason = "missing"
            case "value_error":
                reason = detail["msg"].removeprefix("Value error, ")
            case "model_type":
                reason = f"must be a section with keys, but is {format_value(detail['input'])}"
            case _:
                message = detail["msg"]
                for pydantic_words, recipe_words in _PYDANTIC_MESSAGE_REPLACEMENTS.items():
                    message = message.replace(pydantic_words, recipe_words)
                reason = f"{message[:1].lower()}{message[1:]}, but is {format_value(detail['input'])}"
        yield _format_violation(document, path, reason)


def _suggest_keys(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" with keys of the same last part anywhere, else with the nearest spellings.

    Where no key is near, return the keys that its section has.
    """
    section, _, last = name.rpartition(".")
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = same or find_nearest(name, known, cutoff=0.75)
    if not near:
        lasts = {key.rpartition(".")[2]: key for key in known}
        near = [lasts[part] for part in find_nearest(last, lasts, cutoff=0.75)]
    if near:
        return format_suggestion(near[:3])
    prefix = f"{section}." if section else ""
    keys = {key.removeprefix(prefix).partition(".")[0]: None for key in known if key.startswith(prefix)}
    return f"; {section or 'a recipe'} has {', '.join(keys)}"
