"""`mcore-bundle patches verify`: each patch fails without and agrees with, on this machine."""

import json
from typing import Annotated

import typer

from bundle.cli.options import JSON
from bundle.environment import hardware
from bundle.errors import ExitCode


def verify(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Patches; without any, all that apply.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help=f"Prove on this backend: {', '.join(hardware.BACKENDS)}.")
    ] = "auto",
    as_json: JSON = False,
) -> None:
    """Prove patches in child processes; ends with 4 if one does not do what it is for."""
    from bundle.verification import Status
    from bundle.verification import verify as run

    if backend not in hardware.BACKENDS:
        raise typer.BadParameter(f"choose one of {', '.join(hardware.BACKENDS)}", param_hint="--backend")
    found = hardware.detect(backend)
    results = []
    for result in run(found.backend, ids or (), devices=len(found.devices) or None):
        results.append(result)
        if not as_json:
            print(f"{result.status:<19}{result.patch:<42}{result.reason}", flush=True)
    if as_json:
        rows = [result.as_json() for result in results]
        print(json.dumps({"schema": 1, "backend": found.backend, "results": rows}, indent=2))
    if any(result.status is Status.FAILED for result in results):
        raise typer.Exit(int(ExitCode.PATCHES))
