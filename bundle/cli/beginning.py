"""What a job begins with: a checkpoint that --from names, or what model.path holds."""

from pathlib import Path

from bundle.checkpoints.directory import CheckpointDirectory
from bundle.errors import UsageError
from bundle.launch.start import Start
from bundle.planning import recipe_problem
from bundle.planning.inputs import Weights, weights
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory, starting_checkpoint


def start(*, fresh: bool = False, resume: bool = False, start_from: Path | None, weights_only: bool) -> Start:
    """The options of that as they go into a job. Raises UsageError for weights of no checkpoint."""
    origin = str(start_from) if start_from else None
    return Start(fresh=fresh, resume=resume, origin=origin, weights_only=weights_only)


def beginning(recipe: Recipe, directory: Path, start: Start) -> Weights:
    """What the run in `directory` begins with, or why it cannot: --from counts until it has its own."""
    origin = start.checkpoint
    if origin is None:
        return weights(recipe)
    if not start.fresh and CheckpointDirectory(RunDirectory(directory).checkpoints).steps():
        return Weights("the run's own newest checkpoint")
    try:
        found = starting_checkpoint(origin)
    except UsageError as error:
        return Weights("", (recipe_problem(str(error)),))
    if start.weights_only:
        return Weights(f"the weights of {found}; optimizer, schedule and data begin anew, at step 0")
    return Weights(f"{found}: weights, optimizer and progress, which go on with the same data")
