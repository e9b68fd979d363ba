"""`mcore-bundle patches enable` and `disable`: the patches in every program of an environment."""

import sys
from typing import Annotated

import typer

from bundle import files
from bundle.cli import options
from bundle.environment import interpreters
from bundle.environment.packages import Stack
from bundle.patches import enabling, hook
from bundle.patches import features as features_
from bundle.patches.hook import Words

Environment = Annotated[
    str,
    typer.Option(
        metavar="PYTHON",
        help="An environment's python, or its directory: it is started; without it, this command's own.",
    ),
]


def enable(
    env: Environment = "",
    features: Annotated[
        str,
        typer.Option(metavar="WORD,...", help="What its programs use, like mtp,cp; without it, anything."),
    ] = "",
    vouch: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="The programs are what this patch assumes of its caller."),
    ] = None,
    allow_drift: options.AllowDrift = None,
    backend: options.OwnBackend = "auto",
) -> None:
    """Have every program of an environment patched when it imports megatron.core."""
    words = Words(features_.named(features), tuple(vouch or ()), tuple(allow_drift or ()), backend)
    at = interpreters.sites_of(env or sys.executable)
    stack = Stack(interpreters.search_path_of(at.python))
    said = ["there is no megatron-core here yet: programs that bring one are patched"]
    if stack.megatron.core is not None:
        decided, _ = enabling.planned(
            stack, words.features, vouched=words.vouched, allowed=words.allowed, backend=backend
        )
        used = features_.known(words.features or ())
        said = [*enabling.lines(decided), *enabling.warnings(decided, used)]
    written = hook.install(at, words)
    print(f"{'written' if written else 'there already'}: {files.printable(at.own / hook.NAME)}")
    print("\n".join(said))


def disable(env: Environment = "") -> None:
    """Take away what `enable` has put into an environment."""
    at = interpreters.sites_of(env or sys.executable)
    gone = hook.remove(at)
    print(f"{'removed' if gone else 'not there'}: {files.printable(at.own / hook.NAME)}")
