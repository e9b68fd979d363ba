"""`mcore-bundle preflight`: checks of this node that try what a job will need."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from bundle import preflight as probing
from bundle.cli import options
from bundle.cli.doctor import format_finding
from bundle.environment import hardware
from bundle.errors import ExitCode, UsageError
from bundle.launch import command
from bundle.launch.rendezvous import discover

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def preflight(
    directory: Annotated[Path, typer.Option(help="Test the disk of this run directory too.")] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Compute, write and read less: under a minute.")
    ] = False,
    backend: options.MachineBackend = "auto",
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Require this number of devices. Default: those found.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Test these machines together; start it on each.")] = None,
    node_rank: options.NodeRank = None,
    rendezvous: options.Rendezvous = None,
    wait: options.Wait = command.NODE_WAIT_SECONDS,
    as_json: options.JSON_OPTION = False,
    log_level: options.LogLevel = "",
) -> None:
    """Make this node compute, write, read and send to others; ends with 3 if the node is unfit."""
    local_hardware = hardware.detect(backend)
    node_rendezvous = discover(os.environ, nodes=nodes, node_rank=node_rank, endpoint=rendezvous)
    if node_rendezvous.is_rank:
        raise UsageError(f"{node_rendezvous.reason}: start preflight once on each node")
    node_check = probing.NodeCheck(
        local_hardware,
        directory.absolute(),
        node_rendezvous,
        quick=quick,
        devices=devices_per_node,
        wait=wait,
    )
    if as_json:
        print(
            json.dumps(
                probing.build_report(local_hardware.backend, node_check.results, node_check.node_defects),
                indent=2,
            )
        )
    else:
        print("\n".join(map(format_finding, probing.build_findings(node_check.results))))
        for name, defect in node_check.node_defects if node_rendezvous.nodes > 1 else ():
            print(f"{name}: {defect or 'passes'}")
    if node_check.own_defects:
        raise typer.Exit(int(ExitCode.ENVIRONMENT_UNFIT))
