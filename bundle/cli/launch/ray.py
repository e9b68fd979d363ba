"""`mcore-bundle launch ray`: the options that only Ray has."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import may_fail, options
from bundle.cli.launch.submission import Detach, decided_here, say_epochs, submitted
from bundle.cli.request import JobRequest, Machines
from bundle.environment import image
from bundle.errors import UsageError
from bundle.launch import job as job_file
from bundle.launch.command import WAIT_SECONDS
from bundle.launch.rendezvous import discover
from bundle.runs.directory import newest_checkpoint
from bundle.targets import ray as cluster
from bundle.targets import raycluster, raylets


def ray(
    request: JobRequest,
    machines: Machines,
    recipe: options.Recipe = "",
    record: options.ImageRecord = None,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of a recipe, a job file: starts its nodes.")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Of a cluster's dashboard, which takes the job; without it, the cluster of this machine.",
        ),
    ] = "",
    start: Annotated[
        bool,
        typer.Option(
            "--start",
            help="With --job, where Slurm starts this on every machine: first make them a cluster.",
        ),
    ] = False,
    restarts: options.Restarts = 0,
    preflight: options.Preflight = False,
    wait: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="How long to wait for machines that are free.")
    ] = WAIT_SECONDS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what Ray is asked, and stop.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job on a Ray cluster, a machine for each node; shows what it writes and ends as it does."""
    if bool(recipe) is (job is not None):
        raise UsageError("say what to run: a recipe, or --job FILE, and not both")
    if detach and not address:
        raise UsageError("--detach: name the cluster that takes the job with --address")
    if start and (job is None or address):
        raise UsageError("--start: say --job FILE with it, and no --address")
    wanted = cluster.Options(address, restarts, wait, preflight=preflight)
    if job is None:
        built = image.named(record) if record else None
        decided = decided_here(
            recipe, request, machines, built, looks=not dry_run, in_image=built is not None
        )
        say_epochs(decided, recipe)
        decided = replace(decided, image=built or image.own())
        if dry_run:
            print(cluster.dry_run(decided, wanted, Path.cwd()), end="")
            return
        if address:
            submitted(f"ray:{cluster.submit(decided, wanted, Path.cwd())}", detach=detach)
            return
        job = cluster.write(decided)
    told = job_file.load(job)
    may_fail()  # the run directory has it all
    file = job.absolute()

    def drive() -> int:
        return raylets.run(told, file, wanted, lambda: newest_checkpoint(told.directory))

    if start:
        where = discover(os.environ, planned=told.nodes)
        raise typer.Exit(raycluster.run(told, file, where, drive, wait))
    raise typer.Exit(drive())
