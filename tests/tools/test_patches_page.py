"""docs/patches.md is made from the list."""

from pathlib import Path

from bundle.patches.catalogue import PATCHES, TRAPS
from tools.patches.page import markdown

PAGE = Path(__file__).parents[2] / "docs/patches.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == markdown(), "run: python -m tools.patches.page > docs/patches.md"


def test_the_page_says_which_release_needs_what():
    rows = {line.split("|")[1].strip(): line for line in markdown().splitlines() if line.startswith("| [")}
    assert len(rows) == len(PATCHES)
    row = rows["[restricted-unpickle](#restricted-unpickle)"]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        "yes",
        "yes",
        "-",
        "-",
        "-",
        "0.17.0",
        "-",
        "-",
    ]
    for trap in TRAPS:
        assert trap.cause in markdown()
