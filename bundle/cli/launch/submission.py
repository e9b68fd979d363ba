"""What every target of `launch` has in common: a job is decided, handed over, and asked about by handle."""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Protocol

import typer

from bundle.cli import may_fail
from bundle.cli.plan import planned
from bundle.cli.request import JobRequest, Machines
from bundle.cli.room import say_room
from bundle.environment import image
from bundle.environment.image import BuildInfo
from bundle.errors import UsageError, shown
from bundle.launch.job import UNDECIDED, Job, of_plan
from bundle.patches.subject import DEFAULT
from bundle.planning import Problem
from bundle.planning.inputs import input_problems
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory
from bundle.targets import docker, images, local, ray, slurm
from bundle.targets.kubernetes import FORMS, running
from bundle.targets.mounts import Mount, hidden

_log = logging.getLogger(__name__)

_NOT_OURS = "none"
# What is in an image: its record; None of one that is none of ours; undecided, where nobody says.
Record = BuildInfo | Literal["undecided"] | None
Handle = Annotated[
    str,
    typer.Argument(
        help="What `launch` printed: local:FOLDER, slurm:NUMBER, docker:CONTAINER, kubernetes:WORKLOAD,"
        " ray:NUMBER@URL."
    ),
]
Grace = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="SECONDS", help="From being told to save to the end, if not what that takes."
    ),
]
Image = Annotated[str, typer.Option("--image", help="What it runs in; without it, the image of ours for it.")]
Registry = Annotated[str, typer.Option(metavar="REGISTRY", help="Where our images are.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Print the handle of the job, and stop.")]
NodeRank = Annotated[int, typer.Option(min=0, help="Which of several machines this one is.")]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where several meet: node 0.")]


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
    "local": (local, r"/[^\x00-\x1f\x7f]*"),
    "slurm": (slurm, r"[0-9]+"),
    "kubernetes": (running, rf"({'|'.join(FORMS)})/[a-z0-9-]+/[a-z0-9-]+"),
    "ray": (ray, r"[A-Za-z0-9_-]+@https?://[!-~]+"),
    "docker": (docker, r"[a-zA-Z0-9][a-zA-Z0-9_.-]*"),
}


def read_record(runs_in: str, said: str) -> Record:
    """What is in the image that a job runs in, if in one. Raises UsageError for a record of none."""
    if said and not runs_in:
        raise UsageError(f"--image-record {shown(said)}: say what it is of with --image, or leave it out")
    return read_record_of_one(runs_in, said) if runs_in else None


def read_record_of_one(runs_in: str, said: str) -> Record:
    """The same for what runs in an image in any case: in one of ours, where nobody names one."""
    if not said:
        return UNDECIDED
    if said != _NOT_OURS:
        return image.named(Path(said))
    if not runs_in:
        raise UsageError(
            "--image-record none: one that is none of ours is named by --image. Ours are",
            [f"REGISTRY/{each.tag}" for each in images.built()],
        )
    return None


def decided(recipe: str, request: JobRequest, machines: Machines, record: Record) -> Job:
    """The job that a recipe is on such a cluster. Raises with everything that stands against it."""
    return _of(request.load(recipe), request, machines, record)


def decided_here(
    recipe: str,
    request: JobRequest,
    machines: Machines,
    record: Record,
    *,
    looks: bool,
    in_image: bool = False,
) -> Job:
    """As above, for whoever sees the paths of this machine: they are of the working directory.

    What lies there speaks against the job, too, where it `looks` at it: it is what the nodes will find. Of
    what is missing here a container may have its own, so that this is only said where it runs `in_image`.
    """
    asked = request.load(recipe)
    directory, origin = request.directory(asked).absolute(), request.start_from
    here = replace(request, run_directory=directory, start_from=origin and origin.absolute())
    if not looks:
        return _of(asked, here, machines, record)
    run, start = RunDirectory(directory), here.start()
    run.begin(asked, start)
    missing = list(input_problems(asked, directory, run.beginning(asked, start)))
    if in_image:
        say_absent(missing)
        missing = []
    decided = _of(asked, here, machines, record, missing)
    say_room(asked, run)
    return decided


def say_absent(problems: Iterable[Problem]) -> None:
    """Warn of inputs that are not usable on this machine, and that the nodes of a job may have."""
    for problem in problems:
        _log.warning("%s (seen from here; the image, or what is mounted, may have it)", problem.text)


def say_hidden(job: Job, mounts: Sequence[Mount], workdir: Path, advice: str) -> None:
    """Warns of inputs that are here and that a container does not see; see `hidden`."""
    for text in hidden(job, mounts, workdir, advice):
        _log.warning("%s", text)


def say_epochs(job: Job, recipe: str) -> None:
    """Warns of a job that will learn on its nodes how long it is: what contradicts that is found there."""
    if (epochs := job.recipe.train.epochs) is not None:
        _log.warning(
            "train.epochs: how many steps %g epochs are is not known before the data is read;"
            " `mcore-bundle check %s` says whether warm-up and intervals fit",
            epochs,
            recipe,
        )


def submitted(handle: str, *, detach: bool) -> None:
    """Says what the job is called; shows what it writes and ends as it does, unless it is left alone."""
    if detach:
        print(handle)
        return
    print(f"{handle}: `mcore-bundle launch stop {handle}` has it save and end", file=sys.stderr)
    may_fail()  # the job's log has it all
    target, name = found(handle)
    for text in target.follow(name):
        print(text, end="", flush=True)
    raise typer.Exit(target.wait(name))


def found(handle: str) -> tuple[Target, str]:
    """Who has a job, and what it is called there. Raises UsageError for what is no handle."""
    kind, _, name = handle.partition(":")
    target, pattern = _TARGETS.get(kind, (slurm, ""))
    if kind not in _TARGETS or not re.fullmatch(pattern, name, re.ASCII):
        raise UsageError(f"{shown(handle)}: no handle of a job, such as slurm:1234")
    return target, name


def _of(
    recipe: Recipe,
    request: JobRequest,
    machines: Machines,
    record: Record,
    beside: Sequence[Problem] = (),
) -> Job:
    if record == UNDECIDED:
        request = replace(request, mcore=request.mcore or DEFAULT)  # what is here says nothing of it
    made = planned(recipe, request, machines, None if record == UNDECIDED else record, beside)
    made.refuse()
    if record == UNDECIDED:
        _log.warning(
            "nobody said what is in the image: planned with megatron-core %s, its patches are left to the"
            " first rank; --image-record FILE says it, which `docker run IMAGE doctor --json > FILE` writes",
            made.target.version,
        )
    return of_plan(made, request.directory(recipe), start=request.start(), record=record)
