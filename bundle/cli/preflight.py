"""`mcore-bundle preflight`: whether this node can do what a job will ask of it, found out by doing it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bundle import preflight as probing
from bundle.cli import options
from bundle.cli.doctor import line
from bundle.environment import hardware, machine
from bundle.environment.machine import Level
from bundle.errors import ExitCode

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def preflight(
    directory: Annotated[Path, typer.Option(help="Where runs are written: its disk is asked too.")] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: less is computed, written and read.")
    ] = False,
    backend: options.OwnBackend = "auto",
    as_json: options.JSON = False,
    log_level: options.LogLevel = "",
) -> None:
    """Have this node compute, write and read, alone; ends with 3 if it should be left out."""
    every = list(probing.probes(hardware.detect(backend), directory.absolute(), quick=quick))
    found = probing.run(every, probing.QUICK_SECONDS if quick else probing.SECONDS)
    told = list(probing.findings(found))
    if as_json:
        measured = {probe.subject: dict(each.measured) for probe, each in found.items()}
        print(
            json.dumps({"schema": 1, "findings": machine.plain(tuple(told)), "measured": measured}, indent=2)
        )
    else:
        print("\n".join(map(line, told)))
    if any(finding.level is Level.FAIL for finding in told):
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
