"""`mcore-bundle init`: write a commented recipe for a model and a data file."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer

from bundle import files
from bundle.cli import options
from bundle.cli.building import DEFAULT_EPOCHS_BY_TASK, KeyChoice, TaskSpec, build_recipe
from bundle.cli.request import JobRequest
from bundle.errors import UsageError
from bundle.recipe.document import to_yaml

_HEAD_COMMENT = "# Written by `mcore-bundle init`; docs/recipe.md lists every key.\n"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def init(
    model: options.Model,
    data: options.Data,
    task: Annotated[
        str,
        typer.Option(
            callback=options.allow_only(DEFAULT_EPOCHS_BY_TASK),
            help=f"Choose one of {', '.join(DEFAULT_EPOCHS_BY_TASK)}.",
        ),
    ] = "sft",
    lora: options.Lora = False,
    epochs: options.Epochs = None,
    overrides: options.Overrides = None,
    hardware: options.Hardware = "",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            parser=options.parse_nonempty_path,
            metavar="FILE",
            help="Where to write the recipe.",
        ),
    ] = Path("recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a commented recipe for a model and its data; plan, check and train read it."""
    if output.exists() and not force:
        raise UsageError(
            f"--output {output}: this file exists. Name another one, or replace it with --force."
        )
    request = JobRequest(overrides=overrides)
    built = build_recipe(TaskSpec(task, model, data, lora, epochs, hardware, request))
    files.write_text(output, _HEAD_COMMENT + "".join(_format_yaml_with_reasons(_build_tree(built.choices))))
    shell_path = shlex.quote(str(output if output.suffix in (".yaml", ".yml") else output.absolute()))
    print(f"written: {output}")
    print("\n".join(f"next: mcore-bundle {verb} {shell_path}" for verb in ("plan", "check", "train")))


def _build_tree(choices: Iterable[KeyChoice]) -> dict[str, Any]:
    """Return the choices as the sections of a recipe, each choice under the last part of its key."""
    tree: dict[str, Any] = {}
    for choice in choices:
        *sections, last = choice.key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = choice
    return tree


def _format_yaml_with_reasons(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield YAML with a comment, the reason, before each key."""
    for name, node in tree.items():
        if isinstance(node, KeyChoice):
            yield f"# {node.reason}\n{to_yaml({name: node.value})}"
        else:
            yield f"{name}:\n{indent(''.join(_format_yaml_with_reasons(node)), '  ')}"
