"""Options that several targets have in common: types for the fields of their options, with help texts."""

from collections.abc import Callable, Collection
from typing import Annotated

import typer

from bundle.errors import format_value

Restarts = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Start ranks again where that may mend what broke: N times without a new checkpoint between.",
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Machines beyond --nodes: one takes the place of a machine that is lost or bad.",
    ),
]
Preflight = Annotated[
    bool, typer.Option("--preflight", help="First have every node do what the job will ask of it.")
]
Grace = Annotated[
    int | None,
    typer.Option(
        "--grace",
        min=1,
        metavar="SECONDS",
        help="From being told to save to the end, if not what that takes.",
    ),
]
Rdma = Annotated[bool, typer.Option("--rdma", help="Give it the RDMA devices, and memory pinned.")]


def allow_only(choices: Collection[str], *, may_be_empty: bool = True) -> Callable[[str], str]:
    """Return a callback that raises BadParameter for any value outside `choices`."""

    def check(value: str) -> str:
        if value not in choices and not (may_be_empty and value == ""):
            raise typer.BadParameter(f"{format_value(value)} is unknown. Choose one of {', '.join(choices)}")
        return value

    return check
