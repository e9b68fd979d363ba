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
        help="Restart failed ranks where that may help, at most N times without a new checkpoint.",
    ),
]
Spares = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Start N machines beyond --nodes, to replace machines that are lost or unfit.",
    ),
]
Preflight = Annotated[
    bool, typer.Option("--preflight", help="First test that every node can do what the job needs.")
]
Grace = Annotated[
    int | None,
    typer.Option(
        "--grace",
        min=1,
        metavar="SECONDS",
        help="Allow this time for a save before the job is killed. Default: the estimated time of a save.",
    ),
]
Rdma = Annotated[bool, typer.Option("--rdma", help="Give the job the RDMA devices and pinned memory.")]


def allow_only(choices: Collection[str], *, may_be_empty: bool = True) -> Callable[[str], str]:
    """Return a callback that raises BadParameter for any value outside `choices`."""

    def check(value: str) -> str:
        if value not in choices and not (may_be_empty and value == ""):
            raise typer.BadParameter(f"{format_value(value)} is unknown. Choose one of {', '.join(choices)}")
        return value

    return check
