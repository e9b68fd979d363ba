"""The command `mcore-bundle`: a module per verb, imported only when that verb runs.

The verbs are listed without typer, which is four fifths of what `--help` would otherwise take.
"""

import gc
import importlib
import os
import sys

from bundle import __version__
from bundle.cli import output
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, UsageError

# verb -> what it does; the module is bundle.cli.<verb>, which holds a typer app named `app`.
VERBS: dict[str, str] = {
    "train": "Train a recipe on this machine, or on several.",
    "recipes": "The job files that come with the package: list them, show one.",
    "plan": "All that a job will be, before it starts, and what stands against it.",
    "report": "One page about a run, or several side by side: curves, plan, patches.",
    "doctor": "Can this machine run a job? What is wrong, why, and what to do.",
    "patches": "Which patches does this megatron-core need, and why?",
}
HELP = """\
Usage: mcore-bundle [OPTIONS] COMMAND [ARGS]...

  Post-train large models with Megatron-Core on CUDA, Ascend or a laptop.

Options:
  --version  Show the version and exit.
  --help     Show this message and exit.

Commands:
""" + "\n".join(f"  {verb:<9}{what}" for verb, what in VERBS.items())


def main() -> None:
    """Runs the command line; ends the process with a code of `errors.ExitCode`."""
    output.guard()
    try:
        try:
            _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BundleError as error:
        print(f"mcore-bundle: {error}", file=sys.stderr)
        sys.exit(int(error.code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))


def _run(words: list[str]) -> None:
    if not words:
        print(HELP, file=sys.stderr)
        sys.exit(int(ExitCode.USAGE))
    verb, *rest = words
    if verb == "--help":
        print(HELP)
        return
    if verb == "--version":
        print("mcore-bundle", __version__)
        return
    if verb not in VERBS:
        raise UsageError(f"no verb {verb[:100]!r}", [f"{verb}: {what}" for verb, what in VERBS.items()])
    _refuse_a_directory_that_is_gone()
    gc.disable()  # modules are no garbage: searching them for some, now and at the end, is a sixth of a verb
    app = importlib.import_module(f"bundle.cli.{verb}").app
    gc.freeze()
    gc.enable()
    app(rest, prog_name=f"mcore-bundle {verb}")


def _refuse_a_directory_that_is_gone() -> None:
    try:
        os.getcwd()  # noqa: PTH109  pathlib would be a tenth of --help
    except FileNotFoundError as error:
        raise EnvironmentUnfit("the working directory is gone: change into one that is there") from error
