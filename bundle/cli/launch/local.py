"""`mcore-bundle launch local`: runs a job on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    Detach,
    NodeRank,
    Rendezvous,
    decide_job_with_local_paths,
    print_handle_or_follow_job,
)
from bundle.cli.request import CURRENT_ENVIRONMENT_RECORD, JobRequest, Machines
from bundle.targets import local as machine


def local(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    *,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    local_options: machine.LocalOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and exit.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job here, where it goes on without this command; shows what it writes and ends as it does."""
    job = decide_job_with_local_paths(
        recipe, request, machines, CURRENT_ENVIRONMENT_RECORD, checks_paths=not machines.hardware
    )
    local_options = replace(local_options, mcore=request.mcore)
    if dry_run:
        print(machine.render_dry_run(job, local_options, rendezvous), end="")
        return
    print_handle_or_follow_job(
        f"local:{machine.submit(job, local_options, Path.cwd(), node_rank, rendezvous)}", detach=detach
    )
