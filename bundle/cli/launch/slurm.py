"""`mcore-bundle launch slurm`: the options that only Slurm has."""

from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import Detach, decided_here, read_record, say_epochs, say_hidden, submitted
from bundle.cli.request import JobRequest, Machines
from bundle.targets import slurm as scheduler
from bundle.targets.slurm import batch, containers
from bundle.targets.slurm.options import CONTAINERS, Options


def slurm(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    record: options.RunsIn = "",
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
        typer.Option(callback=options.one_of(CONTAINERS), help=f"One of {', '.join(CONTAINERS)}."),
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
    job = decided_here(
        recipe,
        request,
        machines,
        read_record(container_image, record),
        looks=not dry_run,
        in_image=bool(container_image),
    )
    wanted = Options(
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
    say_epochs(job, recipe)
    if container_image:
        say_hidden(job, containers.mounts(job, wanted, Path.cwd()), Path.cwd(), "say --mount {0}:{0}")
    if dry_run:
        print(batch.script(job, wanted, Path.cwd()), end="")
        return
    submitted(f"slurm:{scheduler.submit(job, wanted, Path.cwd())}", detach=detach)
