"""`mcore-bundle images`: what the images are made of, and whether everything that says so agrees."""

import json
import sys
from pathlib import Path

import typer

from bundle import stack
from bundle.errors import UsageError
from bundle.images import RECORD, definition, record
from bundle.images.fingerprint import fingerprint
from bundle.images.targets import chosen

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="The container images."
)
ROOT = typer.Option(Path(), "--root", help="The checkout with docker-bake.json.")
STACKS = typer.Argument(None, metavar="[STACK]...", help="Without one: all of them.")
TARGETS = typer.Argument(None, metavar="[TARGET]...", help="Without one: all of them.")
JSON = typer.Option(False, "--json", help="One JSON object instead of lines.")


@app.command("fingerprint")
def print_fingerprints(names: list[str] = TARGETS, root: Path = ROOT, as_json: bool = JSON) -> None:
    """The digest of everything that an image is made from."""
    images = definition.load(root)
    found = {target.name: fingerprint(root, images, target) for target in chosen(images, names or ())}
    print(json.dumps(found) if as_json else "\n".join(f"{d} {name}" for name, d in found.items()))


@app.command("matrix")
def print_matrix(
    plan: Path = typer.Argument(metavar="FILE", help="What bake --print wrote; - for standard input."),
    root: Path = ROOT,
    before: Path = typer.Option(None, metavar="FILE", help="Leave out what has these fingerprints."),
    as_json: bool = JSON,
) -> None:
    """The jobs of the build workflow: one for each image and platform."""
    from bundle.images import matrix
    from bundle.images import plan as planning

    images = definition.load(root)
    now = {target.name: fingerprint(root, images, target) for target in chosen(images, ())}
    then = matrix.digests(_read(before), str(before)) if before else {}
    jobs = matrix.matrix(planning.read(_read(plan)), now, then)
    if as_json:
        print(json.dumps({"include": jobs}))
    else:
        print("\n".join(f"{job['target']:<28}{job['platform']:<14}{job['runner']}" for job in jobs))


@app.command()
def stamp(
    stack_name: str = typer.Option(..., "--stack", help="A stack of docker-bake.json."),
    revision: str = typer.Option("", help="The commit that the image is built from."),
    inputs: str = typer.Option("", help="The digest of its inputs, as `images fingerprint` says."),
    output: Path = typer.Option(Path(RECORD), help="Where the record goes."),
    root: Path = ROOT,
) -> None:
    """Write what this image is, once it is built; fails when it is not what was defined."""
    origin = record.Origin(stack_name, revision, inputs)
    made = record.stamp(definition.load(root), origin, stack.detect())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(made.text())
    print(output)


@app.command()
def check(
    root: Path = ROOT,
    plan: Path = typer.Option(
        None, metavar="FILE", help="Also what bake --print all wrote; - for standard input."
    ),
    release: bool = typer.Option(False, help="Also fail for a digest or hash that is not filled."),
) -> None:
    """Name every place that does not follow docker-bake.json; ends with 2 if there is one."""
    from bundle.images import agreement, project
    from bundle.images import plan as planning

    images, own = definition.load(root), project.read(root)
    found = [*agreement.disagreements(root, images, own)]
    if plan:
        found += agreement.of_plan(planning.read(_read(plan)), root, images, own)
    if release:
        found += agreement.unfilled(images)
    if found:
        raise UsageError(f"{len(found)} to put right", found)
    print("Everything follows docker-bake.json.")


@app.command("page")
def write_page(root: Path = ROOT) -> None:
    """Write docs/images.md."""
    from bundle.images import page

    (root / page.FILE).write_text(page.markdown(definition.load(root)))
    print(root / page.FILE)


@app.command("lock")
def write_locks(names: list[str] = STACKS, root: Path = ROOT) -> None:
    """Write the input and, with a hash for every file, the lock of a stack."""
    from bundle.images import locking, project

    images, own = definition.load(root), project.read(root)
    for name in names or images.stacks:
        for file in locking.lock(root, images, own, name):
            print(file)


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    return data.decode(errors="replace")
