"""`mcore-bundle plan`: all that a job will be, before anything is started."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from bundle import hardware, planning, stack
from bundle.launchers import local, process
from bundle.patches import subject, survey, table
from bundle.planning.machine import capabilities, machine
from bundle.recipe import Recipe, load
from bundle.rendezvous import LOOPBACK, Rendezvous

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# What `make` installs: a plan without any megatron-core is for this one.
DEFAULT = "0.16.1"


@app.command()
def plan(
    recipe: str = typer.Argument(help="A built-in recipe's name (see `recipes list`) or a file."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override one key of the recipe."
    ),
    nodes: int = typer.Option(0, min=0, help="Machines; without it, the recipe's."),
    per_node: int = typer.Option(
        0, "--devices-per-node", min=0, help="Devices of each; without it, the recipe's."
    ),
    named: str = typer.Option(
        "", "--hardware", help=f"Instead of this machine: {', '.join(hardware.NAMES)}."
    ),
    backend: str = typer.Option("", help=f"One of {', '.join(hardware.BACKENDS)}; without it, the recipe's."),
    mcore: str = typer.Option("", metavar="VERSION|PATH", help="Instead of the installed megatron-core."),
    allow_drift: list[str] = typer.Option([], metavar="ID", help="Go on although this patch drifted."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines."),
) -> None:
    """Plan a job: layout, memory, patches, traps, environment, command; ends with what would stop it."""
    if backend not in ("", *hardware.BACKENDS):
        raise typer.BadParameter(f"choose one of {', '.join(hardware.BACKENDS)}", param_hint="--backend")
    job = load(recipe, overrides)
    on, notes = machine(job.backend, backend or None, named or None)
    target, decided = _megatron(job, on, mcore, allow_drift)
    made = planning.make(
        job,
        on,
        capabilities(on.backend),
        target,
        decided.decisions,
        nodes=nodes or None,
        per_node=per_node or None,
        notes=notes,
    )
    run, starts = _commands(made, recipe, overrides)
    if as_json:
        print(json.dumps(planning.document(made, run, starts), indent=2))
    else:
        print(planning.text(made, run, starts))
    raise typer.Exit(int(made.code))


def _megatron(
    job: Recipe, on: hardware.Hardware, mcore: str, allowed: Sequence[str]
) -> tuple[planning.Target, survey.Survey]:
    """The megatron-core that is named, installed or else the default, and the decisions about it."""
    here, reviewed = stack.detect(), table.load()
    if mcore:
        of, origin = subject.named(mcore, reviewed), "--mcore"
    elif here.megatron.core is not None:
        of = subject.installed(here, reviewed)
        origin = f"{of.root}, {of.origin}"
    else:
        of, origin = subject.named(DEFAULT, reviewed), "none is installed here: the default release"
    decided = survey.survey(of, reviewed, here, backend=on.backend, features=job.features, allowed=allowed)
    known = of.version is not None and stack.base(of.version) is not None
    unread = "" if known else f"; its version cannot be read, taken for {DEFAULT}"
    return planning.Target(of.version if known and of.version else DEFAULT, origin + unread), decided


def _commands(made: planning.Plan, recipe: str, overrides: Sequence[str]) -> tuple[str, str]:
    """The command that runs the job, and what it starts on the first node."""
    arguments = ["train", recipe, *(word for override in overrides for word in ("--set", override))]
    several = ["--nodes", str(made.nodes), "--node-rank", "RANK", "--rendezvous", "HOST:PORT"]
    shown = shlex.join(["mcore-bundle", *arguments, *(several if made.nodes > 1 else [])])
    meeting = Rendezvous(
        nodes=made.nodes,
        node_rank=0,
        address=LOOPBACK if made.nodes == 1 else "HOST",
        port=None if made.nodes == 1 else 29500,
        source="plan",
        reason="planned",
    )
    launch = local.Launch(
        arguments=tuple(arguments),
        rendezvous=meeting,
        per_node=made.per_node,
        logs=process.next_logs(Path("runs") / made.recipe.name, 0),
        environment={variable.name: variable.value for variable in made.environment},
    )
    return shown, local.command(launch, {}).shell()
