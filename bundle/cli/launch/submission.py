"""The common part of the targets of `launch`: decide a job, submit it, and find it by its handle."""

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import ignore_stdout_write_errors, options
from bundle.cli.disk_space import warn_disk_space
from bundle.cli.request import ImageContents, JobRequest, Machines, plan_job
from bundle.environment import image
from bundle.errors import UsageError, format_value
from bundle.launch.grace import estimate_save_seconds
from bundle.launch.job import UNDECIDED, Job
from bundle.patches.megatron_core import DEFAULT_RELEASE
from bundle.planning import Problem
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory
from bundle.targets import docker, images, local, ray, slurm
from bundle.targets.kubernetes import FORMS_BY_NAME, jobs
from bundle.targets.mounts import Mount, find_unmounted_inputs
from bundle.targets.states import Target

_log = logging.getLogger(__name__)

_NO_IMAGE_RECORD_KEYWORD = "none"
Handle = Annotated[
    str,
    typer.Argument(
        help="The handle that `launch` printed: local:FOLDER, slurm:NUMBER, docker:CONTAINER,"
        " kubernetes:WORKLOAD,"
        " ray:NUMBER@URL."
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Print the handle of the job and exit.")]
NodeRank = Annotated[int, typer.Option(min=0, help="Set the rank of this machine.")]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="Set the address of node 0.")]


# The targets by the first part of a handle, with the pattern of the second part.
TARGETS_WITH_JOB_ID_PATTERNS: dict[str, tuple[Target, str]] = {
    "local": (local, r"/[^\x00-\x1f\x7f]*"),
    "slurm": (slurm, r"[0-9]+"),
    "kubernetes": (jobs, rf"({'|'.join(FORMS_BY_NAME)})/[a-z0-9-]+/[a-z0-9-]+"),
    "ray": (ray, r"[A-Za-z0-9_-]+@https?://[!-~]+"),
    "docker": (docker, r"[a-zA-Z0-9][a-zA-Z0-9_.-]*"),
}


@dataclass(frozen=True)
class ContainerImage:
    """The image of a job, with the record of its packages; the default is our image for the job."""

    image: Annotated[str, typer.Option(help="Run in this image. Default: mcore-bundle's image.")] = ""
    registry: Annotated[
        str, typer.Option(metavar="REGISTRY", help="Set the registry of mcore-bundle's images.")
    ] = images.LOCAL_BUILD_IMAGE_PREFIX
    record: options.ImageRecordOrNone = ""

    def choose_name(self, job: Job) -> str:
        """Return the name of the image. Raise UsageError where none of our images fits the job."""
        return self.image or images.find_matching_name(job, self.registry)

    def read_contents_or_undecided(self) -> ImageContents:
        """Return the contents of the image. Raise UsageError for a foreign image without a name."""
        if not self.record:
            return UNDECIDED
        if self.record != _NO_IMAGE_RECORD_KEYWORD:
            return image.read_record(Path(self.record))
        if not self.image:
            raise UsageError(
                "--image-record none: name an image of your own with --image. The images of mcore-bundle are",
                [f"REGISTRY/{built_image.tag}" for built_image in images.load_images()],
            )
        return None


def read_image_contents_or_none(container_image: str, record_name: str) -> ImageContents:
    """Return the contents of the image, None without one. Raise UsageError for a record of no image."""
    if record_name and not container_image:
        raise UsageError(
            f"--image-record {format_value(record_name)}: needs --image. Set --image, or leave out"
            " --image-record"
        )
    return (
        ContainerImage(container_image, record=record_name).read_contents_or_undecided()
        if container_image
        else None
    )


def decide_job(
    recipe: Recipe,
    request: JobRequest,
    machines: Machines,
    record: ImageContents,
    problems: Sequence[Problem] = (),
) -> Job:
    """Return the job of a recipe on such a cluster. Raise with all of its problems."""
    if record == UNDECIDED:
        request = replace(request, mcore=request.mcore or DEFAULT_RELEASE)  # not the local one
    planned = plan_job(recipe, request, machines, record, problems=problems)
    planned.plan.raise_gravest_problem()
    if record == UNDECIDED:
        _log.warning(
            "the package versions in the image are unknown. The plan assumes megatron-core %s; the first rank"
            " decides at its start which patches apply. To plan with the image's versions, run"
            " `docker run IMAGE doctor --json > FILE` and set --image-record FILE",
            planned.plan.megatron.version,
        )
    return planned.to_job()


