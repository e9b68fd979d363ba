"""The verbs that train by flags alone (`sft`, `dpo`, `pretrain`): build a recipe, plan, check, train."""

import os
import shlex

import typer

from bundle.cli import may_fail, options
from bundle.cli.building import Built, Wish, build_recipe
from bundle.cli.check import count_data, data_lines, say_left_out
from bundle.cli.request import JobRequest, spread
from bundle.cli.train import decide_job, import_megatron_from, run_job
from bundle.errors import UsageError
from bundle.launch.job import Job
from bundle.launch.rendezvous import discover
from bundle.runs.directory import RunDirectory


def build_app(task: str, about: str) -> typer.Typer:
    """Return the typer app of the verb that trains this task; `about` is its help."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(task, help=about)
    @spread
    def train_task(
        model: options.Model,
        data: options.Data,
        request: JobRequest,
        lora: options.Lora = False,
        epochs: options.Epochs = None,
        fresh: options.Fresh = False,
    ) -> None:
        may_fail()  # the run directory has it all
        run_wish(Wish(task, model, data, lora, epochs, request=request), fresh=fresh)

    return app


def run_wish(wish: Wish, *, fresh: bool) -> None:
    """Build the recipe of a wish, train it on this machine's devices, and say where the result is."""
    if wish.request.mcore:
        import_megatron_from(wish.request.mcore)
    where = discover(os.environ)
    if where.is_rank or where.nodes > 1:
        raise UsageError(
            f"{wish.task}: {where.reason}, and this verb starts the ranks of one machine."
            f" Write a recipe with `mcore-bundle init` and start `mcore-bundle train` instead."
        )
    built = build_recipe(wish)
    job = decide_job(built.recipe, wish.request, where, fresh=fresh)
    print("\n".join(_describe_choices(built)), flush=True)
    say_left_out(built.corpus)
    run_job(job, where)
    print("\n".join(_result(job)))


def _describe_choices(built: Built) -> list[str]:
    """Return lines about what was chosen for a run."""
    width = max(len(choice.key) for choice in built.choices)
    lines = [f"  {choice.key:<{width}}  {choice.value}  ({choice.reason})" for choice in built.choices]
    counts = count_data(built.recipe, built.corpus)
    return [*lines, *data_lines(built.recipe, counts)]


def _result(job: Job) -> list[str]:
    """Return lines about where the trained model is and what to do with it."""
    run, lines = RunDirectory(job.directory), []
    if export := job.recipe.checkpoint.export:
        lines.append(f"trained model: {run.exported(export)}")
    model = job.directory if export in (None, "peft") else run.exported(export)
    lines.append(f"try it: {shlex.join(['mcore-bundle', 'generate', str(model), '--prompt', 'Hello'])}")
    again = ["mcore-bundle", "train", str(run.recipe)]
    if job.directory != job.recipe.run_directory:
        again += ["--run-directory", str(job.directory)]
    return [*lines, f"its recipe: {shlex.join(again)}"]
