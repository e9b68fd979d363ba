"""Exit codes are the documented ones, and an error says all its violations at once."""

import math
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from bundle.errors import ExitCode, UsageError, format_bytes, format_validation_errors

PAGE = Path(__file__).parents[1] / "docs" / "exit-codes.md"


def test_the_page_lists_every_code():
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: int(code) for code in ExitCode}


def test_an_error_lists_every_violation():
    error = UsageError("both are wrong", ["this", "that"])
    assert str(error).splitlines() == ["both are wrong", "  - this", "  - that"]
    assert error.code == 2


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (None, "an unknown size"),
        (math.inf, "no limit"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (191_557_361_664, "178.4 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_they_fill(amount, shown):
    assert format_bytes(amount) == shown


def test_what_is_wrong_with_a_document_is_said_by_key_and_takes_over_no_terminal():
    class Pin(BaseModel, extra="forbid"):
        versions: dict[str, int]

    with pytest.raises(ValidationError) as refused:
        Pin.model_validate({"versions": {"a\x1b[31m": "x"}, "b" * 1000: 1})
    first, second = format_validation_errors(refused.value)
    assert first.startswith(r"versions.a\x1b[31m: ")
    assert second.startswith(f"{'b' * 200}: ")
