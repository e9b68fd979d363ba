"""`python -m tools.images`: what the images are made of, and whether everything that says so agrees."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from bundle.environment import packages
from bundle.environment.image import RECORD_FILE
from bundle.errors import UsageError
from tools import command
from tools.images import agreement, definition, identity, locks, page, pins, plan

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="The container images."
)
Root = Annotated[Path, typer.Option("--root", help="The checkout with docker-bake.json.")]
Stacks = Annotated[list[str] | None, typer.Argument(metavar="[STACK]...", help="Without one: all of them.")]
Targets = Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...", help="Without one: all of them.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")]


@app.command("fingerprint")
def print_fingerprints(names: Targets = None, root: Root = Path(), as_json: Json = False) -> None:
    """The digest of everything that an image is made from."""
    found = _fingerprints(root, names)
    print(json.dumps(found) if as_json else "\n".join(f"{d} {name}" for name, d in found.items()))


@app.command("matrix")
def print_matrix(
    printed: Annotated[
        Path, typer.Argument(metavar="FILE", help="What bake --print wrote; - for standard input.")
    ],
    root: Root = Path(),
    before: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Leave out what has these fingerprints.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The jobs of the build workflow: one for each image and platform."""
    then = plan.digests(_read(before), str(before)) if before else {}
    jobs = plan.matrix(plan.read(_read(printed)), _fingerprints(root, None), then)
    if as_json:
        print(json.dumps({"include": jobs}))
    else:
        print("\n".join(f"{job['target']:<28}{job['platform']:<14}{job['runner']}" for job in jobs))


@app.command()
def stamp(
    name: Annotated[str, typer.Option("--stack", help="A stack of docker-bake.json.")],
    revision: Annotated[str, typer.Option(help="The commit that the image is built from.")] = "",
    inputs: Annotated[str, typer.Option(help="The digest of its inputs, as `fingerprint` says.")] = "",
    output: Annotated[Path, typer.Option(help="Where the record goes.")] = Path(RECORD_FILE),
    root: Root = Path(),
) -> None:
    """Write what this image is, once it is built; fails when it is not what was defined."""
    made = identity.stamp(definition.load(root), name, packages.detect(), revision, inputs)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(made.to_json())
    print(output)


@app.command()
def check(
    root: Root = Path(),
    printed: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Also what bake --print all wrote; - for stdin."),
    ] = None,
    release: Annotated[bool, typer.Option(help="Also fail for a digest or hash that is not filled.")] = False,
) -> None:
    """Name every place that does not follow docker-bake.json; ends with 2 if there is one."""
    images, project = definition.load(root), locks.project(root)
    found = [*agreement.disagreements(root, images, project)]
    if printed:
        found += agreement.of_plan(plan.read(_read(printed)), root, images, project)
    if release:
        found += agreement.unfilled(images)
    if found:
        raise UsageError(f"{len(found)} to put right", found)
    print("Everything follows docker-bake.json.")


@app.command("fill")
def fill_pins(root: Root = Path()) -> None:
    """Fill the empty digests and hashes, from where they are published; ends with 2 if one is left."""
    filled, failures = pins.fill(root)
    print("\n".join(filled))
    write_page(root)
    if failures:
        raise UsageError(f"{len(failures)} could not be read", failures)


@app.command("page")
def write_page(root: Root = Path()) -> None:
    """Write docs/images.md, and which images `launch` knows of."""
    images, project = definition.load(root), locks.project(root)
    made = {page.FILE: page.markdown(images), page.MATRIX: page.matrix(images, project.version)}
    for file, text in made.items():
        (root / file).write_text(text)
        print(root / file)


@app.command("lock")
def write_locks(names: Stacks = None, root: Root = Path()) -> None:
    """Write the input and, with a hash for every file, the lock of a stack."""
    images, project = definition.load(root), locks.project(root)
    for name in names or images.stacks:
        for file in locks.lock(root, images, project, name):
            print(file)


def _fingerprints(root: Path, names: list[str] | None) -> dict[str, str]:
    images = definition.load(root)
    return {
        target.name: identity.fingerprint(root, images, target)
        for target in definition.chosen(images, names or ())
    }


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    return data.decode(errors="replace")


if __name__ == "__main__":
    command.run(app, "tools.images")
