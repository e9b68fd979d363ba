"""Options that several verbs have in common, and a user's options as arguments for another verb."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from bundle import log
from bundle.environment import MOST_RANKS, hardware
from bundle.targets.options import Preflight as Preflight
from bundle.targets.options import Restarts as Restarts
from bundle.targets.options import Spares as Spares
from bundle.targets.options import allow_only as allow_only

Recipe = Annotated[str, typer.Argument(help="A built-in recipe's name (see `recipes list`) or a file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe.")
]


def check_nonempty_name(text: str) -> str:
    """Return a name as it is. Raise BadParameter for an empty one, which would mean the working directory."""
    if not text.strip():
        raise typer.BadParameter("names nothing (it is empty). Name a file or a directory.")
    return text


def parse_nonempty_path(name: str | Path) -> Path:
    """Return the path of a name that is not empty."""
    return Path(check_nonempty_name(str(name)))


RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "--run-directory",
        "--output",
        parser=parse_nonempty_path,
        metavar="DIRECTORY",
        help="Set the run directory: a new or empty one, or an earlier run. Default: runs/NAME.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        parser=check_nonempty_name,
        metavar="DIR",
        help="Train this Hugging Face directory: config, weights, tokenizer.",
    ),
]
Data = Annotated[
    list[str],
    typer.Option(
        parser=check_nonempty_name,
        metavar="FILE",
        help="Train on this file of rows; may be given several times.",
    ),
]
Lora = Annotated[
    bool, typer.Option("--lora", help="Train low-rank adapters; --set model.lora.rank=8 changes them.")
]
Epochs = Annotated[
    float | None,
    typer.Option(help="Train on all rows this number of times. Default: 3; dpo and pretrain: 1."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over, whatever the run directory holds.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run, even a finished one.")]
Rollouts = Annotated[
    Path | None,
    typer.Option(
        "--rollouts",
        parser=parse_nonempty_path,
        metavar="DIRECTORY",
        help="Learn from the answers of a run (its folder rollouts), and generate none; for task rl.",
    ),
]
StartFrom = Annotated[
    Path | None, typer.Option("--from", help="Begin a new run with this checkpoint, or with a run's newest.")
]
WeightsOnly = Annotated[
    bool,
    typer.Option(
        "--weights-only",
        help="Load only the weights of --from; start a new optimizer, schedule and data order.",
    ),
]
DevicesPerNode = Annotated[
    int | None, typer.Option(min=1, help="Set the devices of each machine. Default: the recipe's.")
]
Nodes = Annotated[
    int | None, typer.Option(min=1, max=MOST_RANKS, help="Run on this many machines. Default: the recipe's.")
]
NodeRank = Annotated[int | None, typer.Option(help="Set the rank of this machine, from 0.")]
Rendezvous = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Set where they meet: node 0.")]
Wait = Annotated[int, typer.Option(min=1, metavar="SECONDS", help="Wait this time for other nodes.")]
ImageRecord = Annotated[
    Path | None,
    typer.Option(
        "--image-record",
        metavar="FILE",
        help="Read the packages of an image: its build-info.json, or the output of its `doctor --json`.",
    ),
]
ImageRecordOrNone = Annotated[
    str,
    typer.Option(
        "--image-record",
        metavar="FILE|none",
        help="Read the package versions of --image from the output of its `doctor --json`. none: --image is"
        " not from mcore-bundle."
        " Default: the first rank decides which patches apply.",
    ),
]
Mcore = Annotated[str, typer.Option(metavar="VERSION|PATH", help="Replace the installed megatron-core.")]
AllowDrift = Annotated[list[str] | None, typer.Option(metavar="ID", help="Continue when this patch drifted.")]
JSON_OPTION = Annotated[bool, typer.Option("--json", help="Print one JSON object, not lines.")]


Hardware = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.PRESET_NAMES),
        help=f"Plan for these devices: {', '.join(hardware.PRESET_NAMES)}.",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.BACKEND_CHOICES_WITH_AUTO),
        help=f"Choose one of {', '.join(hardware.BACKEND_CHOICES_WITH_AUTO)}. Default: the recipe's.",
    ),
]
# For a verb without a recipe.
MachineBackend = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.BACKEND_CHOICES_WITH_AUTO),
        help=f"One of {', '.join(hardware.BACKEND_CHOICES_WITH_AUTO)}.",
    ),
]


def _set_log_level(level: str) -> str:
    if level:
        log.choose_level(level)
    return level


# The callback sets the level; a verb takes the value and does not use it.
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        callback=_set_log_level,
        help=(
            f"{', '.join(log.LEVEL_CHOICES)}: lowest level to print. Default: ${log.LEVEL_VARIABLE}, else"
            f" {log.DEFAULT_LEVEL}."
        ),
    ),
]


def list_set_parameters(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the user set, without those left at their defaults."""
    sources = {p.name: context.get_parameter_source(p.name) for p in context.command.params if p.name}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def build_arguments(context: typer.Context, excluded: Collection[str]) -> list[str]:
    """Return the user's options as arguments for another verb, without the parameters in `excluded`."""
    arguments: list[str] = []
    for parameter in sorted(context.command.params, key=lambda item: item.param_type_name):  # arguments first
        if parameter.name not in list_set_parameters(context) - set(excluded):
            continue
        value = context.params[parameter.name]
        flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        if value is True:
            arguments += flag
        else:
            for element in value if isinstance(value, list | tuple) else [value]:
                arguments += [*flag, str(element)]
    return arguments
