"""docs/recipe.md, made from the schema: `python -m tools.recipe > docs/recipe.md`."""

import json
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any, Literal, get_args, get_origin

from bundle.recipe.recipe import Recipe
from bundle.recipe.section import Key, keys_of

ABOUT = """# The recipe

A job is one YAML file. `mcore-bundle recipes list` names those that come with the package and
`mcore-bundle recipes show demo` prints one to begin with. On a command line `--set section.key=value` changes
a key; values are YAML.

Unknown keys, impossible values and sections that contradict each other are refused together, each with its
line. This page is made from the schema (`python -m tools.recipe`).
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join([ABOUT, *_section("", Recipe)])


def _section(path: str, schema: type[Any]) -> Iterator[str]:
    yield f"## {path or 'Top level'}\n"
    if path:
        yield f"{(schema.__doc__ or '').strip()}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    keys = keys_of(schema)
    for key in keys:
        value = "section" if key.section else _value(key)
        default = "**required**" if key.required else _default(key)
        yield f"| `{key.name}` | {value} | {default} | {key.description} |"
    yield ""
    for key in keys:
        if key.section:
            yield from _section(f"{path}.{key.name}" if path else key.name, key.section)


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "text", dict: "mapping", tuple: "list"}
_BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


def _value(key: Key) -> str:
    options = get_args(key.kind) if get_origin(key.kind) is Literal else ()
    kind = ", ".join(f"`{value}`" for value in options) or _KINDS[get_origin(key.kind) or key.kind]
    # 2 ** 31 - 1 is there to keep arithmetic sane, not to inform anybody.
    limits = [f"{word} {key.limits[name]:g}" for name, word in _BOUNDS.items() if _informs(key, name)]
    return " ".join([kind, *limits]) + (" or null" if key.nullable else "")


def _informs(key: Key, limit: str) -> bool:
    return limit in key.limits and abs(key.limits[limit]) < 2**30


def _default(key: Key) -> str:
    return "" if key.section or key.default is MISSING else f"`{json.dumps(key.default)}`"


if __name__ == "__main__":
    print(markdown(), end="")
