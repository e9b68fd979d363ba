"""`mcore-bundle plan`: all decisions about a job before it starts, also written as a job file on request."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from bundle import files
from bundle.cli import options
from bundle.cli.request import CURRENT_ENVIRONMENT_RECORD, JobRequest, Machines, expand_options, plan_job
from bundle.environment import image
from bundle.errors import ExitCode
from bundle.launch import outcomes
from bundle.launch.command import Launch, build_command
from bundle.launch.rendezvous import LOOPBACK, Rendezvous
from bundle.launch.starters import DEFAULT_PORT
from bundle.planning import Plan, Problem, to_json, to_text
from bundle.planning.inputs import find_non_weight_problems
from bundle.runs.directory import RunDirectory

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# The parameters that `train` lacks, or that it gets together with the node's rank.
_PLAN_ONLY_PARAMETERS = {"hardware", "record", "job", "as_json", "nodes"}


@app.command()
@expand_options
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
    as_json: options.JSON_OPTION = False,
) -> None:
    """Plan a job: layout, memory, patches, traps, environment and command, then what would stop it."""
    loaded_recipe = request.load_recipe(recipe)
    directory = request.find_run_directory(loaded_recipe)
    image_record = image.read_record(record) if record else None
    is_remote = bool(machines.hardware or image_record)
    start_weights, problems = "", list[Problem]()
    if not is_remote:
        start_weights, problems = RunDirectory(directory).describe_weights_and_problems(
            loaded_recipe, request.build_start(fresh=fresh)
        )
    planned = plan_job(
        loaded_recipe,
        request,
        machines,
        image_record if is_remote else CURRENT_ENVIRONMENT_RECORD,
        fresh=fresh,
        problems=problems,
        weights=start_weights,
    )
    job_plan = planned.plan
    if is_remote:
        missing = (
            f"{problem.text} (checked on this machine; mount it on the nodes)"
            for problem in find_non_weight_problems(loaded_recipe)
        )
        job_plan = job_plan._replace(notes=(*job_plan.notes, *missing))
    run_command = start_command = ""
    if job_plan.exit_code is ExitCode.OK:
        if job:
            files.write_text(job, planned.to_job().to_text())
            arguments = ["train", f"--job={job}"]
        else:
            # The named machine may have another backend than the default of a command there.
            backend_arguments = (
                ["--backend", job_plan.hardware.backend] if machines.hardware and not request.backend else []
            )
            arguments = [
                "train",
                *options.build_arguments(context, _PLAN_ONLY_PARAMETERS),
                *backend_arguments,
            ]
        run_command, start_command = (
            _format_run_command(job_plan, arguments, has_job_file=bool(job)),
            _format_torchrun_command(job_plan, arguments, directory),
        )
    if as_json:
        print(json.dumps(to_json(job_plan) | {"run": run_command, "starts": start_command}, indent=2))
    else:
        print(to_text(job_plan, run_command, start_command))
    raise typer.Exit(int(job_plan.exit_code))


def _format_run_command(job_plan: Plan, arguments: list[str], *, has_job_file: bool) -> str:
    """Return the command that runs the job, with the written job file or else the options of `plan`."""
    node_arguments = (
        ["--nodes", str(job_plan.nodes)]
        if not has_job_file and max(job_plan.nodes, job_plan.recipe.devices.nodes) > 1
        else []
    )
    rendezvous_arguments = ["--node-rank", "RANK", "--rendezvous", "HOST:PORT"] if job_plan.nodes > 1 else []
    return shlex.join(["mcore-bundle", *arguments, *node_arguments, *rendezvous_arguments])


def _format_torchrun_command(job_plan: Plan, arguments: list[str], directory: Path) -> str:
    """Return the command that starts the ranks of the first node."""
    is_single_node = job_plan.nodes == 1
    rendezvous = Rendezvous(
        nodes=job_plan.nodes,
        node_rank=0,
        address=LOOPBACK if is_single_node else "HOST",
        port=None if is_single_node else DEFAULT_PORT,
        source="plan",
        reason="planned",
    )
    launch = Launch(
        arguments=tuple(arguments),
        rendezvous=rendezvous,
        per_node=job_plan.per_node,
        logs=outcomes.find_next_log_folder(directory, 0),
        environment=job_plan.environment_variables,
    )
    return build_command(launch, {}).to_redacted_shell()
