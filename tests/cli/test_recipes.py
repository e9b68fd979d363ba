"""The verb `recipes`."""

import json

import pytest
from typer.testing import CliRunner

from bundle.cli.recipes import app
from bundle.errors import UsageError
from bundle.recipe import from_mapping, list_built_in, load
from bundle.recipe.document import parse


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_list_names_every_recipe_and_what_it_is_for():
    text, said = run("list"), json.loads(run("list", "--json"))
    assert said["schema"] == 1 and [r["name"] for r in said["recipes"]] == list_built_in()
    for recipe in said["recipes"]:
        assert len(recipe["about"]) > 40 and recipe["name"] in text
    assert max(map(len, text.splitlines())) <= 110


def test_show_prints_a_file_that_loads_and_all_keys_as_json(tmp_path):
    (tmp_path / "mine.yaml").write_text(run("show", "demo"))
    assert load(tmp_path / "mine.yaml") == load("demo")
    assert "# " in run("show", "demo")
    assert parse(run("show", str(tmp_path / "mine.yaml")), "").values["name"] == "demo"
    assert from_mapping(json.loads(run("show", "demo", "--json"))["recipe"]) == load("demo")


def test_show_refuses_unknown_names(messages):
    with pytest.raises(UsageError, match="demo") as error:
        run("show", "dmo")
    messages("\n".join(line for line in str(error.value).splitlines() if "built in: " not in line))
