"""Options that several verbs have in common."""

from typing import Annotated

import typer

AllowDrift = Annotated[
    list[str] | None, typer.Option(metavar="ID", help="Go on although this patch drifted.")
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")]
Mcore = Annotated[str, typer.Option(metavar="VERSION|PATH", help="Instead of the installed megatron-core.")]
