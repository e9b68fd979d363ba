"""The checkpoint that a person means where a run shall begin."""

from pathlib import Path

from bundle.errors import UsageError
from bundle.training.checkpoints import manifest
from bundle.training.checkpoints.shelf import Shelf
from bundle.training.run_directory import RunDirectory


def checkpoint(named: Path) -> Path:
    """Returns the checkpoint meant by `named`: that one, or the newest of a run or of its `checkpoints`.

    Raises UsageError where there is none.
    """
    if (named / manifest.NAME).is_file():
        return named
    for folder in (named, RunDirectory(named).checkpoints):
        shelf = Shelf(folder)
        if steps := shelf.steps():
            return shelf.place(steps[0])
    if not named.exists():
        raise UsageError(f"--from {named}: there is no such checkpoint")
    raise UsageError(
        f"--from {named}: neither a checkpoint that mcore-bundle wrote (it has no {manifest.NAME})"
        " nor a run that has any"
    )
