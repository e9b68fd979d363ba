"""What a run writes at most, and what is free where it goes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from bundle.planning.size import model_size
from bundle.recipe import Recipe


@dataclass(frozen=True)
class Disk:
    """Bytes of the checkpoints of a run, and those that are free where it lives."""

    checkpoint: int
    checkpoints: int  # of those that stay and one more, which is being written
    free: int

    @property
    def suffices(self) -> bool:
        """Whether they fit."""
        return self.checkpoints <= self.free


def disk(recipe: Recipe, directory: Path) -> Disk:
    """The disk of the run that would live in `directory`, which need not be there yet."""
    one = model_size(recipe.architecture).checkpoint_bytes(recipe.model.dtype, recipe.optimizer)
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return Disk(one, one * recipe.checkpoint.most, shutil.disk_usage(there).free)
