"""docs/recipe.md, made from the JSON schema: `python -m tools.recipe > docs/recipe.md`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bundle.recipe import Recipe
from bundle.recipe.defaults import DEFAULTS_BY_TRAINING_KIND, LORA_DEFAULTS

ABOUT = """# The recipe

A job is one YAML file. `mcore-bundle recipes list` lists those that come with the package, and
`mcore-bundle recipes show demo` prints one to begin with. On a command line `--set section.key=value` changes
a key; values are YAML.

One message lists all unknown keys, impossible values and sections that contradict each other, each with its
line. `mcore-bundle recipes schema` prints a recipe's JSON schema, with which editors complete and explain
keys; `python -m tools.recipe` makes this page from that schema.
"""

KINDS = """## What a recipe leaves out

The tokenizer is that of `model.path`, and SFT and DPO write rows with its chat template. Other keys follow
from the kind of training: the task, whether `model.path` holds weights, and whether adapters are trained. A
key in the recipe wins. `mcore-bundle plan` and `check` print each value and its origin.

Even if packs are the default, samples stay unpacked with `train.micro_batch_size` above 1 and for models
without support for packs. Models with random weights keep the defaults of the tables above. The exception is
pre-training of a model with 0.1 B parameters or more, which has its own defaults below.
"""
_KINDS = {
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def markdown() -> str:
    """The whole page."""
    schema = Recipe.model_json_schema()
    return "\n".join([ABOUT, *_section("", schema, schema["$defs"]), *_defaults()])


def _defaults() -> Iterator[str]:
    """Yield the table of what is filled in by the kind of training."""
    yield KINDS
    yield "| kind | key | default | source |\n|---|---|---|---|"
    for kind, chosen in {"LoRA": LORA_DEFAULTS, **DEFAULTS_BY_TRAINING_KIND}.items():
        for default in chosen:
            sizes = [f"from {least / 1e9:g} B parameters `{value:g}`" for least, value in default.by_size]
            value = ", ".join([f"`{json.dumps(default.value)}`", *sizes])
            yield f"| {kind} | `{default.key}` | {value} | {default.source} |"
    yield ""


def _section(path: str, section: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {path or 'Top level'}\n"
    if path:
        yield f"{section['description']}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    below = []
    for name, key in section["properties"].items():
        options = [option for option in key.get("anyOf", [key]) if option.get("type") != "null"]
        inner = [sections[o["$ref"].rpartition("/")[2]] for o in options if "$ref" in o]
        of_names = [o for each in options for o in each.get("patternProperties", {}).values() if "$ref" in o]
        below += [(f"{path}.{name}" if path else name, each) for each in inner]
        items = [option["items"] for option in options if "$ref" in option.get("items", {})]
        below += [(f"{path}.{name}", sections[item["$ref"].rpartition("/")[2]]) for item in items]
        below += [(f"{path}.{name}.NAME", sections[o["$ref"].rpartition("/")[2]]) for o in of_names]
        null = " or null" if len(options) < len(key.get("anyOf", [key])) else ""
        value = (
            "section" if inner else "list of sections" if items else " or ".join(map(_value, options)) + null
        )
        default = f"`{json.dumps(key['default'])}`" if "default" in key and not inner else ""
        if name in section.get("required", ()):
            default = "**required**"
        # pydantic leaves out a description that the section itself has.
        meaning = (key.get("description") or inner[0]["description"]).replace("|", "\\|")
        yield f"| `{name}` | {value} | {default} | {meaning} |"
    yield ""
    for name, each in below:
        yield from _section(name, each, sections)


def _value(option: Mapping[str, Any]) -> str:
    kind = ", ".join(f"`{value}`" for value in _choices(option)) or _KINDS[option["type"]]
    # 2 ** 31 - 1 is there to keep arithmetic sane, not to inform anybody.
    limits = [
        f"{word} {option[name]:g}" for name, word in _BOUNDS.items() if abs(option.get(name, 2**30)) < 2**30
    ]
    return " ".join([kind, *limits])


def _choices(option: Mapping[str, Any]) -> list[Any]:
    return [option["const"]] if "const" in option else option.get("enum", [])


if __name__ == "__main__":
    print(markdown(), end="")
