"""`mcore-bundle tune`: search the layout that trains a recipe fastest, and write the recipe with it."""

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bundle import files
from bundle.cli import options
from bundle.cli.request import CURRENT_ENVIRONMENT_RECORD, JobRequest, Machines, expand_options, plan_job
from bundle.environment import image
from bundle.errors import JobFailed, UsageError, format_bytes
from bundle.planning import Plan
from bundle.planning.tuning import Candidate, Search, describe_layout, list_tuned_overrides, search_candidates
from bundle.recipe import Recipe, load_values
from bundle.recipe.document import to_yaml

MAX_LISTED_CANDIDATES = 10

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@expand_options
def tune(
    recipe: options.Recipe,
    machines: Machines,
    overrides: options.Overrides = None,
    devices_per_node: options.DevicesPerNode = None,
    backend: options.Backend = "",
    mcore: options.Mcore = "",
    record: options.ImageRecord = None,
    measure: Annotated[
        int, typer.Option(min=0, metavar="N", help="Train the best N for some steps here, and compare these.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--write",
            parser=options.parse_nonempty_path,
            metavar="FILE",
            help="Write the recipe with the best layout.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: options.JSON_OPTION = False,
) -> None:
    """Find the layout, micro-batch size, recomputation and offload that train a recipe fastest."""
    if output is not None and output.exists() and not force:
        raise UsageError(f"--write {output}: this file exists. Name another one, or replace it with --force.")
    request = JobRequest(overrides=overrides, devices_per_node=devices_per_node, backend=backend, mcore=mcore)
    contents = image.read_record(record) if record else None
    loaded_recipe = request.load_recipe(recipe)

    def build(changed: Recipe) -> Plan:
        return plan_job(changed, request, machines, contents or CURRENT_ENVIRONMENT_RECORD).plan

    base = build(loaded_recipe)
    if measure:
        _check_measurable(base, machines, record)
    search = search_candidates(base, build, MAX_LISTED_CANDIDATES)
    search.raise_without_candidates(base)
    arguments = [f"--mcore={mcore}"] * bool(mcore) + [f"--backend={base.hardware.backend}"]
    speeds = _measure_tokens_per_second(search.candidates[:measure], arguments)
    best = max(speeds, key=lambda number: speeds[number], default=0)
    changes = list_tuned_overrides(loaded_recipe, search.candidates[best].plan.recipe)
    if as_json:
        print(json.dumps(_to_json(search, speeds, best, changes), indent=2))
    else:
        print("\n".join(_format_search(base, search, speeds, best)))
        words = [word for change in changes for word in ("--set", change)]
        print(f"set          {shlex.join(words) or 'nothing: the recipe has this layout'}")
    if output is not None:
        values = load_values(recipe, [*(overrides or ()), *changes])
        head = f"# Written by `mcore-bundle tune`: {describe_layout(search.candidates[best].plan.recipe)}.\n"
        files.write_text(output, head + to_yaml(values))
        print(f"written      {output}", file=sys.stderr if as_json else sys.stdout)


def _check_measurable(base: Plan, machines: Machines, image_record: Path | None) -> None:
    """Raise UsageError where this machine cannot measure the job."""
    if machines.hardware or image_record is not None or base.nodes > 1:
        raise UsageError(
            "--measure: the runs are on this machine. Leave out --hardware, --image-record and --nodes"
        )
    if base.recipe.rl is not None:
        raise UsageError("--measure: a step of task rl also samples answers. Leave this option out")


def _measure_tokens_per_second(candidates: Sequence[Candidate], arguments: Sequence[str]) -> dict[int, float]:
    """Return the tokens per second of each candidate that ran, by number.

    Raise the last error where none ran.
    """
    speeds, error = dict[int, float](), None
    for number, candidate in enumerate(candidates):
        from bundle.runs.measuring import measure_speed  # what only plans starts no run

        print(f"measuring {number + 1}: {describe_layout(candidate.plan.recipe)}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="mcore-bundle-tune-") as folder:
            try:
                speeds[number] = measure_speed(candidate.plan.recipe, Path(folder), arguments)
            except JobFailed as failure:
                print(f"measuring {number + 1}: {failure}", file=sys.stderr)
                error = failure
    if error is not None and not speeds:
        raise error
    return speeds


def _format_search(base: Plan, search: Search, speeds: dict[int, float], best: int) -> Iterator[str]:
    yield f"recipe       {base.recipe.name}: up to {base.step_tokens:,} tokens a step"
    yield f"hardware     {base.hardware.reason}; {base.world} {'rank' if base.world == 1 else 'ranks'}"
    yield f"searched     {search.legal:,} layouts are allowed, {search.planned:,} plans were made"
    if base.roofline.assumed_device_note:
        yield f"predicted    times are those{base.roofline.assumed_device_note}: only their order counts"
    for number, candidate in enumerate(search.candidates):
        measured = f", {speeds[number]:,.0f} measured" if number in speeds else ""
        mark = "*" if number == best else " "
        yield (
            f"{mark}{number + 1:<11} {candidate.predicted_tokens_per_second:,.0f} tokens/s{measured},"
            f" {candidate.time.total:.3g} s a step, {format_bytes(candidate.plan.fullest_rank_bytes)}:"
            f" {describe_layout(candidate.plan.recipe)}"
        )
        shares = candidate.time.largest_shares
        yield f"{'':13}limit: {', '.join(f'{name} {share:.0%}' for name, share in shares)}"
    if base.recipe.architecture.moe is not None:
        yield "note         experts count as evenly chosen; uneven ones take more time and memory"
    if base.recipe.architecture.vision is not None:
        yield "note         the time of the vision tower is not predicted"


def _to_json(search: Search, speeds: dict[int, float], best: int, changes: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "allowed": search.legal,
        "planned": search.planned,
        "best": best,
        "set": list(changes),
        "candidates": [
            {
                "layout": describe_layout(candidate.plan.recipe),
                "parallel": candidate.plan.recipe.parallel.dump(),
                "micro_batch_size": candidate.plan.recipe.train.micro_batch_size,
                "bytes": candidate.plan.fullest_rank_bytes,
                "tokens_per_second": candidate.predicted_tokens_per_second,
                "measured_tokens_per_second": speeds.get(number),
                "seconds": candidate.time._asdict(),
            }
            for number, candidate in enumerate(search.candidates)
        ],
    }
