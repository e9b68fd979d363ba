"""What pydantic found, in the words of a recipe's user: key, place, reason, and what was probably meant."""

import difflib
from collections.abc import Iterator

from pydantic_core import ValidationError

from bundle.errors import shown
from bundle.recipe.document import Document, Path
from bundle.recipe.section import keys_of
from bundle.recipe.validation import UNKNOWN


def located(document: Document, path: Path, reason: str) -> str:
    """ "demo.yaml:12: train.steps: reason"."""
    place = document.place(path)
    name = ".".join(map(str, path))
    return f"{place}: {name}: {reason}" if place else f"{name}: {reason}"


def explained(error: ValidationError, document: Document, schema: type) -> list[str]:
    """One line per violation."""
    known = list(keys(schema))
    lines = []
    for found in error.errors(include_url=False, include_context=False):
        path: Path = tuple(found["loc"])
        if found["type"] == UNKNOWN:
            reason = f"unknown key{meant('.'.join(map(str, path)), known)}"
        elif found["type"] == "missing":
            reason = "missing"
        elif found["type"] == "value_error":
            reason = found["msg"].removeprefix("Value error, ")
        else:
            said = found["msg"].replace("Input should be", "must be")
            reason = f"{said[:1].lower()}{said[1:]}, is {shown(found['input'])}"
        lines.append(located(document, path, reason))
    return lines


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included."""
    for key in keys_of(schema):
        yield prefix + key.name
        if key.section:
            yield from keys(key.section, f"{prefix}{key.name}.")


def meant(name: str, known: list[str]) -> str:
    """ "; did you mean ...?" with keys of the same last part anywhere, else with the nearest spellings."""
    last = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(name[:100], known, n=2, cutoff=0.75)
    if not near:
        lasts = {key.rpartition(".")[2]: key for key in known}
        near = [lasts[part] for part in difflib.get_close_matches(last[:100], list(lasts), n=2, cutoff=0.75)]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""
