"""docs/recipe.md is made from the schema, and every key says what it means."""

from pathlib import Path

from bundle.recipe.recipe import Recipe
from bundle.recipe.section import keys_of
from bundle.recipe.violations import keys
from tools.recipe import markdown

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_fresh():
    assert PAGE.read_text() == markdown(), "run: python -m tools.recipe > docs/recipe.md"


def test_every_key_stands_in_the_page_with_its_meaning():
    text = markdown()
    for key in keys(Recipe):
        assert f"| `{key.rpartition('.')[2]}` |" in text

    def check(schema):
        assert schema.__doc__
        for key in keys_of(schema):
            assert key.description.endswith("."), key.name
            if key.section:
                check(key.section)

    check(Recipe)
