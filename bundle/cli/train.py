"""`mcore-bundle train`: starts this node's ranks, or is one of them under torchrun."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.cli import output
from bundle.cli.arguments import job_words, rank_words
from bundle.cli.options import LogLevel
from bundle.environment import hardware, machine, packages
from bundle.environment.ascend import cann
from bundle.environment.compatibility import package_findings
from bundle.environment.facts import Level
from bundle.errors import UsageError
from bundle.launch import outcomes, process, torchrun
from bundle.launch.rendezvous import Rendezvous, discover
from bundle.planning import Plan, Problem, hardware_problem, plan_for, recipe_problem
from bundle.planning.inputs import input_problems
from bundle.recipe import Recipe, load
from bundle.runs.directory import RunDirectory, starting_checkpoint
from bundle.training.job import Job

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: str = typer.Argument(help="A built-in recipe's name (see `recipes list`) or a file."),
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
    job = load(recipe, overrides)
    where = discover(
        os.environ, nodes=nodes, node_rank=node_rank, endpoint=rendezvous, planned=job.devices.nodes
    )
    directory = run_directory or Path("runs") / job.name
    if not dry_run:
        output.may_fail()  # the run directory has it all
    if where.is_rank:
        # Only a rank imports torch.
        from bundle.training.worker import work

        told = Job(job, RunDirectory(directory), fresh, resume, start_from)
        raise typer.Exit(int(work(told, where, backend or None, tuple(allow_drift))))
    made = plan_for(
        job,
        backend=backend or None,
        allow_drift=allow_drift,
        nodes=where.nodes,
        per_node=where.per_node,
        beside=[
            *input_problems(job, directory),
            *(_origin(start_from) if start_from and (fresh or not _has_checkpoints(directory)) else ()),
            *_starter(job, where),
            *(() if dry_run else _packages()),
        ],
    )
    made.refuse()
    words = rank_words(job_words(recipe, overrides, allow_drift), directory, made.hardware.backend)
    words += [*(["--fresh"] if fresh else []), *(["--resume"] if resume else [])]
    words += [f"--from={start_from}"] if start_from else []
    if dry_run:
        all_nodes = [replace(where, node_rank=node) for node in range(where.nodes)]
        launches = [_launch(made, node, directory, words, wait) for node in all_nodes]
        print(torchrun.dry_run(launches, os.environ), end="")
        return
    run = RunDirectory(directory)
    goes_on = run.begin(job, fresh=fresh, resume=resume, start_from=start_from)
    if goes_on and run.finished(job):
        print(run.nothing_left())
        return
    process.run(_launch(made, where, directory, words, wait), os.environ)


def _has_checkpoints(directory: Path) -> bool:
    return bool(CheckpointDirectory(RunDirectory(directory).checkpoints).steps())


def _origin(start_from: Path) -> list[Problem]:
    try:
        starting_checkpoint(start_from)
    except UsageError as error:
        return [recipe_problem(str(error))]
    return []


def _starter(job: Recipe, where: Rendezvous) -> list[Problem]:
    wanted, said = job.devices.per_node, where.per_node
    if wanted is None or said is None or wanted == said:
        return []
    return [recipe_problem(f"devices.per_node: {wanted}, but {where.source}, which starts this, says {said}")]


def _packages() -> list[Problem]:
    """What a rank would miss at its first import, on any backend."""
    here = machine.local()
    found = package_findings(packages.detect(), hardware.detect("cpu", here), cann(here), here.environ)
    without = [f for f in found if f.level is Level.FAIL and f.subject in ("torch", "megatron-core")]
    return [hardware_problem(f"{f.subject}: {f.cause}; {f.fix}") for f in without]


def _launch(
    plan: Plan, where: Rendezvous, directory: Path, words: Sequence[str], wait: int
) -> torchrun.Launch:
    return torchrun.Launch(
        arguments=tuple(words),
        rendezvous=where,
        per_node=plan.per_node,
        logs=outcomes.next_logs(directory, where.node_rank),
        environment={variable.name: variable.value for variable in plan.environment},
        wait=wait,
    )
