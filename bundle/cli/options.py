"""Options that several verbs have in common."""

from typing import Annotated

import typer

from bundle import log

AllowDrift = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Go on although this patch drifted.")
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")]
Mcore = Annotated[str, typer.Option(metavar="VERSION|PATH", help="Instead of the installed megatron-core.")]


def _choose(level: str) -> None:
    if level:
        log.choose(level)


# The callback does it all: a verb takes the value and leaves it.
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        callback=_choose,
        help=f"{', '.join(log.LEVELS)}: from which on is told; else ${log.VARIABLE}, else {log.DEFAULT}.",
    ),
]
