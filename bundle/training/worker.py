"""The life of one rank: meet the others, prepare the backend, train, leave in order."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from bundle.backends import preparation
from bundle.distributed import parent, store, watchdog, world
from bundle.distributed.agreement import agree
from bundle.errors import ExitCode, Preempted
from bundle.launchers import outcomes
from bundle.recipe import Recipe
from bundle.rendezvous import Rendezvous


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told alike; `backend` is resolved, never auto."""

    recipe: Recipe
    backend: str
    directory: Path
    trust_checkpoint: bool = False


def work(job: Job, rendezvous: Rendezvous) -> ExitCode:
    """How this rank ended; whoever started it learns why."""
    parent.die_with_parent()
    watchdog.show_stacks_on_request()
    rank, local_rank = rendezvous.rank, rendezvous.local_rank
    assert rank is not None and local_rank is not None, "only a rank works"
    return outcomes.report(rank, local_rank, lambda: _work(job, rendezvous, rank, local_rank))


def _work(job: Job, rendezvous: Rendezvous, rank: int, local_rank: int) -> None:
    timeout = timedelta(seconds=job.recipe.distributed.timeout_seconds)
    meeting = store.open_store(rendezvous, timeout)
    prepared = preparation.prepare(job.recipe, job.backend)
    assert rendezvous.world_size is not None
    agree(meeting, rank, rendezvous.world_size, prepared.identity, timeout)
    device = prepared.runtime.device(local_rank)
    world.initialize(rendezvous, meeting, prepared.runtime.collectives, timeout, device)
    # Imported only now: it imports megatron, which must meet the patches.
    from bundle.training import session

    try:
        session.run(job.recipe, job.directory, prepared.runtime, device, rank, local_rank)
    except Preempted:
        world.destroy()  # all ranks stop together; after any other error the others may never come
        raise
    world.destroy()
