"""docs/recipe.md, made from the schema: `python -m bundle.recipe.reference > docs/recipe.md`."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from bundle.recipe.recipe import Recipe
from bundle.recipe.violations import section_of

ABOUT = """# The recipe

A job is one YAML file. `mcore-bundle recipes list` names those that come with the package and
`mcore-bundle recipes show demo` prints one to begin with. On a command line `--set section.key=value` changes
a key; values are YAML.

Unknown keys, impossible values and sections that contradict each other are refused together, each with its
line. This page is made from the schema (`python -m bundle.recipe.reference`).
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([ABOUT, *_section("", Recipe)])


def _section(path: str, schema: type[BaseModel]) -> Iterator[str]:
    yield f"## {path or 'Top level'}\n"
    if path:
        yield f"{(schema.__doc__ or '').strip()}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    properties = schema.model_json_schema(by_alias=True)
    nested = []
    for name, field in schema.model_fields.items():
        key = field.alias or name
        sections = section_of(field.annotation)
        nested += [(f"{path}.{key}" if path else key, section) for section in sections]
        value = "section" if sections else _value(properties["properties"][key])
        default = "**required**" if field.is_required() else _default(properties["properties"][key], sections)
        yield f"| `{key}` | {value} | {default} | {field.description} |"
    yield ""
    for name, section in nested:
        yield from _section(name, section)


def _value(said: dict[str, Any]) -> str:
    if "anyOf" in said:
        return " or ".join(_value(option) for option in said["anyOf"])
    if "enum" in said:
        return ", ".join(f"`{value}`" for value in said["enum"])
    if "const" in said:
        return f"`{said['const']}`"
    kind = {"array": "list", "object": "mapping", "string": "text"}.get(said["type"], said["type"])
    bounds = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    # 2 ** 31 - 1 is there to keep arithmetic sane, not to inform anybody.
    limits = [f"{word} {said[name]:g}" for name, word in bounds.items() if abs(said.get(name, 2**31)) < 2**30]
    return " ".join([kind, *limits])


def _default(said: dict[str, Any], sections: list[Any]) -> str:
    return f"`{json.dumps(said['default'])}`" if "default" in said and not sections else ""


if __name__ == "__main__":
    print(markdown(), end="")
