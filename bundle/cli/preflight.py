"""`mcore-bundle preflight`: whether this node can do what a job will ask of it, found out by doing it."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from bundle import preflight as probing
from bundle.cli import options
from bundle.cli.doctor import line
from bundle.environment import hardware
from bundle.errors import ExitCode, UsageError
from bundle.launch import command
from bundle.launch.rendezvous import discover

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
    nodes: Annotated[int | None, typer.Option(help="Machines to ask together; start it on each.")] = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    wait: options.Wait = command.WAIT_SECONDS,
    as_json: options.JSON = False,
    log_level: options.LogLevel = "",
) -> None:
    """Have this node compute, write and read, and send to others; ends with 3 if it should be left out."""
    here = hardware.detect(backend)
    where = discover(os.environ, nodes=nodes, node_rank=node_rank, endpoint=rendezvous)
    if where.is_rank:
        raise UsageError(f"{where.reason}: start preflight once on each node")
    asked = probing.Asked(here, directory.absolute(), where, quick=quick, devices=devices_per_node, wait=wait)
    if as_json:
        print(json.dumps(probing.report(here.backend, asked.found, asked.nodes), indent=2))
    else:
        print("\n".join(map(line, probing.findings(asked.found))))
        for name, why in asked.nodes if where.nodes > 1 else ():
            print(f"{name}: {why or 'passes'}")
    if asked.own:
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
