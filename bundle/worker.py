"""One rank from start to end: meet the others, agree on the job, prepare the backend, train, and exit."""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import Store

from bundle import backends, files, log
from bundle.distributed import watchdog, world
from bundle.distributed.watchdog import Watchdog, compute_collective_timeout
from bundle.distributed.world import agree_on_fields, share_decision
from bundle.environment import image, packages
from bundle.errors import ExitCode, Preempted, UsageError
from bundle.imports import pause_gc_and_freeze
from bundle.launch import job as job_file
from bundle.launch import orphans, outcomes
from bundle.launch.job import Job
from bundle.launch.rendezvous import Rendezvous
from bundle.patches import patcher
from bundle.patches.plan import PatchPlan

if TYPE_CHECKING:
    from bundle.backends import Runtime
    from bundle.recipe import Recipe

_log = logging.getLogger(__name__)


def run_rank(
    rendezvous: Rendezvous, decide: Callable[[], Job], prepared_job: Job | None, wait: int
) -> ExitCode:
    """Run this rank, report how it ended to its launcher, and return its exit code.

    `prepared_job` is the job that this rank got. Where it is None, or its patches are undecided, rank 0 calls
    `decide` and shares the result. Ranks without a job wait `wait` seconds for others.
    """
    rank, local_rank = rendezvous.rank, rendezvous.local_rank
    assert rank is not None and local_rank is not None, "only a rank works"
    log.start(rank)
    files.restrict_umask_to_group_read()
    orphans.bind_forks_to_parent_death()
    watchdog.show_stacks_on_request()
    return outcomes.run_and_report(
        rank, local_rank, lambda: _agree_on_job_and_train(rendezvous, decide, prepared_job, wait)
    )


def prepare_runtime(patches: PatchPlan, backend: str, recipe: "Recipe | None" = None) -> "Runtime":
    """Apply the patches and return the runtime of a backend for the job of `recipe`.

    The patches stay applied while this process lives. Raise PatchError where megatron-core is not the planned
    one.
    """
    patcher.apply(patches)
    return backends.set_up_runtime(backend, recipe)


def _agree_on_job_and_train(
    rendezvous: Rendezvous, decide: Callable[[], Job], prepared_job: Job | None, wait: int
) -> None:
    rank, size = rendezvous.rank, rendezvous.world_size
    assert rank is not None and size is not None, "only a rank works"
    timeout = timedelta(seconds=prepared_job.recipe.distributed.timeout_seconds if prepared_job else wait)
    store = world.open_store(rendezvous, timeout)
    job = prepared_job
    if job is None or job.patches is None:
        job = job_file.parse(share_decision(store, rank, size, lambda: decide().to_text(), timeout))
    if (rendezvous.nodes, size) != (job.nodes, job.nodes * job.per_node):
        raise UsageError(
            f"the job is for {job.nodes} x {job.per_node} ranks (nodes x devices), but {rendezvous.source}"
            f" started {size} (nodes: {rendezvous.nodes}). Start it as its layout says, or plan it again"
        )
    unfit = list(job_file.find_misfits(job, packages.detect().megatron, image.read_own_record()))
    agree_on_fields(store, rank, size, {"job": job.agreement_digest, **job.agreement_fields}, timeout, unfit)
    world_folder = world.choose_world_folder(store, rank, job.directory / "logs")
    outcomes.publish_world_folder_to_launcher(world_folder, rendezvous.node_rank, rendezvous.local_rank or 0)
    _train(job, rendezvous, store, world_folder)


def _train(job: Job, rendezvous: Rendezvous, store: Store, world_folder: Path) -> None:
    assert rendezvous.rank is not None and rendezvous.local_rank is not None and job.patches is not None
    seconds = job.recipe.distributed.timeout_seconds
    _log.info("importing megatron-core")
    with pause_gc_and_freeze():
        runtime = prepare_runtime(job.patches, job.backend, job.recipe)
    device = runtime.select_device(rendezvous.local_rank)
    with Watchdog(seconds, world_folder, rendezvous.rank, rendezvous.local_rank) as dog:
        timeout = timedelta(seconds=compute_collective_timeout(seconds))
        world.initialize(rendezvous, store, runtime.collectives, timeout)
        with dog.extend_patience("importing megatron"), pause_gc_and_freeze():
            # Only now: it must meet the patches.
            if job.recipe.task_traits.samples_answers:
                from bundle.rl.trainer import run
            else:
                from bundle.training.trainer import run
        try:
            run(job, runtime, device, dog)
        except Preempted:
            # All ranks stop together; after any other error the others may never come.
            world.destroy_process_groups()
            raise
        world.destroy_process_groups()
