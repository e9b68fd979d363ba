"""What a row says of right answers: the one that exact and math compare with, and the tests of code."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bundle.errors import format_value

# Where rows in verl's form have it.
VERL_GROUND_TRUTH_FIELD = "reward_model.ground_truth"


class MissingReference(Exception):
    """Why a row has no right answer; the text begins with the field."""


def find_reference(row: Mapping[str, Any], fields: Sequence[str], pattern: str | None = None) -> str:
    """Return the right answer of a row: the last match of `pattern` in the first of `fields` that it has.

    A pattern with a group means the group. A number is taken as JSON writes it. Raise MissingReference for a
    row without these fields, another kind of value, and a text without a match.
    """
    name, value = _find_field(row, fields)
    if isinstance(value, bool | int | float):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise MissingReference(f"field {name}: must be text or a number, but is {format_value(value)}")
    if pattern is not None:
        match = None
        for match in re.finditer(pattern, value):  # noqa: B007  # the last one counts
            pass
        text: str | None = match[match.re.groups] if match else None
        if text is None:
            raise MissingReference(
                f"field {name}: text {format_value(value)} does not match pattern {format_value(pattern)}"
            )
        value = text
    reference = value.strip()
    if not reference:
        raise MissingReference(f"field {name}: the reference answer is blank")
    return reference


def find_tests(row: Mapping[str, Any], field: str) -> list[str]:
    """Return the tests of a row: a text is one test. Raise MissingReference for a row without tests."""
    value = _find_field(row, (field,))[1]
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not all(isinstance(test, str) and test.strip() for test in tests):
        raise MissingReference(
            f"field {field}: must be text that is not blank, or a list of such texts, but is"
            f" {format_value(value)}"
        )
    if not tests:
        raise MissingReference(f"field {field}: the list of tests is empty")
    return tests


def _find_field(row: Mapping[str, Any], fields: Sequence[str]) -> tuple[str, Any]:
    """Return the first field that a row has, with its value; dots lead into objects."""
    for name in fields:
        value: Any = row
        for part in [name] if name in row else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return name, value
    columns = f"fields of the row: {', '.join(map(str, row))[:200]}" if row else "the row has no fields"
    raise MissingReference(f"field {' or '.join(fields)}: missing or null ({columns})")
