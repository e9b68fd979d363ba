"""`mcore-bundle train`: decides about a job and starts this node's ranks, or is one of them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.cli import output
from bundle.cli.arguments import said
from bundle.cli.options import LogLevel
from bundle.environment import hardware, image, machine, packages
from bundle.environment.ascend import cann
from bundle.environment.doctor import package_findings
from bundle.environment.facts import Level
from bundle.errors import EnvironmentUnfit, UsageError
from bundle.launch import job as job_file
from bundle.launch import process, torchrun
from bundle.launch.job import Job, Start
from bundle.launch.rendezvous import Rendezvous, discover
from bundle.planning import Problem, hardware_problem, plan_for, recipe_problem
from bundle.planning.inputs import input_problems
from bundle.planning.plan import refuse
from bundle.planning.problems import devices_problems
from bundle.recipe import Recipe, load
from bundle.recipe.sections import MOST_PER_NODE
from bundle.runs.directory import RunDirectory, starting_checkpoint

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# What may be said beside --job: who we are, not what is done.
_BESIDE_JOB = {"job", "log_level", "nodes", "node_rank", "rendezvous", "wait", "dry_run"}


@app.command()
def train(
    context: typer.Context,
    recipe: str = typer.Argument("", help="A built-in recipe's name (see `recipes list`) or a file."),
    job: Path | None = typer.Option(
        None, metavar="FILE", help="Instead of a recipe, what `plan --job` wrote."
    ),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override one key of the recipe."
    ),
    run_directory: Path | None = typer.Option(None, help="Where the run lives; without it, runs/NAME."),
    fresh: bool = typer.Option(False, "--fresh", help="Start over, whatever the run directory holds."),
    resume: bool = typer.Option(False, "--resume", help="Go on with a run, be it finished."),
    start_from: Path | None = typer.Option(
        None, "--from", help="A checkpoint, or a run's newest, that a new run begins with."
    ),
    backend: str = typer.Option("", help=f"One of {', '.join(hardware.BACKENDS)}; without it, the recipe's."),
    allow_drift: list[str] = typer.Option([], metavar="ID", help="Go on although this patch drifted."),
    per_node: int = typer.Option(
        0, "--devices-per-node", min=0, max=MOST_PER_NODE, help="Devices of each; without it, the recipe's."
    ),
    nodes: int | None = typer.Option(None, help="Machines that run this job; start it on each."),
    node_rank: int | None = typer.Option(None, help="Which of them this one is, from 0."),
    rendezvous: str | None = typer.Option(None, metavar="HOST:PORT", help="Where they meet: node 0."),
    wait: int = typer.Option(
        torchrun.WAIT_SECONDS, min=1, metavar="SECONDS", help="How long a node waits for the others."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would run on each node, and stop."),
    log_level: LogLevel = "",
) -> None:
    """Train a recipe: pre-training or SFT. A stopped run goes on where its last checkpoint is."""
    if backend not in ("", *hardware.BACKENDS):
        raise typer.BadParameter(f"choose one of {', '.join(hardware.BACKENDS)}", param_hint="--backend")
    if bool(recipe) is (job is not None):
        raise UsageError("say what to train: a recipe, or --job FILE, and not both")
    if not dry_run:
        output.may_fail()  # the run directory has it all

    def here(planned_nodes: int) -> Rendezvous:
        return discover(
            os.environ, nodes=nodes, node_rank=node_rank, endpoint=rendezvous, planned=planned_nodes
        )

    if job is not None:
        if more := said(context) - _BESIDE_JOB:
            raise UsageError(f"--job {job} says all about the job: leave out {', '.join(sorted(more))}")
        told = job_file.load(job)
        where = here(told.nodes)
        if where.is_rank:
            _be_a_rank(where, lambda: job_file.decided(told), told, wait)
        _check(told, where)
    else:
        asked = load(recipe, overrides)
        where = here(asked.devices.nodes)
        start = Start(fresh=fresh, resume=resume, origin=str(start_from) if start_from else None)
        directory = run_directory or Path("runs") / asked.name

        def decide() -> Job:
            return _decided(
                asked, where, directory, start, backend, per_node, tuple(allow_drift), dry_run=dry_run
            )

        if where.is_rank:
            _be_a_rank(where, decide, None, wait)
        told = decide()
    if dry_run:
        every = [replace(where, node_rank=node) for node in range(where.nodes)]
        print(torchrun.dry_run([job_file.launch(told, node, wait) for node in every], os.environ), end="")
        return
    run, start = RunDirectory(told.directory), told.start
    goes_on = run.begin(told.recipe, fresh=start.fresh, resume=start.resume, start_from=start.checkpoint)
    if goes_on and run.finished(told.recipe):
        print(run.nothing_left())
        return
    process.run(job_file.launch(told, where, wait), os.environ)


def _be_a_rank(where: Rendezvous, decide: Callable[[], Job], told: Job | None, wait: int) -> Any:
    """Ends this process as a rank, which alone imports torch."""
    from bundle.training.worker import work

    raise typer.Exit(int(work(where, decide, told, wait)))


def _decided(
    recipe: Recipe,
    where: Rendezvous,
    directory: Path,
    start: Start,
    backend: str,
    per_node: int,
    allow_drift: tuple[str, ...],
    *,
    dry_run: bool,
) -> Job:
    """The job that a recipe is here. Raises with everything that stands against it."""
    made = plan_for(
        recipe,
        backend=backend or None,
        allow_drift=allow_drift,
        nodes=where.nodes,
        per_node=where.per_node or per_node or None,
        beside=[
            *_files(recipe, directory, start),
            *_starter(per_node or recipe.devices.per_node, where),
            *(() if dry_run else _packages()),
        ],
    )
    made.refuse()
    return job_file.of_plan(made, directory, start=start, record=image.own(), allow_drift=allow_drift)


def _check(told: Job, where: Rendezvous) -> None:
    """Raises with everything that keeps this node from executing a job file."""
    if where.nodes != told.nodes:
        raise UsageError(f"the job is for {told.nodes} nodes, and {where.source} says {where.nodes}")
    on = hardware.detect(told.backend)
    refuse(
        told.recipe,
        [
            *_files(told.recipe, told.directory, told.start),
            *_starter(told.per_node, where),
            *_packages(),
            *devices_problems(on, told.per_node),
        ],
    )
    if unfit := list(job_file.misfits(told, packages.detect().megatron, image.own())):
        raise EnvironmentUnfit("this is not what the job was decided for", unfit)


def _files(recipe: Recipe, directory: Path, start: Start) -> list[Problem]:
    """What is wrong with what lies on this machine's disks."""
    found = list(input_problems(recipe, directory))
    origin = start.checkpoint
    if origin and (start.fresh or not CheckpointDirectory(RunDirectory(directory).checkpoints).steps()):
        try:
            starting_checkpoint(origin)
        except UsageError as error:
            found.append(recipe_problem(str(error)))
    return found


def _starter(wanted: int | None, where: Rendezvous) -> list[Problem]:
    said = where.per_node
    if wanted is None or said is None or wanted == said:
        return []
    return [recipe_problem(f"devices.per_node: {wanted}, but {where.source}, which starts this, says {said}")]


def _packages() -> list[Problem]:
    """What a rank would miss at its first import, on any backend."""
    here = machine.local()
    found = package_findings(packages.detect(), hardware.detect("cpu", here), cann(here), here.environ)
    without = [f for f in found if f.level is Level.FAIL and f.subject in ("torch", "megatron-core")]
    return [hardware_problem(f"{f.subject}: {f.cause}; {f.fix}") for f in without]
