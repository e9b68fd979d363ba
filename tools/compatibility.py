"""The table of versions that were seen together, bundle/environment/compatibility.json, and its page.

`add` takes what runs have written (`pytest --record`, `patches verify --json`, `benchmarks.gpu`); what images
pin is read from docker-bake.json. docs/compatibility.md: `python -m tools.compatibility page`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version

from bundle import files
from bundle.environment import compatibility
from bundle.environment.compatibility import (
    COMPATIBILITY_FILE,
    PYTHON_KEY,
    Combination,
    CombinationTable,
    PinnedImage,
)
from bundle.errors import UsageError
from tools.command import run
from tools.images.definition import Definition
from tools.images.definition import load as load_definition
from tools.markdown import table

_CORE = "megatron-core"
_INTRODUCTION = """\
# Versions that were seen together

Each row of the table is a set of versions in which a command ran. `resolve` prints the best row as a file of
constraints for pip:

```console
$ mcore-bundle resolve --mcore 0.16 --backend cuda
```

The best row has the newest release that was asked for. Among rows of that release, a run on a device wins
over an emulated one, and then the latest run wins. Each pin has its reason. `--json` prints all of it as
data.

| exit code | when |
|---|---|
| 0 | A row was found. |
| 2 | The version or the backend does not exist. |
| 3 | Such versions were never seen together. `resolve` prints no constraints, and names the nearest rows. |

`python -m tools.compatibility page` makes this page from `bundle/environment/compatibility.json`. A test
compares the two.

- A version is in the table only because a command ran with it.
- A row without a commit repeats the linked page, with the date of that page.
- A row without hardware ran with stand-ins for the vendor's libraries.
"""
_IMAGES = """\
## What images pin

`docker-bake.json` pins these versions. A version is not proven if no row above has it together with its
megatron-core.
"""
_ADDING = """\
## Adding to it

Each of these commands writes down the versions that it ran in, if nothing failed. Run the last three on a
machine with the devices:

```sh
make matrix                                         # .cache/records/matrix.json
make npu-contract                                   # .cache/records/npu.json
make faults                                         # .cache/records/faults.json
mcore-bundle doctor --acceptance --json > acceptance.json
mcore-bundle patches verify --json > verify.json
python -m benchmarks.gpu --results DIRECTORY        # DIRECTORY/combination.json
```

`add` puts these versions into the table. A new row replaces a row of the same command and versions. Emulated
devices do not count as hardware, whatever the file says. Commit table and page:

```sh
python -m tools.compatibility add .cache/records/*.json acceptance.json verify.json DIRECTORY/combination.json
python -m tools.compatibility page > docs/compatibility.md
```
"""

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def add(
    records: Annotated[
        list[Path] | None, typer.Argument(help="JSON of runs; without any, only docker-bake.json is read.")
    ] = None,
) -> None:
    """Put what runs have written into the table; a command's row of the same versions is replaced."""
    known = (
        compatibility.parse_json(COMPATIBILITY_FILE.read_text("utf-8"), COMPATIBILITY_FILE.name)
        if COMPATIBILITY_FILE.exists()
        else None
    )
    rows = {_key(row): row for row in known.combinations} if known else {}
    for file in records or ():
        rows |= {_key(row): row for row in recorded(file)}
    write(COMPATIBILITY_FILE, rows.values(), load_definition(Path.cwd()))


@app.command()
def page() -> None:
    """Print docs/compatibility.md."""
    print(markdown(compatibility.load()), end="")


def recorded(file: Path) -> list[Combination]:
    """The combinations in what a run wrote. Raises UsageError."""
    try:
        document = json.loads(files.read_content(file, 1 << 24))
        rows = document.get("combinations") or [document["combination"]]
    except KeyError as error:
        raise UsageError(f"{file}: not a record of a run (it has no key {error})") from None
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{file}: not a record of a run ({error})") from None
    if rows == [None]:
        raise UsageError(f"{file}: the run failed or proved nothing, so it is not added")
    found = list(compatibility.parse_json(json.dumps(_document(rows, ())), str(file)).combinations)
    if document.get("emulated") and any(row.device_name_unless_emulated for row in found):
        named = ", ".join(
            sorted({row.device_name_unless_emulated for row in found if row.device_name_unless_emulated})
        )
        raise UsageError(f"{file}: the run used emulated devices, not {named}, so it is not added")
    return found


