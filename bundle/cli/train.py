"""`mcore-bundle train`: starts this node's ranks, or is one of them under torchrun."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bundle.launchers import local, process
from bundle.recipe import Recipe, load
from bundle.rendezvous import Rendezvous, discover

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name (see `recipes list`) or a file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME.")] = None,
    nodes: Annotated[int | None, typer.Option(help="How many nodes run this job.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Which of them this one is, from 0.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where they meet: node 0.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run on each node.")] = False,
) -> None:
    """Train a recipe: pre-training or SFT."""
    job = load(recipe, overrides or ())
    where = discover(os.environ, nodes=nodes, node_rank=node_rank, endpoint=rendezvous)
    directory = run or Path("runs") / job.name
    if where.is_rank:
        # Torch is imported only in a rank.
        from bundle.training.worker import Job, work

        raise typer.Exit(int(work(Job(job, "cpu", directory), where)))
    launch = _launch(job, where, directory)
    if dry_run:
        print(local.dry_run(launch, os.environ), end="")
    else:
        process.run(launch, os.environ)


def _launch(job: Recipe, where: Rendezvous, directory: Path) -> local.Launch:
    world = job.parallel.minimal_world
    return local.Launch(
        arguments=("train", *_without_rendezvous(sys.argv[2:])),
        rendezvous=where,
        per_node=job.devices.per_node or max(1, world // where.nodes),
        logs=process.next_logs(directory, where.node_rank),
    )


def _without_rendezvous(arguments: list[str]) -> list[str]:
    """The arguments of this process without the flags that only a starter of ranks reads."""
    kept, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--nodes", "--node-rank", "--rendezvous"):
            if not equals:
                next(words, None)
        else:
            kept.append(word)
    return kept
