"""`mcore-bundle preflight`: whether this node can do what a job will ask of it, found out by doing it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bundle import preflight as probing
from bundle.cli import options
from bundle.cli.doctor import line
from bundle.environment import hardware
from bundle.errors import ExitCode

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def preflight(
    directory: Annotated[Path, typer.Option(help="Where runs are written: its disk is asked too.")] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: less is computed, written and read.")
    ] = False,
    backend: options.OwnBackend = "auto",
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices that have to be here; without it, those that are.")
    ] = None,
    as_json: options.JSON = False,
    log_level: options.LogLevel = "",
) -> None:
    """Have this node compute, write and read, alone; ends with 3 if it should be left out."""
    here = hardware.detect(backend)
    every = list(probing.probes(here, directory.absolute(), quick=quick, devices=devices_per_node))
    found = probing.judged(probing.run(every, probing.QUICK_SECONDS if quick else probing.SECONDS))
    if as_json:
        print(json.dumps(probing.report(here.backend, found), indent=2))
    else:
        print("\n".join(map(line, probing.findings(found))))
    if any(each.wrong for each in found.values()):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
