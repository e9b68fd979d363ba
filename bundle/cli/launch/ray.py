"""`mcore-bundle launch ray`: runs a job on a Ray cluster."""

import os
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import ignore_stdout_write_errors, options
from bundle.cli.launch.submission import (
    Detach,
    decide_job_with_local_paths,
    print_handle_or_follow_job,
    warn_undetermined_step_count,
)
from bundle.cli.request import CURRENT_ENVIRONMENT_RECORD, JobRequest, Machines
from bundle.environment import image
from bundle.errors import UsageError
from bundle.launch import job as job_file
from bundle.launch.rendezvous import discover
from bundle.runs.directory import find_newest_checkpoint
from bundle.targets import ray as cluster
from bundle.targets import raycluster, raylets


def ray(
    request: JobRequest,
    machines: Machines,
    *,
    recipe: options.Recipe = "",
    record: options.ImageRecord = None,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start the nodes of this job file, not a recipe.")
    ] = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start", help="With --job: first start a Ray cluster on the machines of this Slurm job."
        ),
    ] = False,
    ray_options: cluster.RayOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request to Ray and exit.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job on a Ray cluster, a machine for each node; shows what it writes and ends as it does."""
    if bool(recipe) is (job is not None):
        raise UsageError("name what to run: either a recipe or --job FILE")
    if detach and not ray_options.address:
        raise UsageError("--detach: name the cluster that takes the job with --address")
    if start and (job is None or ray_options.address):
        raise UsageError("--start: needs --job FILE, and no --address")
    if job is None:
        image_record = image.read_record(record) if record else None
        planned_job = decide_job_with_local_paths(
            recipe,
            request,
            machines,
            image_record or CURRENT_ENVIRONMENT_RECORD,
            checks_paths=not dry_run,
            in_image=image_record is not None,
        )
        warn_undetermined_step_count(planned_job, recipe)
        if dry_run:
            print(cluster.render_dry_run(planned_job, ray_options, Path.cwd()), end="")
            return
        if ray_options.address:
            print_handle_or_follow_job(
                f"ray:{cluster.submit(planned_job, ray_options, Path.cwd())}", detach=detach
            )
            return
        job = cluster.write_job_file(planned_job)
    loaded_job = job_file.load(job)
    ignore_stdout_write_errors()  # the run directory has all results
    job_path = job.absolute()

    def drive() -> int:
        return raylets.run(
            loaded_job, job_path, ray_options, lambda: find_newest_checkpoint(loaded_job.directory)
        )

    if start:
        rendezvous = discover(os.environ, planned_nodes=loaded_job.nodes)
        raise typer.Exit(raycluster.run_node(loaded_job, job_path, rendezvous, drive, ray_options.wait))
    raise typer.Exit(drive())
