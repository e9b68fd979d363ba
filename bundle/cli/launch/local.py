"""`mcore-bundle launch local`: the options that only a launch on this machine has."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import Detach, NodeRank, Rendezvous, decided_here, submitted
from bundle.cli.request import JobRequest, Machines
from bundle.environment import image
from bundle.targets import local as machine


def local(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    restarts: options.Restarts = 0,
    preflight: options.Preflight = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and stop.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job here, where it goes on without this command; shows what it writes and ends as it does."""
    job = decided_here(recipe, request, machines, None, looks=not machines.hardware)
    job = replace(job, image=image.own())
    wanted = machine.Options(restarts, request.mcore, preflight)
    if dry_run:
        print(machine.dry_run(job, wanted, rendezvous), end="")
        return
    submitted(f"local:{machine.submit(job, wanted, Path.cwd(), node_rank, rendezvous)}", detach=detach)
