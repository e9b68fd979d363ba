"""The command `mcore-bundle`: a module per verb, imported only when that verb runs."""

import gc
import importlib
import sys
from typing import Any

import typer

from bundle.errors import BundleError, ExitCode

# verb -> what it does; the module is bundle.cli.<verb>, which holds a typer app named `app`.
VERBS: dict[str, str] = {
    "train": "Train a recipe on this machine, or on several.",
    "recipes": "The job files that come with the package: list them, show one.",
    "plan": "All that a job will be, before it starts: layout, memory, patches, what stands against it.",
    "doctor": "Can this machine run a job? What is wrong, why, and what to do.",
    "patches": "Which patches does this megatron-core need, and why?",
    "images": "What the container images are made of: versions, locks, digests, the CI matrix.",
}


class _Verbs(typer.core.TyperGroup):
    """Lists the verbs from the table above and imports a verb's module only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        return typer.core.TyperCommand(cmd_name, callback=lambda: None, help=VERBS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in VERBS:
            gc.disable()  # modules are no garbage: searching them for some is a twelfth of a verb's start
            module = importlib.import_module(f"bundle.cli.{name}")
            gc.enable()
            command = typer.main.get_command(module.app)
        return name, command, rest


app = typer.Typer(cls=_Verbs, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@app.callback()
def _about() -> None:
    """Post-train large models with Megatron-Core on CUDA, Ascend or a laptop."""


def main() -> None:
    """Runs the command line; ends the process with a code of `errors.ExitCode`."""
    try:
        app()
    except BundleError as error:
        print(f"mcore-bundle: {error}", file=sys.stderr)
        sys.exit(int(error.code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
