"""`mcore-bundle launch slurm`: the options that only Slurm has."""

from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    Detach,
    decide_job_with_paths,
    follow_submitted_job,
    read_optional_record,
    warn_hidden_inputs,
    warn_unknown_steps,
)
from bundle.cli.request import JobRequest, Machines
from bundle.targets import slurm as scheduler
from bundle.targets.slurm import batch, containers
from bundle.targets.slurm.options import CONTAINERS, SlurmOptions


def slurm(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    record: options.ImageRecordOrNone = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION[=VALUE]", help="Of sbatch: partition=gpu, account=us, time=4:00:00, ..."
        ),
    ] = None,
    container_image: Annotated[
        str, typer.Option("--image", help="What it runs in; without it, this very environment.")
    ] = "",
    container: Annotated[
        str,
        typer.Option(callback=options.allow_only(CONTAINERS), help=f"One of {', '.join(CONTAINERS)}."),
    ] = CONTAINERS[0],
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SRC[:DST]", help="What a container sees, beside here and the run."),
    ] = None,
    rdma: Annotated[
        bool, typer.Option("--rdma", help="Give it the RDMA devices, and memory pinned.")
    ] = False,
    restarts: options.Restarts = 0,
    preflight: options.Preflight = False,
    spares: options.Spares = 0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Start the nodes through a Ray cluster of this job's own.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and stop.")] = False,
    detach: Detach = False,
) -> None:
    """Run a job under Slurm, one task a node; shows what it writes and ends as it does."""
    job = decide_job_with_paths(
        recipe,
        request,
        machines,
        read_optional_record(container_image, record),
        checks_paths=not dry_run,
        in_image=bool(container_image),
    )
    slurm_options = SlurmOptions(
        sbatch=tuple(sbatch or ()),
        image=container_image,
        container=container,
        mounts=tuple(mounts or ()),
        restarts=restarts,
        preflight=preflight,
        spares=spares,
        ray=ray,
        rdma=rdma,
    )
    warn_unknown_steps(job, recipe)
    if container_image:
        warn_hidden_inputs(
            job, containers.list_mounts(job, slurm_options, Path.cwd()), Path.cwd(), "say --mount {0}:{0}"
        )
    if dry_run:
        print(batch.build_script(job, slurm_options, Path.cwd()), end="")
        return
    follow_submitted_job(f"slurm:{scheduler.submit(job, slurm_options, Path.cwd())}", detach=detach)
