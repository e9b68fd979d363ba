"""The life of one rank: meet the others, agree on the job, prepare the backend, train, leave in order."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store

from bundle import backends, log
from bundle.distributed import watchdog, world
from bundle.distributed.watchdog import Watchdog, collectives_seconds
from bundle.distributed.world import agree, handed_down
from bundle.environment import image, packages
from bundle.errors import ExitCode, Preempted, UsageError
from bundle.launch import job as job_file
from bundle.launch import orphans, outcomes
from bundle.launch.job import Job
from bundle.launch.rendezvous import Rendezvous
from bundle.patches import applying
from bundle.patches.plan import PatchPlan

if TYPE_CHECKING:
    from bundle.backends import Runtime
    from bundle.recipe import Recipe


def work(where: Rendezvous, decide: Callable[[], Job], told: Job | None, wait: int) -> ExitCode:
    """How this rank ended; whoever started it learns why.

    `told` is the job that this rank was given. Where that is none, or leaves its patches open, rank 0 calls
    `decide` and hands down what comes of it. Ranks that were told nothing wait `wait` seconds for others.
    """
    rank, local_rank = where.rank, where.local_rank
    assert rank is not None and local_rank is not None, "only a rank works"
    log.start(rank)
    orphans.die_with_parent()
    orphans.take_forks_along()
    watchdog.show_stacks_on_request()
    return outcomes.report(rank, local_rank, lambda: _work(where, decide, told, wait))


def patched_runtime(patches: PatchPlan, backend: str, recipe: "Recipe | None" = None) -> "Runtime":
    """The runtime of a backend, for the job of `recipe`; its patches stay in force while this process lives.

    Raises PatchError where megatron-core is not the planned one.
    """
    applying.apply(patches)
    return backends.prepare(backend, recipe)


def _work(where: Rendezvous, decide: Callable[[], Job], told: Job | None, wait: int) -> None:
    rank, size = where.rank, where.world_size
    assert rank is not None and size is not None, "only a rank works"
    timeout = timedelta(seconds=told.recipe.distributed.timeout_seconds if told else wait)
    meeting = world.open_store(where, timeout)
    job = told
    if job is None or job.patches is None:
        job = job_file.parse(handed_down(meeting, rank, size, lambda: decide().text(), timeout))
    if (where.nodes, size) != (job.nodes, job.nodes * job.per_node):
        raise UsageError(
            f"the job is for {job.nodes} x {job.per_node} ranks, and {where.source} started {size}"
            f" on {where.nodes} nodes"
        )
    unfit = list(job_file.misfits(job, packages.detect().megatron, image.own()))
    agree(meeting, rank, size, {"job": job.digest, **job.fields}, timeout, unfit)
    place = world.folder(meeting, rank, job.directory / "logs")
    outcomes.meet(place, where.node_rank, where.local_rank or 0)
    _train(job, where, meeting, place)


def _train(job: Job, where: Rendezvous, meeting: Store, place: Path) -> None:
    assert where.rank is not None and where.local_rank is not None and job.patches is not None
    seconds = job.recipe.distributed.timeout_seconds
    runtime = patched_runtime(job.patches, job.backend, job.recipe)
    device = runtime.device(where.local_rank)
    with Watchdog(seconds, place, where.rank, where.local_rank) as dog:
        patient = timedelta(seconds=collectives_seconds(seconds))
        world.initialize(where, meeting, runtime.collectives, patient, device)
        with dog.patience("importing megatron"):
            # Only now: it must meet the patches.
            from bundle.training import trainer
        try:
            trainer.run(job, runtime, device, dog)
        except Preempted:
            world.destroy()  # all ranks stop together; after any other error the others may never come
            raise
        world.destroy()
