"""`mcore-bundle check`: the counts of a job's data, and the samples that a model will see."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bundle.checkpoints import state
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.cli import options
from bundle.cli.check_questions import count_questions, decode_questions, format_question_lines
from bundle.cli.request import JobRequest, Machines, plan_job
from bundle.errors import UsageError
from bundle.planning.output import build_settings_json, format_disk, format_settings
from bundle.recipe import Recipe, from_mapping, with_epochs_as_steps
from bundle.runs.directory import RunDirectory

if TYPE_CHECKING:
    from bundle.data import Corpus

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def check(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    run_directory: options.RunDirectory = None,
    start_from: options.StartFrom = None,
    weights_only: options.WeightsOnly = False,
    resume: options.Resume = False,
    hardware: options.Hardware = "",
    samples: Annotated[int, typer.Option(min=0, max=100, help="Samples to show.")] = 3,
    as_json: options.JSON_OPTION = False,
) -> None:
    """Read the data as `train` does, and report its counts; `train` then uses the tokens made here."""
    request = JobRequest(overrides, run_directory, resume, start_from, weights_only)
    job = request.load_recipe(recipe)
    directory, start = request.find_run_directory(job), request.build_start()
    run = RunDirectory(directory)
    # The data of a finished run may be checked again.
    resumed_start = start.model_copy(update={"resume": resume or run.has_required_results(job)})
    initial_weights, problems = run.describe_weights_and_problems(job, resumed_start)
    if hardware:
        plan_job(job, request, Machines(hardware=hardware), problems=problems).plan.raise_gravest_problem()
    elif problems:
        raise UsageError(f"recipe {job.name} cannot be checked", [problem.text for problem in problems])
    from bundle.data import prepare
    from bundle.data.cache import choose_cross_run_cache_directory
    from bundle.data.corpus import decode_first_samples
    from bundle.data.loader import build_progress_callback

    if job.task_traits.samples_answers:
        from bundle.data.questions import read_rl_prompts

        questions = read_rl_prompts(job)
        identity, counts = questions.identity, count_questions(questions)
        sample_texts, data_lines = decode_questions(questions, samples), format_question_lines(counts)
        left_out_lines = [
            line for part in (questions.training, questions.evaluation) if part for line in part.left_out
        ]
        size = len(questions.training)
    else:
        corpus = prepare(job, choose_cross_run_cache_directory(job, directory), build_progress_callback())
        identity, counts = dict(corpus.identity), count_data(job, corpus)
        sample_texts, data_lines = decode_first_samples(job, corpus, samples), format_data_lines(job, counts)
        left_out_lines, size = list(list_skipped_and_long_rows(corpus)), len(corpus.training)
    disk_space = run.estimate_disk(with_epochs_as_steps(job, size))
    if as_json:
        document = {"weights": initial_weights, "settings": build_settings_json(job), **counts}
        document |= {"disk": disk_space._asdict(), "samples": sample_texts}
        print(json.dumps({"schema": 1, **document}, indent=2))
        _refuse_other_data(run, identity)
        return
    lines = (
        f"weights    {initial_weights}",
        *(f"{'' if index else 'settings':<10} {line}" for index, line in enumerate(format_settings(job))),
        *data_lines,
        f"disk       {format_disk(disk_space, directory)}",
    )
    print("\n".join(lines))
    print_left_out_rows(left_out_lines)
    title = "question {}" if job.task_traits.samples_answers else "sample {} of step 1, ⟦learned⟧"
    for number, text in enumerate(sample_texts, start=1):
        print(f"\n{title.format(number)}:\n{text}")
    _refuse_other_data(run, identity)


def _refuse_other_data(run: RunDirectory, identity: Mapping[str, str]) -> None:
    """Raise UsageError where `train` would resume a run that was trained on other data."""
    from bundle.checkpoints.state import list_data_changes

    checkpoints = CheckpointDirectory(run.checkpoints)
    if not (steps := checkpoints.list_steps_newest_first()):
        return
    try:
        last_identity = state.read(checkpoints.get_path(steps[0])).state.metrics.get("data", {})
    except ValueError:  # `train` reports it
        return
    if changes := list_data_changes(last_identity, identity):
        raise UsageError(
            f"{run.root} was trained on other data. Restore that data, or name another directory with"
            f" --run-directory",
            changes,
        )


def count_data(job: Recipe, corpus: "Corpus") -> dict[str, Any]:
    """Return the counts of a corpus by name, with those of rows that were left out."""
    from bundle.data.corpus import inspect

    counts: dict[str, Any] = asdict(inspect(job, corpus))
    counts |= counts.pop("left_out")
    counts["advice"] = list(_list_packing_advice(job, counts["filled"]))
    return counts


_PACKING_ADVICE_FILLED_SHARE = 0.6  # the filled share of a row; below it, packs are faster


def _list_packing_advice(job: Recipe, filled: float) -> Iterator[str]:
    """Yield advice that would make the job faster, where the recipe allows it.

    `filled` is the filled share of each row.
    """
    if job.task_traits.has_plain_text_rows or job.data.packed or filled >= _PACKING_ADVICE_FILLED_SHARE:
        return
    values = job.dump()
    values["data"]["packed"], values["train"]["micro_batch_size"] = True, 1
    try:
        from_mapping(values)
    except UsageError:  # this model does not support packs
        return
    also = "" if job.train.micro_batch_size == 1 else " and train.micro_batch_size: 1"
    yield (
        f"data.packed: {100 * filled:.0f} % of each row is filled. Set it to true{also}"
        f" (about {1 / filled:.1f} times as many tokens a second)"
    )


def list_skipped_and_long_rows(corpus: "Corpus") -> Iterator[str]:
    """Yield messages about the first rows that did not become tokens unchanged."""
    validation_sets = (
        (f"data.validation_sets.{name}: ", set_left_out)
        for name, set_left_out in corpus.validation_left_out.items()
    )
    for prefix, left_out in (("", corpus.left_out), *validation_sets):
        yield from (f"{prefix}{reason}" for reason in (*left_out.skipped_rows, *left_out.long_rows))


def print_left_out_rows(lines: Iterable[str]) -> None:
    """Print messages about rows that were left out on standard error."""
    for line in lines:
        print(f"  - {line}", file=sys.stderr)


def format_data_lines(job: Recipe, counts: dict[str, Any]) -> list[str]:
    """Return the lines about the data, one for each kind of count."""
    kind, size = "packs" if job.data.packed else "samples", job.train.global_batch_size
    share = 100 * counts["learned"] / max(1, counts["tokens"])
    setting = f" (data.validation: {job.data.validation:g})"
    held_out = (
        f", {counts['held_out']:,} held out{setting}" if counts["held_out"] else f", none held out{setting}"
    )
    row_note = f" of {counts['rows']:,} rows" if counts["rows"] != counts["documents"] else ""
    return [
        *(f"rows       {name}: {count:,}" for name, count in counts["formats"].items()),
        f"documents  {counts['documents']:,}{row_note}{_format_left_out(counts)}",
        f"tokens     {counts['tokens']:,}; {share:.1f} % are learned",
        *(f"{kind:<10} {counts[kind]:,}" for kind in ("images", "videos") if counts[kind]),
        f"{kind:<10} {counts['training']:,} to train on{held_out}; of {job.data.sequence_length:,} tokens,"
        f" filled to {100 * counts['filled']:.1f} %",
        *(
            f"evaluated  {name}: {count:,} {kind}{_format_left_out(counts['validation_left_out'][name])}"
            for name, count in counts["validation_sets"].items()
        ),
        f"epochs     {counts['epochs']:.2f} (steps: {counts['steps']:,} of {size}; steps in one epoch:"
        f" {counts['steps_per_epoch']:.1f})",
        *(
            f"blend      {100 * share['weight']:.4g} % {share['path']}: {share['samples']:,} {kind},"
            f" {share['epochs']:.2f} epochs of it"
            for share in counts["blend"]
        ),
        *(f"advice     {advice}" for advice in counts["advice"]),
    ]


def _format_left_out(counts: dict[str, Any]) -> str:
    """Return the text about rows that a data set leaves out; empty where there are none."""
    left_out = (
        ("skipped", "corrupt rows or files skipped"),
        ("deleted", "rows deleted as too long"),
        ("cut", "rows cut"),
    )
    return "".join(f"; {meaning}: {counts[key]:,}" for key, meaning in left_out if counts[key])
