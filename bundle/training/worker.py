"""The life of one rank: meet the others, agree, prepare the backend, train, leave in order."""

from datetime import timedelta
from pathlib import Path

from bundle import log
from bundle.digest import of_json
from bundle.distributed import watchdog, world
from bundle.distributed.agreement import agree
from bundle.distributed.watchdog import Watchdog, collectives_seconds
from bundle.environment import image, packages
from bundle.errors import ExitCode, Preempted
from bundle.launch import outcomes, process
from bundle.launch.rendezvous import Rendezvous
from bundle.patches import plan as patch_plan
from bundle.planning import Plan, plan_for, to_json
from bundle.recipe import Recipe
from bundle.training.job import Job
from bundle.training.runtime import patched_runtime


def work(job: Job, rendezvous: Rendezvous, backend: str | None, allow_drift: tuple[str, ...]) -> ExitCode:
    """How this rank ended; whoever started it learns why."""
    rank, local_rank, size = rendezvous.rank, rendezvous.local_rank, rendezvous.world_size
    assert rank is not None and local_rank is not None and size is not None, "only a rank works"

    def body() -> None:
        made = plan_for(
            job.recipe,
            backend=backend,
            allow_drift=allow_drift,
            nodes=rendezvous.nodes,
            per_node=size // rendezvous.nodes,
        )
        made.refuse()
        _train(job, made, rendezvous, rank, local_rank, size)

    log.start(rank)
    process.die_with_parent()
    watchdog.show_stacks_on_request()
    return outcomes.report(rank, local_rank, body)


def _train(job: Job, made: Plan, rendezvous: Rendezvous, rank: int, local_rank: int, size: int) -> None:
    seconds = job.recipe.distributed.timeout_seconds
    timeout = timedelta(seconds=seconds)
    meeting = world.open_store(rendezvous, timeout)
    agree(meeting, rank, size, _identity(job.recipe, made), timeout)
    runtime = patched_runtime(made)
    device = runtime.device(local_rank)
    with Watchdog(seconds, job.directory.logs, rank, local_rank) as dog:
        patient = timedelta(seconds=collectives_seconds(seconds))
        world.initialize(rendezvous, meeting, runtime.collectives, patient, device)
        with dog.patience("importing megatron"):
            # Only now: it must meet the patches.
            from bundle.training import session
        described = to_json(made, "", "")
        try:
            session.run(job, described, _versions(), runtime, device, dog)
        except Preempted:
            world.destroy()  # all ranks stop together; after any other error the others may never come
            raise
        world.destroy()


def _versions() -> dict[str, dict[str, str | None]]:
    """What is installed, by package, for the run directory."""
    return {p.name: {"version": p.version, "commit": p.commit} for p in packages.detect().packages()}


def _identity(recipe: Recipe, made: Plan) -> dict[str, str]:
    """What all ranks must have in common: a name and a short value each; no paths, no host names."""
    digest = of_json(recipe.dump())
    backend = made.hardware.backend
    inputs = image.inputs_of(Path(image.RECORD))
    return {"recipe": digest, "backend": backend, "image": inputs, **patch_plan.make(made.patches).fields()}
