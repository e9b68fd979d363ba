"""`mcore-bundle plan`: all that a job will be, before anything is started; written down, if asked for."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bundle import files
from bundle.cli import options
from bundle.cli.request import JobRequest, Machines, spread
from bundle.environment import image
from bundle.environment.image import BuildInfo
from bundle.errors import ExitCode
from bundle.launch import outcomes
from bundle.launch.command import Launch, command
from bundle.launch.rendezvous import LOOPBACK, Rendezvous
from bundle.launch.starters import DEFAULT_PORT
from bundle.planning import Plan, Problem, plan_for, to_json, to_text
from bundle.planning.inputs import input_problems, missing_files
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# What `train` does not know, or is told beside its node's rank.
_PLANS_ONLY = {"hardware", "record", "job", "as_json", "nodes"}


@app.command()
@spread
def plan(
    context: typer.Context,
    recipe: options.Recipe,
    request: JobRequest,
    machines: Machines,
    fresh: options.Fresh = False,
    record: options.ImageRecord = None,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the job to this file, for `train --job FILE`.")
    ] = None,
    as_json: options.JSON = False,
) -> None:
    """Plan a job: layout, memory, patches, traps, environment, command; ends with what would stop it."""
    asked = request.load(recipe)
    directory = request.directory(asked)
    of = image.named(record) if record else None
    elsewhere = bool(machines.hardware or of)
    start = request.start(fresh=fresh)
    run_directory = RunDirectory(directory)
    begins = None if elsewhere else run_directory.beginning(asked, start)
    beside: tuple[Problem, ...] = ()
    if begins is not None:
        beside = (*input_problems(asked, directory, begins), *run_directory.problems(asked, start))
    made = planned(asked, request, machines, of, beside, begins.described if begins else "")
    if elsewhere:
        missing = (f"{problem.text} (seen from here; mount it there)" for problem in missing_files(asked))
        made = made._replace(notes=(*made.notes, *missing))
    run = starts = ""
    if made.code is ExitCode.OK:
        if job:
            from bundle.launch.job import of_plan

            built = of if elsewhere else image.own()
            decided = of_plan(made, directory, start=start, record=built)
            files.write_text(job, decided.text())
            words = ["train", f"--job={job}"]
        else:
            # A machine was named that has another backend than a command there would take.
            chosen = ["--backend", made.hardware.backend] if machines.hardware and not request.backend else []
            words = ["train", *options.words_of(context, _PLANS_ONLY), *chosen]
        run, starts = _run(made, words, told=bool(job)), _starts(made, words, directory)
    if as_json:
        print(json.dumps(to_json(made) | {"run": run, "starts": starts}, indent=2))
    else:
        print(to_text(made, run, starts))
    raise typer.Exit(int(made.code))


def planned(
    recipe: Recipe,
    request: JobRequest,
    machines: Machines,
    record: BuildInfo | None,
    beside: Sequence[Problem] = (),
    weights: str = "",
) -> Plan:
    """The plan of a recipe for the machines that are asked for; `record`: of the image that they run."""
    return plan_for(
        recipe,
        backend=request.backend or None,
        named=machines.hardware or None,
        mcore=request.mcore or (record.megatron if record else ""),
        allow_drift=request.allow_drift or (),
        nodes=machines.nodes,
        per_node=request.devices_per_node,
        others=record,
        beside=beside,
        weights=weights,
    )


def _run(made: Plan, words: list[str], *, told: bool) -> str:
    """The command that runs the job: by the file that was written, or else as the plan was asked for."""
    nodes = (
        ["--nodes", str(made.nodes)] if not told and max(made.nodes, made.recipe.devices.nodes) > 1 else []
    )
    meet = ["--node-rank", "RANK", "--rendezvous", "HOST:PORT"] if made.nodes > 1 else []
    return shlex.join(["mcore-bundle", *words, *nodes, *meet])


def _starts(made: Plan, words: list[str], directory: Path) -> str:
    """What starts the ranks of the first node."""
    alone = made.nodes == 1
    meeting = Rendezvous(
        nodes=made.nodes,
        node_rank=0,
        address=LOOPBACK if alone else "HOST",
        port=None if alone else DEFAULT_PORT,
        source="plan",
        reason="planned",
    )
    launch = Launch(
        arguments=tuple(words),
        rendezvous=meeting,
        per_node=made.per_node,
        logs=outcomes.next_logs(directory, 0),
        environment=made.variables,
    )
    return command(launch, {}).shell()
