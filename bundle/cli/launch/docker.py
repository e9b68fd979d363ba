"""`mcore-bundle launch docker`: runs a job in a container of this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    ContainerImage,
    Detach,
    NodeRank,
    Rendezvous,
    decide_job_with_local_paths,
    print_handle_or_follow_job,
    warn_short_grace,
    warn_unmounted_inputs,
)
from bundle.cli.request import JobRequest, Machines
from bundle.targets import docker as engine


def docker(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    *,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    container_image: ContainerImage,
    docker_options: engine.DockerOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a command for each node and exit.")
    ] = False,
    detach: Detach = False,
) -> None:
    """Run a job in a container of this machine; shows what it writes and ends as it does."""
    job = decide_job_with_local_paths(
        recipe,
        request,
        machines,
        container_image.read_contents_or_undecided(),
        checks_paths=not dry_run,
        in_image=True,
    )
    docker_options = replace(
        docker_options,
        image=container_image.choose_name(job),
        user=docker_options.user or engine.choose_nonroot_user(job.directory),
        groups=docker_options.groups or (engine.find_npu_unix_groups() if job.backend == "ascend" else ()),
    )
    warn_short_grace(job, docker_options.grace_seconds)
    warn_unmounted_inputs(
        job, engine.list_mounts(job, docker_options, Path.cwd()), Path.cwd(), "set --mount {0}:{0}"
    )
    if dry_run:
        print(engine.render_dry_run(job, docker_options, Path.cwd(), rendezvous), end="")
        return
    name = engine.submit(job, docker_options, Path.cwd(), node_rank, rendezvous)
    print_handle_or_follow_job(f"docker:{name}", detach=detach)