def write(file: Path, rows: Iterable[Combination], definition: Definition) -> None:
    """Writes the table, in the order of backends and releases, with what the images pin."""
    ordered = sorted(
        rows, key=lambda row: (row.backend, Version(row.packages[_CORE]), row.device, row.command)
    )
    seen = compatibility.parse_json(
        json.dumps(_document([_plain(row) for row in ordered], ())), "what was seen"
    )
    document = _document([_plain(row) for row in ordered], map(_plain, pinned(definition, seen)))
    compatibility.parse_json(json.dumps(document), file.name)
    files.write_text(file, json.dumps(document, indent=1) + "\n")


def pinned(definition: Definition, seen: CombinationTable) -> Iterable[PinnedImage]:
    """What each stack's images pin, and which of it was never seen beside its megatron-core."""
    for name, stack in definition.stacks.items():
        (python,) = {base.python for base in definition.bases_of(name).values()}
        packages = {**{package: pin.version for package, pin in stack.pins.items()}, PYTHON_KEY: python}
        core = packages[_CORE]
        unproven = tuple(
            package
            for package, version in packages.items()
            if package != _CORE and not seen.is_proven(stack.backend, package, version, core)
        )
        yield PinnedImage(stack=name, backend=stack.backend, packages=packages, unproven=unproven)


def markdown(of: CombinationTable) -> str:
    """The text of docs/compatibility.md."""
    core = (_CORE, "transformer-engine", "torch", PYTHON_KEY)
    head = (
        "backend",
        "megatron-core",
        "Transformer Engine",
        "torch",
        "Python",
        "beside them",
        "hardware",
        "proven",
    )
    rows = []
    for row in of.combinations:
        beside = [f"{name} {version}" for name, version in row.packages.items() if name not in core]
        where = f"[{row.source}](../{row.source})" if row.source else row.commit[:7]
        ran = ", ".join(filter(None, (f"`{row.command}`", str(row.date), where)))
        proven = f"{'' if row.device_name_unless_emulated else 'emulated: '}{'; '.join(row.proven)} ({ran})"
        versions = (row.packages.get(name, "-") for name in core)
        rows.append(
            (row.backend, *versions, ", ".join(beside) or "-", row.device_name_unless_emulated, proven)
        )
    images = (
        (f"`{image.stack}`", ", ".join(f"{name} {version}" for name, version in image.packages.items()),
         ", ".join(image.unproven) or "nothing")
        for image in of.images
    )  # fmt: skip
    return (
        "\n".join(
            [
                _INTRODUCTION,
                table(head, rows),
                *(f"- {name} {', '.join(versions)}: {note}" for (name, note), versions in _notes(of).items()),
                "",
                _IMAGES,
                table(("stack", "pins", "not proven beside its megatron-core"), images),
                _ADDING,
            ]
        ).rstrip("\n")
        + "\n"
    )


def _notes(of: CombinationTable) -> dict[tuple[str, str], list[str]]:
    """(package, note) -> the versions that it is about."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in of.combinations:
        for name, note in row.notes.items():
            versions = found.setdefault((name, note), [])
            versions += [row.packages[name]] if row.packages[name] not in versions else []
    return found


def _key(row: Combination) -> tuple[Any, ...]:
    return row.backend, row.device, row.command, tuple(sorted(row.packages.items()))


def _order(row: Combination) -> tuple[Any, ...]:
    return row.backend, Version(row.packages[_CORE]), row.device, row.command


def _plain(row: Combination | PinnedImage) -> dict[str, Any]:
    return row.model_dump(mode="json", exclude_defaults=True)


def _document(rows: Iterable[Any], images: Iterable[Any]) -> dict[str, Any]:
    return {"schema": 1, "combinations": list(rows), "images": list(images)}


if __name__ == "__main__":
    run(app, "tools.compatibility")
