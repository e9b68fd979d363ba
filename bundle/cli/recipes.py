"""`mcore-bundle recipes`: the job files that come with the package."""

import json
import textwrap

import typer

from bundle.recipe import find, load
from bundle.recipe.builtin import about, names

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

JSON = typer.Option(False, "--json", help="One JSON object instead of text.")


@app.command("list")
def list_(as_json: bool = JSON) -> None:
    """List the built-in recipes."""
    found = [{"name": name, "about": about(name)} for name in names()]
    if as_json:
        print(json.dumps({"schema": 1, "recipes": found}, indent=2))
        return
    width = max(len(recipe["name"]) for recipe in found) + 2
    for recipe in found:
        lines = textwrap.wrap(recipe["about"], 110 - width)
        print(f"{recipe['name']:<{width}}" + f"\n{'':{width}}".join(lines))


@app.command()
def show(
    name: str = typer.Argument(help="A built-in recipe, or the path of a file."), as_json: bool = JSON
) -> None:
    """Print a recipe: its file, which may be saved and changed; with --json every key, resolved."""
    if as_json:
        print(json.dumps({"schema": 1, "recipe": load(name).dump()}, indent=2))
    else:
        load(name)
        print(find(name).read_text(), end="")
