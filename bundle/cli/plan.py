"""`mcore-bundle plan`: all that a job will be, before anything is started."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from bundle.cli.arguments import job_words, rank_words
from bundle.cli.options import LogLevel
from bundle.environment import hardware
from bundle.errors import ExitCode
from bundle.launch import outcomes, torchrun
from bundle.launch.rendezvous import LOOPBACK, Rendezvous
from bundle.planning import Plan, plan_for, to_json, to_text
from bundle.planning.inputs import input_problems
from bundle.recipe import load
from bundle.recipe.sections import MOST_PER_NODE, MOST_RANKS

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def plan(
    recipe: str = typer.Argument(help="A built-in recipe's name (see `recipes list`) or a file."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override one key of the recipe."
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
    allow_drift: list[str] = typer.Option([], metavar="ID", help="Go on although this patch drifted."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines."),
    log_level: LogLevel = "",
) -> None:
    """Plan a job: layout, memory, patches, traps, environment, command; ends with what would stop it."""
    if backend not in ("", *hardware.BACKENDS):
        raise typer.BadParameter(f"choose one of {', '.join(hardware.BACKENDS)}", param_hint="--backend")
    job = load(recipe, overrides)
    directory = Path("runs") / job.name
    made = plan_for(
        job,
        backend=backend or None,
        named=named or None,
        mcore=mcore,
        allow_drift=allow_drift,
        nodes=nodes or None,
        per_node=per_node or None,
        beside=() if named else tuple(input_problems(job, directory)),
    )
    words = job_words(recipe, overrides, allow_drift)
    words += ["--set", f"devices.per_node={per_node}"] if per_node else []
    chosen = backend or named or job.backend not in ("auto", made.hardware.backend)
    run, starts = _commands(made, words, ["--backend", made.hardware.backend] if chosen else [], directory)
    if as_json:
        print(json.dumps(to_json(made, run, starts), indent=2))
    else:
        print(to_text(made, run, starts))
    raise typer.Exit(int(made.code))


def _commands(made: Plan, words: Sequence[str], flags: Sequence[str], directory: Path) -> tuple[str, str]:
    """The command that runs the job, and what it starts on the first node; none of a job that cannot run."""
    if made.code is not ExitCode.OK:
        return "", ""
    where = ["--nodes", "1"] if made.recipe.devices.nodes > 1 else []
    if made.nodes > 1:
        where = ["--nodes", str(made.nodes), "--node-rank", "RANK", "--rendezvous", "HOST:PORT"]
    meeting = Rendezvous(
        nodes=made.nodes,
        node_rank=0,
        address=LOOPBACK if made.nodes == 1 else "HOST",
        port=None if made.nodes == 1 else 29500,
        source="plan",
        reason="planned",
    )
    launch = torchrun.Launch(
        arguments=tuple(rank_words(words, directory, made.hardware.backend)),
        rendezvous=meeting,
        per_node=made.per_node,
        logs=outcomes.next_logs(directory, 0),
        environment={variable.name: variable.value for variable in made.environment},
    )
    return shlex.join(["mcore-bundle", *words, *flags, *where]), torchrun.command(launch, {}).shell()
