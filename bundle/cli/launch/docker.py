"""`mcore-bundle launch docker`: the options that only docker has."""

import os
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options
from bundle.cli.launch.submission import (
    Detach,
    Grace,
    Image,
    NodeRank,
    Registry,
    Rendezvous,
    decide_job_with_paths,
    follow_submitted_job,
    read_image_record,
    warn_hidden_inputs,
)
from bundle.cli.request import JobRequest, Machines
from bundle.targets import docker as engine
from bundle.targets import images


def docker(
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    node_rank: NodeRank = 0,
    rendezvous: Rendezvous = "",
    container_image: Image = "",
    registry: Registry = images.DEFAULT_REGISTRY,
    record: options.ImageRecordOrNone = "",
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SRC[:DST[:ro]]", help="What it sees, beside here and the run."),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME", help="A variable of here that it gets: HF_TOKEN, ..."),
    ] = None,
    user: Annotated[
        str, typer.Option(metavar="UID:GID", help="Who it is; without it, we, in the group of our images.")
    ] = "",
    groups: Annotated[
        list[int] | None,
        typer.Option("--group", min=0, metavar="GID", help="A further group of it; else that of the NPUs."),
    ] = None,
    shared_memory: Annotated[str, typer.Option(metavar="SIZE", help="Size of /dev/shm.")] = "64g",
    rdma: Annotated[
        bool, typer.Option("--rdma", help="Give it the RDMA devices, and memory pinned.")
    ] = False,
    grace: Grace = None,
    restarts: options.Restarts = 0,
    preflight: options.Preflight = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a command for each node, and stop.")
    ] = False,
    detach: Detach = False,
) -> None:
    """Run a job in a container of this machine; shows what it writes and ends as it does."""
    job = decide_job_with_paths(
        recipe,
        request,
        machines,
        read_image_record(container_image, record),
        checks_paths=not dry_run,
        in_image=True,
    )
    docker_options = engine.DockerOptions(
        image=container_image or images.choose_image(job, registry),
        mounts=tuple(mounts or ()),
        environment=tuple(variables or ()),
        user=user or f"{os.getuid()}:0",
        groups=tuple(groups or ()) or (engine.find_npu_groups() if job.backend == "ascend" else ()),
        shared_memory=shared_memory,
        rdma=rdma,
        restarts=restarts,
        preflight=preflight,
        grace_seconds=grace,
    )
    warn_hidden_inputs(
        job, engine.list_mounts(job, docker_options, Path.cwd()), Path.cwd(), "say --mount {0}:{0}"
    )
    if dry_run:
        print(engine.render_dry_run(job, docker_options, Path.cwd(), rendezvous), end="")
        return
    name = engine.submit(job, docker_options, Path.cwd(), node_rank, rendezvous)
    follow_submitted_job(f"docker:{name}", detach=detach)
