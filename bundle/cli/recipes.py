"""`mcore-bundle recipes`: the job files that come with the package."""

import json
import textwrap
from typing import Annotated

import typer
from pydantic.json_schema import GenerateJsonSchema

from bundle.cli import options
from bundle.recipe import Recipe, describe_built_in, find_recipe, list_built_in, load

# The dialect of pydantic's schemas.
SCHEMA_DIALECT = GenerateJsonSchema.schema_dialect

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.command("list")
def list_(as_json: options.JSON_OPTION = False) -> None:
    """List the built-in recipes."""
    recipes = [{"name": name, "about": describe_built_in(name)} for name in list_built_in()]
    if as_json:
        print(json.dumps({"schema": 1, "recipes": recipes}, indent=2))
        return
    width = max(len(recipe["name"]) for recipe in recipes) + 2
    for recipe in recipes:
        lines = textwrap.wrap(recipe["about"], 110 - width)
        print(f"{recipe['name']:<{width}}" + f"\n{'':{width}}".join(lines))


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors: they complete keys and show what each means."""
    print(json.dumps({"$schema": SCHEMA_DIALECT, **Recipe.model_json_schema()}, indent=2))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A built-in recipe, or the path of a file.")],
    as_json: options.JSON_OPTION = False,
) -> None:
    """Print the file of a recipe, to save and change; with --json, every key resolved."""
    if as_json:
        print(json.dumps({"schema": 1, "recipe": load(name).dump()}, indent=2))
    else:
        load(name)
        print(find_recipe(name).read_text(), end="")
