"""What pydantic found, in the words of a recipe's user: key, place, reason, and what was probably meant."""

import difflib
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from bundle.recipe.document import Document, Path


def located(document: Document, path: Path, reason: str) -> str:
    """ "demo.yaml:12: train.steps: reason"."""
    place = document.place(path)
    name = ".".join(map(str, path))
    return f"{place}: {name}: {reason}" if place else f"{name}: {reason}"


def explained(error: ValidationError, document: Document, schema: type[BaseModel]) -> list[str]:
    """One line per violation."""
    known = list(keys(schema))
    lines = []
    for found in error.errors(include_url=False, include_context=False):
        path: Path = tuple(found["loc"])
        if found["type"] == "extra_forbidden":
            reason = f"unknown key{meant('.'.join(map(str, path)), known)}"
        elif found["type"] == "missing":
            reason = "missing"
        elif found["type"] == "value_error":
            reason = found["msg"].removeprefix("Value error, ")
        else:
            said = found["msg"].replace("Input should be", "must be")
            reason = f"{said[:1].lower()}{said[1:]}, is {_shown(found['input'])}"
        lines.append(located(document, path, reason))
    return lines


def keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included."""
    for name, field in schema.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for section in section_of(field.annotation):
            yield from keys(section, f"{path}.")


def section_of(annotation: object) -> list[type[BaseModel]]:
    """The section that a field holds, alone or as `Section | None`; empty for a plain value."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def meant(name: str, known: list[str]) -> str:
    """ "; did you mean ...?" with keys of the same last part anywhere, else with the nearest spellings."""
    last = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(name[:100], known, n=2, cutoff=0.75)
    if not near:
        lasts = {key.rpartition(".")[2]: key for key in known}
        near = [lasts[part] for part in difflib.get_close_matches(last[:100], list(lasts), n=2, cutoff=0.75)]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
