"""docs/recipe.md is made from the schema, and every key says what it means."""

import re
from pathlib import Path

from bundle.recipe import Recipe
from tools.recipe import markdown

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_fresh():
    assert PAGE.read_text() == markdown(), "run: python -m tools.recipe > docs/recipe.md"


def test_every_key_stands_under_its_section_with_what_it_means():
    above, found = "", []
    for line in markdown().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
            above = "" if section == "Top level" else f"{section}."
        elif line.startswith("| `"):
            name, value, _, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            found.append(above + name.strip("`"))
            assert value and meaning.endswith("."), line
    assert sorted(found) == sorted(Recipe.list_key_paths())
