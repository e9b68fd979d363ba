"""Exit codes are the documented ones, and an error says all its violations at once."""

import re
from pathlib import Path

from bundle.errors import ExitCode, UsageError

PAGE = Path(__file__).parents[1] / "docs" / "exit-codes.md"


def test_the_page_lists_every_code():
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {code.name: int(code) for code in ExitCode}


def test_an_error_lists_every_violation():
    error = UsageError("two things are wrong", ["this", "that"])
    assert str(error).splitlines() == ["two things are wrong", "  - this", "  - that"]
    assert error.code == 2
