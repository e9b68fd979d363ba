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


def read_name(text: str) -> str:
    """Return a name as it is. Raise BadParameter for an empty one, which would mean the working directory."""
    if not text.strip():
        raise typer.BadParameter("names nothing (it is empty). Name a file or a directory.")
    return text


def read_path(name: str | Path) -> Path:
    """Return the path of a name that is not empty."""
    return Path(read_name(str(name)))


RunDirectory = Annotated[
    Path | None,
    typer.Option(
        "--run-directory",
        "--output",
        parser=read_path,
        metavar="DIRECTORY",
        help="Where the run lives: an empty or new directory, or an earlier run. Default: runs/NAME.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        parser=read_name, metavar="DIR", help="A Hugging Face directory: config, weights, tokenizer."
    ),
]
Data = Annotated[
    list[str],
    typer.Option(parser=read_name, metavar="FILE", help="Rows to train on; may be given several times."),
]
Lora = Annotated[
    bool, typer.Option("--lora", help="Train low-rank adapters; --set model.lora.rank=8 changes them.")
]
Epochs = Annotated[
    float | None, typer.Option(help="How often to train on all rows. Default: 3; dpo and pretrain: 1.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over, whatever the run directory holds.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run, be it finished.")]
Rollouts = Annotated[
    Path | None,
    typer.Option(
        "--rollouts",
        parser=read_path,
        metavar="DIRECTORY",
        help="Task rl: learn from the answers that a run wrote (its folder rollouts), and ask nothing.",
    ),
]
StartFrom = Annotated[
    Path | None,
    typer.Option("--from", help="A checkpoint, or a run's newest, that a new run begins with."),
]
WeightsOnly = Annotated[
    bool,
    typer.Option(
        "--weights-only",
        help="Of --from the weights alone: optimizer, schedule and data, which may be others, begin anew.",
    ),
]
DevicesPerNode = Annotated[
    int | None,
    typer.Option(min=1, help="Devices of each machine; without it, the recipe's."),
]
Nodes = Annotated[int | None, typer.Option(min=1, max=MOST_RANKS, help="Machines; without it, the recipe's.")]
NodeRank = Annotated[int | None, typer.Option(help="Which of them this one is, from 0.")]
Rendezvous = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where they meet: node 0.")]
Wait = Annotated[int, typer.Option(min=1, metavar="SECONDS", help="How long a node waits for the others.")]
ImageRecord = Annotated[
    Path | None,
    typer.Option(
        "--image-record",
        metavar="FILE",
        help="The packages of an image: its build-info.json, or what its `doctor --json` said.",
    ),
]
ImageRecordOrNone = Annotated[
    str,
    typer.Option(
        "--image-record",
        metavar="FILE|none",
        help="What is in it: what its `doctor --json` said; none: it is none of ours. Without it, the first"
        " rank decides.",
    ),
]
Mcore = Annotated[str, typer.Option(metavar="VERSION|PATH", help="Instead of the installed megatron-core.")]
AllowDrift = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Go on although this patch drifted.")
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")]


Hardware = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.PRESET_NAMES),
        help=f"Instead of this machine: {', '.join(hardware.PRESET_NAMES)}.",
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.BACKEND_CHOICES),
        help=f"One of {', '.join(hardware.BACKEND_CHOICES)}; without it, the recipe's.",
    ),
]
# For a verb without a recipe.
MachineBackend = Annotated[
    str,
    typer.Option(
        callback=allow_only(hardware.BACKEND_CHOICES), help=f"One of {', '.join(hardware.BACKEND_CHOICES)}."
    ),
]


def _choose_level(level: str) -> str:
    if level:
        log.choose_level(level)
    return level


# The callback sets the level; a verb takes the value and does not use it.
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="LEVEL",
        callback=_choose_level,
        help=(
            f"{', '.join(log.LEVELS)}: from which on is told; else ${log.LEVEL_VARIABLE}, else"
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
