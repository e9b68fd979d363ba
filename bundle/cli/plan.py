"""`mcore-bundle plan`: all that a job will be, before anything is started; written down, if asked for."""

import json
import shlex
from pathlib import Path

import typer

from bundle import files
from bundle.cli.arguments import words_of
from bundle.cli.options import LogLevel
from bundle.environment import hardware, image
from bundle.errors import ExitCode, UsageError
from bundle.launch import job as job_file
from bundle.launch import torchrun
from bundle.launch.job import Job, Start
from bundle.launch.rendezvous import LOOPBACK, Rendezvous
from bundle.planning import plan_for, to_json, to_text
from bundle.planning.inputs import input_problems
from bundle.recipe import load
from bundle.recipe.sections import MOST_PER_NODE, MOST_RANKS

app = typer.Typer(rich_markup_mode=None, add_completion=False)
# What `train` does not know, or is told beside its node's rank.
_PLANS_ONLY = {"named", "mcore", "record", "job", "as_json", "nodes"}


@app.command()
def plan(
    context: typer.Context,
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
    nodes: int = typer.Option(0, min=0, max=MOST_RANKS, help="Machines; without it, the recipe's."),
    per_node: int = typer.Option(
        0, "--devices-per-node", min=0, max=MOST_PER_NODE, help="Devices of each; without it, the recipe's."
    ),
    named: str = typer.Option(
        "", "--hardware", help=f"Instead of this machine: {', '.join(hardware.NAMES)}."
    ),
    backend: str = typer.Option("", help=f"One of {', '.join(hardware.BACKENDS)}; without it, the recipe's."),
    mcore: str = typer.Option("", metavar="VERSION|PATH", help="Instead of the installed megatron-core."),
    record: Path | None = typer.Option(
        None,
        "--image-record",
        metavar="FILE",
        help="The packages of an image: what its `doctor --json` said.",
    ),
    allow_drift: list[str] = typer.Option([], metavar="ID", help="Go on although this patch drifted."),
    job: Path | None = typer.Option(
        None, metavar="FILE", help="Write the job to this file, for `train --job FILE`."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines."),
    log_level: LogLevel = "",
) -> None:
    """Plan a job: layout, memory, patches, traps, environment, command; ends with what would stop it."""
    if backend not in ("", *hardware.BACKENDS):
        raise typer.BadParameter(f"choose one of {', '.join(hardware.BACKENDS)}", param_hint="--backend")
    asked = load(recipe, overrides)
    directory = run_directory or Path("runs") / asked.name
    of = image.named(record) if record else None
    elsewhere = bool(named or of)
    made = plan_for(
        asked,
        backend=backend or None,
        named=named or None,
        mcore=mcore or (_megatron(of) if of else ""),
        allow_drift=allow_drift,
        nodes=nodes or None,
        per_node=per_node or None,
        others=of,
        beside=() if elsewhere else tuple(input_problems(asked, directory)),
    )
    run = starts = ""
    if made.code is ExitCode.OK:
        decided = job_file.of_plan(
            made,
            directory,
            start=Start(fresh=fresh, resume=resume, origin=str(start_from) if start_from else None),
            record=of if elsewhere else image.own(),
            allow_drift=tuple(allow_drift),
        )
        if job:
            files.write_text(job, decided.text())
        run, starts = _run(context, decided, job), _starts(decided)
    if as_json:
        print(json.dumps(to_json(made) | {"run": run, "starts": starts}, indent=2))
    else:
        print(to_text(made, run, starts))
    raise typer.Exit(int(made.code))


def _megatron(of: image.BuildInfo) -> str:
    package = of.package("megatron-core")
    if package is None or package.version is None:
        raise UsageError("--image-record: there is no megatron-core in that image")
    return package.version


def _run(context: typer.Context, decided: Job, job: Path | None) -> str:
    """The command that runs the job: by the file that was written, or else as the plan was asked for."""
    words = ["mcore-bundle", "train"]
    words += [f"--job={job}"] if job else [*words_of(context, _PLANS_ONLY), *_backend(context, decided)]
    if not job and max(decided.nodes, decided.recipe.devices.nodes) > 1:
        words += ["--nodes", str(decided.nodes)]
    if decided.nodes > 1:
        words += ["--node-rank", "RANK", "--rendezvous", "HOST:PORT"]
    return shlex.join(words)


def _backend(context: typer.Context, decided: Job) -> list[str]:
    """The backend, where a machine was named that has another one than a command there would take."""
    return ["--backend", decided.backend] if context.params["named"] and not context.params["backend"] else []


def _starts(decided: Job) -> str:
    """What the command starts on the first node."""
    alone = decided.nodes == 1
    meeting = Rendezvous(
        nodes=decided.nodes,
        node_rank=0,
        address=LOOPBACK if alone else "HOST",
        port=None if alone else 29500,
        source="plan",
        reason="planned",
    )
    return torchrun.command(job_file.launch(decided, meeting), {}).shell()
