"""`mcore-bundle launch`: checks a job, hands it to a cluster, and reports its state.

Each target has a module, and a dataclass in `targets` with its options; `submission` has the common parts.
"""

from typing import Annotated

import typer

from bundle import files
from bundle.cli.launch.docker import docker
from bundle.cli.launch.kubernetes import kubernetes
from bundle.cli.launch.listing import list_
from bundle.cli.launch.local import local
from bundle.cli.launch.ray import ray
from bundle.cli.launch.slurm import slurm
from bundle.cli.launch.submission import Handle, find_target
from bundle.cli.request import expand_options

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
app.callback(help="")(files.restrict_umask_to_group_read)  # a job writes into its run directory
for target in (local, docker, slurm, kubernetes, ray):
    app.command()(expand_options(target))
app.command("list")(list_)


@app.command()
def status(handle: Handle) -> None:
    """Print the state of a job, and why it waits."""
    target, name = find_target(handle)
    state = target.query_state(name)
    print(handle, state.name, *([] if state.reason in ("", "None") else [f"({state.reason})"]))


@app.command()
def logs(
    handle: Handle,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
) -> None:
    """Print the output of a job; with several nodes, each line begins with [node/rank]."""
    target, name = find_target(handle)
    for text in target.follow(name) if follow else [target.read_log(name)]:
        print(text, end="", flush=True)


@app.command()
def stop(handle: Handle) -> None:
    """Make a job save and end; a job that still waits does not start."""
    target, name = find_target(handle)
    target.request_stop(name)


@app.command()
def wait(handle: Handle) -> None:
    """Wait until a job has ended, and end with its code."""
    target, name = find_target(handle)
    raise typer.Exit(target.wait(name))
