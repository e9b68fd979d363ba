"""`mcore-bundle launch`: hands a job to a cluster when it has been checked, and says what became of it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bundle.cli import options, output
from bundle.environment import image
from bundle.errors import UsageError, shown
from bundle.launch.job import Start, of_plan
from bundle.planning import plan_for
from bundle.recipe import load
from bundle.targets import slurm as scheduler

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
_SLURM = "slurm:"
Handle = Annotated[str, typer.Argument(help="What `launch` printed: slurm:NUMBER.")]


@app.command()
def slurm(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    run_directory: options.RunDirectory = None,
    resume: options.Resume = False,
    start_from: options.From = None,
    backend: options.Backend = "",
    mcore: options.Mcore = "",
    allow_drift: options.AllowDrift = None,
    devices_per_node: options.DevicesPerNode = None,
    nodes: options.Nodes = None,
    hardware: options.Hardware = "",
    record: options.ImageRecord = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION[=VALUE]", help="Of sbatch: partition=gpu, account=us, time=4:00:00, ..."
        ),
    ] = None,
    container_image: Annotated[
        str, typer.Option("--image", help="What it runs in; without it, this very environment.")
    ] = "",
    container: Annotated[
        str,
        typer.Option(
            callback=options.one_of(scheduler.CONTAINERS), help=f"One of {', '.join(scheduler.CONTAINERS)}."
        ),
    ] = scheduler.CONTAINERS[0],
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SRC[:DST]", help="What a container sees, beside here and the run."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and stop.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the handle of the job, and stop.")
    ] = False,
    log_level: options.LogLevel = "",
) -> None:
    """Run a job under Slurm, one task a node; shows what it writes and ends as it does."""
    asked = load(recipe, overrides or ())
    of = image.named(record) if record else None
    made = plan_for(
        asked,
        backend=backend or None,
        named=hardware or None,
        mcore=mcore or (of.megatron if of else ""),
        allow_drift=allow_drift or (),
        nodes=nodes,
        per_node=devices_per_node,
        others=of,
    )
    made.refuse()
    job = of_plan(
        made,
        (run_directory or Path("runs") / asked.name).absolute(),
        start=Start(resume=resume, origin=str(start_from.absolute()) if start_from else None),
        record=of,
        allow_drift=tuple(allow_drift or ()),
    )
    wanted = scheduler.Options(tuple(sbatch or ()), container_image, container, tuple(mounts or ()))
    if dry_run:
        print(scheduler.script(job, wanted, Path.cwd()), end="")
        return
    handle = f"{_SLURM}{scheduler.submit(job, wanted, Path.cwd())}"
    if detach:
        print(handle)
        return
    print(f"{handle}: `mcore-bundle launch stop {handle}` has it save and end", file=sys.stderr)
    _follow(handle)


@app.command()
def status(handle: Handle) -> None:
    """How a job is: its state, and why it waits."""
    now = scheduler.state(_number(handle))
    print(handle, now.name, *([] if now.reason in ("", "None") else [f"({now.reason})"]))


@app.command()
def logs(
    handle: Handle,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job has ended.")] = False,
) -> None:
    """What a job wrote; the number before a line is that of its node."""
    if follow:
        for text in scheduler.follow(_number(handle)):
            print(text, end="", flush=True)
        return
    written = scheduler.state(_number(handle)).output
    if written is None or not written.exists():
        raise UsageError(f"{handle}: has written nothing yet")
    print(written.read_text(errors="replace"), end="")


@app.command()
def stop(handle: Handle) -> None:
    """Have a job save and end; one that waits does not begin."""
    scheduler.stop(_number(handle))


@app.command()
def wait(handle: Handle) -> None:
    """Wait until a job has ended, and end with its code."""
    for _ in scheduler.follow(_number(handle)):
        pass
    raise typer.Exit(scheduler.state(_number(handle)).code or 0)


def _follow(handle: str) -> None:
    output.may_fail()  # the job's log has it all
    for text in scheduler.follow(_number(handle)):
        print(text, end="", flush=True)
    raise typer.Exit(scheduler.state(_number(handle)).code or 0)


def _number(handle: str) -> str:
    number = handle.removeprefix(_SLURM)
    if not handle.startswith(_SLURM) or not (number.isascii() and number.isdigit()):
        raise UsageError(f"{shown(handle)}: no handle of a job, such as {_SLURM}1234")
    return number
