"""`mcore-bundle images`: what the images are made of, and whether everything that says so agrees."""

from pathlib import Path

import typer

from bundle.images import definition, locking, project

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="The container images."
)
ROOT = typer.Option(Path(), "--root", help="The checkout with docker-bake.json.")


@app.command()
def lock(
    stacks: list[str] = typer.Argument(None, metavar="[STACK]...", help="Without one: all of them."),
    root: Path = ROOT,
) -> None:
    """Write images/locks/STACK.in and what uv makes of it; with a hash for every file."""
    images, own = definition.load(root), project.read(root)
    for stack in stacks or images.stacks:
        for file in locking.lock(root, images, own, stack):
            print(file)


@app.callback()
def _about() -> None:
    """The container images: versions, locks, digests, the CI matrix."""
