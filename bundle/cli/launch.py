"""`mcore-bundle launch`: hands a job to a cluster when it has been checked, and says what became of it."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import typer

from bundle.cli import may_fail, options
from bundle.cli.plan import planned
from bundle.environment import image
from bundle.environment.image import BuildInfo
from bundle.errors import UsageError, shown
from bundle.launch import Start
from bundle.launch.job import Job, of_plan
from bundle.recipe import Recipe, load
from bundle.targets import docker as engine
from bundle.targets import kubernetes as objects
from bundle.targets import slurm as scheduler

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
_NOT_OURS = "none"
Handle = Annotated[str, typer.Argument(help="What `launch` printed: slurm:NUMBER, docker:CONTAINER.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Print the handle of the job, and stop.")]


class State(Protocol):
    """What is said of a job: its state, why it is so, its exit code once it has ended."""

    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def code(self) -> int | None: ...


class Target(Protocol):
    """What has been given a job, and is asked about it by the name that it gave it."""

    def state(self, name: str) -> State: ...
    def written(self, name: str) -> str: ...
    def follow(self, name: str) -> Iterator[str]: ...
    def wait(self, name: str) -> int: ...
    def stop(self, name: str) -> None: ...


# By the first part of a handle, with what its second part looks like.
_TARGETS: dict[str, tuple[Target, str]] = {
    "slurm": (scheduler, r"[0-9]+"),
    "docker": (engine, r"[a-zA-Z0-9][a-zA-Z0-9_.-]*"),
}


@app.command()
def slurm(
    context: typer.Context,
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    run_directory: options.RunDirectory = None,
    resume: options.Resume = False,
    start_from: options.From = None,
    weights_only: options.WeightsOnly = False,
    backend: options.Backend = "",
    mcore: options.Mcore = "",
    allow_drift: options.AllowDrift = None,
    devices_per_node: options.DevicesPerNode = None,
    nodes: options.Nodes = None,
    hardware: options.Hardware = "",
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
        typer.Option(
            callback=options.one_of(scheduler.CONTAINERS), help=f"One of {', '.join(scheduler.CONTAINERS)}."
        ),
    ] = scheduler.CONTAINERS[0],
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SRC[:DST]", help="What a container sees, beside here and the run."),
    ] = None,
    restarts: options.Restarts = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and stop.")] = False,
    detach: Detach = False,
    log_level: options.LogLevel = "",
) -> None:
    """Run a job under Slurm, one task a node; shows what it writes and ends as it does."""
    asked = load(recipe, overrides or ())
    job = _decided(
        context,
        asked,
        (run_directory or asked.run_directory).absolute(),
        Start(resume=resume, origin=start_from and start_from.absolute(), weights_only=weights_only),
        _record(container_image, record),
    )
    wanted = scheduler.Options(tuple(sbatch or ()), container_image, container, tuple(mounts or ()), restarts)
    if dry_run:
        print(scheduler.script(job, wanted, Path.cwd()), end="")
        return
    _submitted(f"slurm:{scheduler.submit(job, wanted, Path.cwd())}", detach=detach)


@app.command()
def docker(
    context: typer.Context,
    recipe: options.Recipe,
    container_image: Annotated[str, typer.Option("--image", help="What it runs in.")],
    overrides: options.Overrides = None,
    run_directory: options.RunDirectory = None,
    resume: options.Resume = False,
    start_from: options.From = None,
    weights_only: options.WeightsOnly = False,
    backend: options.Backend = "",
    mcore: options.Mcore = "",
    allow_drift: options.AllowDrift = None,
    devices_per_node: options.DevicesPerNode = None,
    nodes: options.Nodes = None,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of several machines this one is.")] = 0,
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where several meet: node 0.")] = "",
    hardware: options.Hardware = "",
    record: options.RunsIn = "",
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
    shared_memory: Annotated[str, typer.Option(metavar="SIZE", help="Size of /dev/shm.")] = "64g",
    rdma: Annotated[
        bool, typer.Option("--rdma", help="Give it the RDMA devices, and memory pinned.")
    ] = False,
    grace: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="From being told to save to the end.")
    ] = 300,
    restarts: options.Restarts = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a command for each node, and stop.")
    ] = False,
    detach: Detach = False,
    log_level: options.LogLevel = "",
) -> None:
    """Run a job in a container of this machine; shows what it writes and ends as it does."""
    asked = load(recipe, overrides or ())
    job = _decided(
        context,
        asked,
        (run_directory or Path("runs") / asked.name).absolute(),
        Start(resume=resume, origin=start_from and start_from.absolute(), weights_only=weights_only),
        _record(container_image, record),
    )
    wanted = engine.Options(
        image=container_image,
        mounts=tuple(mounts or ()),
        environment=tuple(variables or ()),
        user=user or f"{os.getuid()}:0",
        shared_memory=shared_memory,
        rdma=rdma,
        restarts=restarts,
        grace_seconds=grace,
    )
    if dry_run:
        print(engine.dry_run(job, wanted, Path.cwd(), rendezvous), end="")
        return
    name = engine.submit(job, wanted, Path.cwd(), node_rank, rendezvous)
    _submitted(f"docker:{name}", detach=detach)


@app.command()
def kubernetes(
    context: typer.Context,
    recipe: options.Recipe,
    claim: Annotated[
        str, typer.Option(help="The PersistentVolumeClaim of the run directory, which all nodes see.")
    ],
    container_image: Annotated[str, typer.Option("--image", help="What every node runs.")],
    overrides: options.Overrides = None,
    run_directory: options.RunDirectory = None,
    resume: options.Resume = False,
    start_from: options.From = None,
    weights_only: options.WeightsOnly = False,
    backend: options.Backend = "",
    mcore: options.Mcore = "",
    allow_drift: options.AllowDrift = None,
    devices_per_node: options.DevicesPerNode = None,
    nodes: options.Nodes = None,
    hardware: options.Hardware = "",
    record: options.RunsIn = "",
    form: Annotated[
        str,
        typer.Option(
            callback=options.one_of(objects.FORMS),
            help="jobset starts all nodes again when one is lost; job ends, and needs nothing installed.",
        ),
    ] = objects.FORMS[0],
    name: Annotated[str, typer.Option(help="Of the objects; without it, the recipe's.")] = "",
    namespace: Annotated[str, typer.Option(help="Where they are made; without it, where kubectl is.")] = "",
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="CLAIM:/PATH", help="Another claim, of data or of a model."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resource", metavar="NAME=QUANTITY", help="Of each node: memory=512Gi, cpu=64, rdma/ib=8, ..."
        ),
    ] = None,
    shared_memory: Annotated[str, typer.Option(metavar="QUANTITY", help="Size of /dev/shm.")] = "64Gi",
    rdma: Annotated[bool, typer.Option("--rdma", help="Let the pods pin memory for a network card.")] = False,
    secret: Annotated[str, typer.Option(help="A Secret whose keys become variables.")] = "",
    queue: Annotated[str, typer.Option(help="Of Kueue, which starts all pods or none.")] = "",
    topology: Annotated[str, typer.Option(help="The level that Kueue keeps all pods within.")] = "",
    priority: Annotated[str, typer.Option(help="A PriorityClass.")] = "",
    restarts: Annotated[int, typer.Option(min=0, help="How often a JobSet starts all nodes again.")] = 10,
    grace: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="From being told to save to the end.")
    ] = 300,
    log_level: options.LogLevel = "",
) -> None:
    """Print the objects of a job, for `kubectl apply -f -`."""
    job = _decided(
        context,
        load(recipe, overrides or ()),
        run_directory,
        Start(resume=resume, origin=start_from, weights_only=weights_only),
        _record(container_image, record),
    )
    wanted = objects.Options(
        image=container_image,
        claim=claim,
        name=name,
        form=form,
        namespace=namespace,
        mounts=tuple(mounts or ()),
        resources=tuple(resources or ()),
        shared_memory=shared_memory,
        rdma=rdma,
        secret=secret,
        queue=queue,
        topology=topology,
        priority=priority,
        restarts=restarts,
        grace_seconds=grace,
    )
    print(objects.documents(job, wanted), end="")


@app.command()
def status(handle: Handle) -> None:
    """How a job is: its state, and why it waits."""
    target, name = _target(handle)
    now = target.state(name)
    print(handle, now.name, *([] if now.reason in ("", "None") else [f"({now.reason})"]))


@app.command()
def logs(
    handle: Handle,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job has ended.")] = False,
) -> None:
    """What a job wrote; under Slurm, the number before a line is that of its node."""
    target, name = _target(handle)
    for text in target.follow(name) if follow else [target.written(name)]:
        print(text, end="", flush=True)


@app.command()
def stop(handle: Handle) -> None:
    """Have a job save and end; one that waits does not begin."""
    target, name = _target(handle)
    target.stop(name)


@app.command()
def wait(handle: Handle) -> None:
    """Wait until a job has ended, and end with its code."""
    target, name = _target(handle)
    raise typer.Exit(target.wait(name))


def _record(runs_in: str, said: str) -> BuildInfo | None:
    """What is in the image that a job runs in. Raises UsageError where nobody says."""
    if runs_in and not said:
        raise UsageError(
            f"--image {shown(runs_in)}: say what is in it with --image-record FILE, which"
            " `docker run IMAGE doctor --json > FILE` writes, or with --image-record none"
        )
    if said and not runs_in:
        raise UsageError(f"--image-record {shown(said)}: say what it is of with --image, or leave it out")
    return image.named(Path(said)) if said not in ("", _NOT_OURS) else None


def _decided(
    context: typer.Context, recipe: Recipe, directory: Path | None, start: Start, record: BuildInfo | None
) -> Job:
    """The job that a recipe is on such a cluster. Raises with everything that stands against it."""
    made = planned(context, recipe, record)
    made.refuse()
    return of_plan(made, directory or recipe.run_directory, start=start, record=record)


def _submitted(handle: str, *, detach: bool) -> None:
    """Says what the job is called; shows what it writes and ends as it does, unless it is left alone."""
    if detach:
        print(handle)
        return
    print(f"{handle}: `mcore-bundle launch stop {handle}` has it save and end", file=sys.stderr)
    may_fail()  # the job's log has it all
    target, name = _target(handle)
    for text in target.follow(name):
        print(text, end="", flush=True)
    raise typer.Exit(target.wait(name))


def _target(handle: str) -> tuple[Target, str]:
    """Who has a job, and what it is called there. Raises UsageError for what is no handle."""
    kind, _, name = handle.partition(":")
    target, pattern = _TARGETS.get(kind, (scheduler, ""))
    if kind not in _TARGETS or not re.fullmatch(pattern, name, re.ASCII):
        raise UsageError(f"{shown(handle)}: no handle of a job, such as slurm:1234")
    return target, name