def decide_job_with_local_paths(
    recipe: str,
    request: JobRequest,
    machines: Machines,
    record: ImageContents,
    *,
    checks_paths: bool,
    in_image: bool = False,
) -> Job:
    """Return the job of a recipe on a target that has the paths of this machine.

    Relative paths belong to the working directory. With `checks_paths`, the run directory and inputs here are
    checked too, as the nodes will find them. With `in_image`, a missing input is only a warning, as the
    container may have it.
    """
    loaded_recipe = request.load_recipe(recipe)
    directory, origin = request.find_run_directory(loaded_recipe).absolute(), request.start_from
    local_request = replace(request, run_directory=directory, start_from=origin and origin.absolute())
    if not checks_paths:
        return decide_job(loaded_recipe, local_request, machines, record)
    run, start = RunDirectory(directory), local_request.build_start()
    run.decide_resume(loaded_recipe, start)
    _, missing = run.describe_weights_and_problems(loaded_recipe, start)
    if in_image:
        warn_absent_inputs(missing)
        missing = []
    job = decide_job(loaded_recipe, local_request, machines, record, missing)
    warn_disk_space(loaded_recipe, run)
    return job


def warn_absent_inputs(problems: Iterable[Problem]) -> None:
    """Warn of inputs that cannot be used on this machine, and that the nodes of a job may have."""
    for problem in problems:
        _log.warning("%s (checked on this machine; the image or a mount may have it)", problem.text)


def warn_unmounted_inputs(job: Job, mounts: Sequence[Mount], workdir: Path, advice: str) -> None:
    """Warn of inputs on this machine that a container does not see; see `find_unmounted_inputs`."""
    for text in find_unmounted_inputs(job, mounts, workdir, advice):
        _log.warning("%s", text)


def warn_undetermined_step_count(job: Job, recipe: str) -> None:
    """Warn of a job whose number of steps is unknown until its nodes read the data.

    A contradiction with other keys is found only there.
    """
    if (epochs := job.recipe.train.epochs) is not None:
        _log.warning(
            "train.epochs: %g is converted to steps when the job has read the data. Check warm-up and"
            " intervals before that with `mcore-bundle check %s`",
            epochs,
            recipe,
        )


def warn_short_grace(job: Job, seconds: int | None) -> None:
    """Warn where `--grace` leaves less time than a save may need."""
    if seconds is not None and seconds < (estimate := estimate_save_seconds(job)):
        _log.warning(
            "--grace %d: a save may take %d s. A job that is killed before its end loses the steps since its"
            " last checkpoint",
            seconds,
            estimate,
        )


def print_handle_or_follow_job(handle: str, *, detach: bool) -> None:
    """Print the handle of a job; unless `detach` is set, show its output and end as it does."""
    if detach:
        print(handle)
        return
    print(f"{handle}: `mcore-bundle launch stop {handle}` makes it save and end", file=sys.stderr)
    ignore_stdout_write_errors()  # the job's log has everything
    target, name = find_target(handle)
    for text in target.follow(name):
        print(text, end="", flush=True)
    raise typer.Exit(target.wait(name))


def find_target(handle: str) -> tuple[Target, str]:
    """Return the target of a handle, and the job's name there. Raise UsageError where it is not a handle."""
    kind, _, name = handle.partition(":")
    target, pattern = TARGETS_WITH_JOB_ID_PATTERNS.get(kind, (slurm, ""))
    if kind not in TARGETS_WITH_JOB_ID_PATTERNS or not re.fullmatch(pattern, name, re.ASCII):
        raise UsageError(f"{format_value(handle)}: must be a job handle, such as slurm:1234")
    return target, name
