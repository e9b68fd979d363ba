"""A rank that makes a real trainer of a job, and prints what its engine was given."""

import sys
from pathlib import Path

from bundle.launch import job as job_file
from bundle.planning import build_plan
from bundle.recipe import load
from tests.ranks import start_rank

SMALL = (
    "parallel.tp=1",
    "parallel.etp=1",
    "parallel.ep=1",
    "parallel.sequence_parallel=false",
    "data.sequence_length=32",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "metrics.tensorboard=false",
)


def main(directory: Path) -> None:
    """The kernel of the recipe, of the job, and of the engine's recipe."""
    job = job_file.from_plan(build_plan(load("demo", SMALL), backend="cpu", per_node=1), directory)
    assert job.patches is not None
    runtime, rank = start_rank(job.patches)
    from bundle.distributed.watchdog import Watchdog
    from bundle.distributed.world import StopRequest
    from bundle.runs.session_builder import SessionBuilder
    from bundle.training.trainer import Trainer

    with Watchdog(600, directory, rank, rank) as dog:
        device = runtime.select_device(rank)
        stop_request = StopRequest(device)
        made = Trainer(SessionBuilder(job, runtime, device, dog, is_resumed=False, stop_request=stop_request))
    print(job.recipe.model.attention, job.attention, made.session.engine.recipe.model.attention)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
