"""What every rank of a run is told alike."""

from dataclasses import dataclass
from pathlib import Path

from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory


@dataclass(frozen=True)
class Job:
    """A recipe, where its run lives, and what to do with what is there.

    `start_from` is the checkpoint, or the run, that a new run begins with.
    """

    recipe: Recipe
    directory: RunDirectory
    fresh: bool = False
    resume: bool = False
    start_from: Path | None = None
