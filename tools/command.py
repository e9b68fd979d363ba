"""How a tool's command line ends: as the package's own does."""

import sys

import typer

from bundle.errors import BundleError


def run(app: typer.Typer, name: str) -> None:
    """Runs it as `python -m NAME`; ends the process with a code of `errors.ExitCode`."""
    try:
        app(prog_name=f"python -m {name}")
    except BundleError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(int(error.code))
