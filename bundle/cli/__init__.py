"""The command `mcore-bundle`: a module per verb, imported only when that verb runs."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bundle import __version__, log
from bundle.cli import output
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, UsageError

# verb -> what it does; the module is bundle.cli.<verb>, which holds a typer app named `app`.
VERBS: dict[str, str] = {
    "train": "Train a recipe on this machine, or on several.",
    "launch": "Hand a job to a cluster, Slurm or Kubernetes, and ask what became of it.",
    "recipes": "The job files that come with the package: list them, show one, their JSON schema.",
    "plan": "All that a job will be, before it starts, and what stands against it.",
    "check": "What the data of a job comes to: counts, epochs, and samples with their loss masks.",
    "weights": "Weights between Hugging Face and megatron: check, export, import, diff.",
    "report": "One page about a run, or several side by side: curves, plan, patches.",
    "doctor": "Can this machine run a job? What is wrong, why, and what to do.",
    "resolve": "Versions that were seen together, as constraints for pip.",
    "patches": "Which patches does this megatron-core need, and why?",
}


class Verbs(TyperGroup):
    """The verbs by name: their modules are not imported to be listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise UsageError(
                f"no verb {cmd_name[:100]!r}", [f"{verb}: {what}" for verb, what in VERBS.items()]
            )
        return typer.main.get_command(importlib.import_module(f"bundle.cli.{cmd_name}").app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(cls=Verbs, rich_markup_mode=None, no_args_is_help=True)


def _say_version(wanted: bool) -> None:
    if wanted:
        print("mcore-bundle", __version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Post-train large models with Megatron-Core on CUDA, Ascend or a laptop."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise EnvironmentUnfit("the working directory is gone: change into one that is there") from error


def main() -> None:
    """Runs the command line; ends the process with a code of `errors.ExitCode`."""
    output.guard()
    # What other packages plug into pydantic is not looked for in all that is installed: our models take none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        try:
            log.start()
            app(prog_name="mcore-bundle")
        finally:
            sys.stdout.flush()
    except BundleError as error:
        print(f"mcore-bundle: {error}", file=sys.stderr)
        sys.exit(int(error.code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
