"""`mcore-bundle launch slurm`: submits a job to Slurm."""

from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    Detach,
    decide_job_with_local_paths,
    print_handle_or_follow_job,
    read_image_contents_or_none,
    warn_undetermined_step_count,
    warn_unmounted_inputs,
)
from bundle.cli.request import JobRequest, Machines
from bundle.targets import slurm as scheduler
from bundle.targets.slurm import batch, containers
from bundle.targets.slurm.options import SlurmOptions


def slurm(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    *,
    record: options.ImageRecordOrNone = "",
    slurm_options: SlurmOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and exit.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job under Slurm, one task a node; shows what it writes and ends as it does."""
    job = decide_job_with_local_paths(
        recipe,
        request,
        machines,
        read_image_contents_or_none(slurm_options.image, record),
        checks_paths=not dry_run,
        in_image=bool(slurm_options.image),
    )
    warn_undetermined_step_count(job, recipe)
    if slurm_options.image:
        warn_unmounted_inputs(
            job, containers.list_mounts(job, slurm_options, Path.cwd()), Path.cwd(), "set --mount {0}:{0}"
        )
    if dry_run:
        print(batch.build_script(job, slurm_options, Path.cwd()), end="")
        return
    print_handle_or_follow_job(f"slurm:{scheduler.submit(job, slurm_options, Path.cwd())}", detach=detach)
