"""The verbs that train by flags alone (`sft`, `dpo`, `pretrain`): build a recipe, plan, check, train."""

import os
import shlex
from dataclasses import replace

import typer

from bundle.cli import ignore_stdout_write_errors, options
from bundle.cli.building import BuiltRecipe, TaskSpec, build_recipe
from bundle.cli.check import count_data, format_data_lines, list_skipped_and_long_rows, print_left_out_rows
from bundle.cli.request import JobRequest, expand_options
from bundle.cli.train import apply_and_clear_mcore, decide_job, run_job
from bundle.errors import UsageError
from bundle.launch.job import Job
from bundle.launch.rendezvous import discover
from bundle.runs.directory import RunDirectory


def build_app(task: str, help_text: str) -> typer.Typer:
    """Return the typer app of the verb that trains this task; `help_text` is its help."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(task, help=help_text)
    @expand_options
    def train_task(
        model: options.Model,
        data: options.Data,
        request: JobRequest,
        lora: options.Lora = False,
        epochs: options.Epochs = None,
        fresh: options.Fresh = False,
    ) -> None:
        ignore_stdout_write_errors()  # the run directory has all results
        run_task(TaskSpec(task, model, data, lora, epochs, request=request), fresh=fresh)

    return app


def run_task(spec: TaskSpec, *, fresh: bool) -> None:
    """Build the recipe of a task, train it on this machine's devices, and print where the result is."""
    spec = replace(spec, request=apply_and_clear_mcore(spec.request))
    rendezvous = discover(os.environ)
    if rendezvous.is_rank or rendezvous.nodes > 1:
        raise UsageError(
            f"{spec.task}: {rendezvous.reason}, but this command starts the ranks of one machine."
            f" Write a recipe with `mcore-bundle init` and start `mcore-bundle train` instead."
        )
    built = build_recipe(spec)
    job = decide_job(built.recipe, spec.request, rendezvous, fresh=fresh)
    print("\n".join(_format_choices_and_data(built)), flush=True)
    print_left_out_rows(list_skipped_and_long_rows(built.corpus))
    run_job(job, rendezvous)
    print("\n".join(_format_trained_model_hints(job)))


def _format_choices_and_data(built: BuiltRecipe) -> list[str]:
    """Return lines about the choices for a run."""
    width = max(len(choice.key) for choice in built.choices)
    lines = [f"  {choice.key:<{width}}  {choice.value}  ({choice.reason})" for choice in built.choices]
    counts = count_data(built.recipe, built.corpus)
    return [*lines, *format_data_lines(built.recipe, counts)]


def _format_trained_model_hints(job: Job) -> list[str]:
    """Return lines about the trained model: its place, and commands to use it."""
    run, lines = RunDirectory(job.directory), []
    if export := job.recipe.checkpoint.export:
        lines.append(f"trained model: {run.build_export_path(export)}")
    model = job.directory if export in (None, "peft") else run.build_export_path(export)
    lines.append(f"try it: {shlex.join(['mcore-bundle', 'generate', str(model), '--prompt', 'Hello'])}")
    train_arguments = ["mcore-bundle", "train", str(run.recipe)]
    if job.directory != job.recipe.default_run_directory:
        train_arguments += ["--run-directory", str(job.directory)]
    return [*lines, f"its recipe: {shlex.join(train_arguments)}"]
