"""The command `mcore-bundle`: a module per verb, imported only when that verb runs.

A command continues when the reader of its standard output and error is gone, above all a training run.
"""

import errno
import functools
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from bundle import __version__, log
from bundle.errors import BundleError, EnvironmentUnfit, ExitCode, JobFailed, UsageError
from bundle.imports import pause_gc_and_freeze

# The summary of each verb. Its module is bundle.cli.<verb>, with a typer app named `app`.
VERB_SUMMARIES: dict[str, str] = {
    "sft": "Fine-tune a model on conversations, by flags alone.",
    "dpo": "Train a model on preferences, by flags alone.",
    "pretrain": "Train a model on text, by flags alone.",
    "init": "Write a commented recipe for a model and its data.",
    "train": "Train a recipe on this machine, or on several.",
    "launch": "Start a job on this machine, Docker, Slurm, Kubernetes or Ray, and follow it.",
    "recipes": "List or show the built-in recipes, or print the JSON schema of a recipe.",
    "plan": "Show the plan of a job before it starts, and the problems that would stop it.",
    "tune": "Find the layout that trains a recipe fastest on a machine, by prediction or measurement.",
    "check": "Count the data of a job, and show samples with their loss masks.",
    "weights": "Check, export, import or compare weights of Hugging Face and Megatron.",
    "generate": "Generate answers with a trained model.",
    "report": "Write one page about a run, or several side by side: curves, plan, patches.",
    "doctor": "Examine this machine: what is wrong, why, and what to do.",
    "preflight": "Test whether this node can compute, write and read as a job will.",
    "resolve": "Print versions that were seen together, as constraints for pip.",
    "patches": "Show which patches this megatron-core needs, and why.",
}


@functools.cache
def _import_verb_module(verb: str) -> Any:
    """Return the module of a verb."""
    with pause_gc_and_freeze():
        return importlib.import_module(f"bundle.cli.{verb}")


class LazyVerbGroup(TyperGroup):
    """The verbs by name; the list of verbs imports none of their modules."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERB_SUMMARIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERB_SUMMARIES:
            raise UsageError(
                f"there is no command {cmd_name[:100]!r}. The commands are",
                [f"{verb}: {summary}" for verb, summary in VERB_SUMMARIES.items()],
            )
        return typer.main.get_command(_import_verb_module(cmd_name).app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERB_SUMMARIES.items()))


app = typer.Typer(cls=LazyVerbGroup, rich_markup_mode=None, no_args_is_help=True)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print("mcore-bundle", __version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Post-train large models with Megatron-Core on CUDA, Ascend or a laptop."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise EnvironmentUnfit("the working directory is gone. Change into one that exists") from error


def main() -> None:
    """Run the command line and end the process with a code of `errors.ExitCode`."""
    guard_streams()
    # Our models take no plugins, so pydantic need not search all installed packages for them.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if sys.argv[1:2] == ["train"] and "TORCHELASTIC_RUN_ID" in os.environ:
        # Before any slow import: a rank that is still starting also ends with its agent.
        from bundle.launch import orphans

        orphans.die_with_torchrun_agent()
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


# The errors of a pipe without a reader and of a closed terminal.
_NO_READER_ERRNOS = (errno.EPIPE, errno.EIO)


class NullFallbackFile(io.FileIO):
    """A file descriptor that turns into /dev/null when it cannot be written to any more.

    Raise JobFailed at that moment for a full disk under standard output, unless it `may_fail`.
    """

    may_fail = False

    def write(self, data: Any, /) -> int:
        """Write the data and return the number of bytes that are written or dropped."""
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno not in _NO_READER_ERRNOS and self.fileno() == 1:
                message = f"standard output cannot be written: {error.strerror}"
                if not self.may_fail:
                    raise JobFailed(message) from error
                print(f"mcore-bundle: {message}; what follows is not shown", file=sys.stderr)
            return len(memoryview(data).cast("B"))


def guard_streams() -> None:
    """Put an NullFallbackFile under both standard streams."""
    sys.stdout, sys.stderr = _guard_stream(sys.stdout, 1), _guard_stream(sys.stderr, 2)


def ignore_stdout_write_errors() -> None:
    """Let the command continue where standard output cannot be written, as its results are elsewhere."""
    outlet = getattr(sys.stdout.buffer, "raw", None)
    if isinstance(outlet, NullFallbackFile):
        outlet.may_fail = True


def _guard_stream(stream: Any, descriptor: int) -> TextIO:
    if stream is None:  # closed by our starter
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123  as long as the process
    return io.TextIOWrapper(
        io.BufferedWriter(NullFallbackFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.isatty() or descriptor == 2,
        write_through=stream.write_through,
    )
