"""A rank's work once megatron may be imported: groups, data, engine, checkpoint, and the loop."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from bundle import data, files
from bundle.backends import Runtime
from bundle.checkpoints.checkpoints import Checkpoints
from bundle.checkpoints.directory import CheckpointDirectory
from bundle.checkpoints.state import TrainState
from bundle.data import preparation
from bundle.digest import of_json
from bundle.distributed.stopping import StopRequest
from bundle.distributed.together import on_rank_0
from bundle.distributed.watchdog import Watchdog, collectives_seconds
from bundle.engine import Engine, Losses
from bundle.errors import JobFailed, Preempted, UsageError
from bundle.mcore import groups
from bundle.mcore.groups import Groups
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory, starting_checkpoint
from bundle.runs.metrics import JsonLines, Metrics, Sink, TensorBoard, finite, terminal
from bundle.runs.profiling import Profiler
from bundle.runs.trackers import trackers
from bundle.training import loop
from bundle.training.batches import Batches
from bundle.training.job import Job
from bundle.training.progress import Progress

_log = logging.getLogger(__name__)


def run(
    job: Job,
    plan: Mapping[str, Any],
    versions: Mapping[str, Any],
    runtime: Runtime,
    device: torch.device,
    dog: Watchdog,
) -> None:
    """Trains to the last step and reports the held-out losses; raises what `loop.train` raises."""
    recipe, directory, rank = job.recipe, job.directory, dist.get_rank()
    with ExitStack() as held:
        stop = StopRequest(device)
        on_rank_0(lambda: held.enter_context(directory.locked()))
        goes_on = on_rank_0(lambda: _begin(job, plan, versions))
        if goes_on is None:
            return
        state = _groups(recipe, runtime)
        corpus = preparation.prepared(recipe, directory.root / "data", dog)
        engine = Engine(recipe, runtime, state, device)
        kept = CheckpointDirectory(directory.checkpoints)
        checkpoints = Checkpoints(
            kept, engine, keep=recipe.checkpoint.keep, background=recipe.checkpoint.async_
        )
        with dog.patience("loading a checkpoint"):
            progress = _restore(job, checkpoints, engine, corpus.identity, goes_on)
        on_rank_0(lambda: directory.rewind_metrics(progress.step))

        def save(at: Progress) -> None:
            with dog.patience(f"saving step {at.step}"):
                checkpoints.save(_state(at, engine, corpus.identity))

        def alive(step: int) -> None:
            dog.beat(f"step {step + 1}")
            checkpoints.poll()

        def complete() -> None:
            with dog.patience("completing the last checkpoint"):
                checkpoints.poll(wait=True)

        metrics = held.enter_context(_metrics(recipe, directory, progress, reports=rank == 0))
        if corpus.skipped_count and not goes_on:
            metrics.write(0, {"data/skipped": corpus.skipped_count})
        feed = data.Loader(recipe, corpus, state.dp.rank, state.dp.size)
        profiler = held.enter_context(Profiler(recipe, directory.profile, rank))
        hooks = loop.Hooks(save=save, should_stop=stop.agreed, alive=alive, profiled=profiler.step)
        try:
            loop.train(engine, Batches(recipe, feed, state, device), progress, metrics, hooks)
        except Preempted:  # what is said to be written may be under way in the background
            complete()
            raise
        complete()
        on_rank_0(lambda: _conclude(directory, progress, corpus))


def _begin(job: Job, plan: Mapping[str, Any], versions: Mapping[str, Any]) -> bool | None:
    """Returns whether there is a run to go on with, None where nothing is left to do; writes its start."""
    directory, recipe = job.directory, job.recipe
    goes_on = directory.begin(recipe, fresh=job.fresh, resume=job.resume, start_from=job.start_from)
    if not goes_on:
        directory.write_start(recipe, plan, versions, job.start_from)
    elif directory.finished(recipe):
        _log.info(directory.nothing_left())
        return None
    else:
        directory.write_again(recipe, plan, versions)
    return goes_on


def _groups(recipe: Recipe, runtime: Runtime) -> Groups:
    with runtime.megatron():
        return groups.initialize(
            recipe.parallel,
            seed=recipe.seed,
            timeout_seconds=collectives_seconds(recipe.distributed.timeout_seconds),
        )


def _state(at: Progress, engine: Engine, identity: Mapping[str, str]) -> TrainState:
    carried = {
        "skipped_updates": at.skipped_updates,
        "losses": engine.losses_so_far(),
        "data": dict(identity),
        "unreported_steps": at.unreported_steps,
        "unreported_seconds": at.unreported_seconds,
        "reported": asdict(at.losses) if at.losses else None,
    }
    return TrainState(at.step, at.consumed_samples, of_json(identity), carried)


def _restore(
    job: Job, checkpoints: Checkpoints, engine: Engine, identity: Mapping[str, str], goes_on: bool
) -> Progress:
    """Where training begins: after the newest usable checkpoint, or at the start. Says what was left out."""
    loaded = checkpoints.load_newest() if goes_on else None
    if loaded is None and (named := on_rank_0(job.directory.began_with)) is not None:
        loaded = checkpoints.load_from(on_rank_0(lambda: starting_checkpoint(named)))
        if loaded.state.step >= job.recipe.train.steps:
            raise UsageError(
                f"{loaded.directory} is of step {loaded.state.step}:"
                f" train.steps {job.recipe.train.steps} leaves nothing to train"
            )
    if loaded is None:
        return Progress()
    saved = loaded.state
    if saved.data_digest != of_json(identity):
        changes = data.changed(saved.metrics.get("data", {}), identity)
        raise UsageError(f"{loaded.directory.name} was trained on other data", changes)
    engine.restore_losses(saved.metrics["losses"])
    for note in loaded.notes:
        _log.info(note)
    _log.info("goes on after step %d", saved.step)
    carried = saved.metrics
    losses = carried["reported"] and Losses(**carried["reported"])
    return Progress(
        saved.step,
        saved.consumed_samples,
        carried["skipped_updates"],
        carried["unreported_steps"],
        carried["unreported_seconds"],
        losses,
    )


def _metrics(recipe: Recipe, directory: RunDirectory, progress: Progress, *, reports: bool) -> Metrics:
    if not reports:
        return Metrics([])
    sinks: list[Sink] = [JsonLines(directory.metrics)]
    if recipe.metrics.tensorboard:
        sinks.append(TensorBoard(directory.tensorboard, progress.step))
    sinks += trackers(recipe, directory)
    return Metrics([*sinks, terminal(recipe.train.steps, progress.step)])


def _conclude(directory: RunDirectory, progress: Progress, corpus: data.Corpus) -> None:
    """Writes the result, which makes the run a finished one, and says it.

    Raises JobFailed for a run that learned nothing.
    """
    losses, skipped = progress.losses, progress.skipped_updates
    assert losses is not None, "the last step reports"
    if skipped == progress.step:
        raise JobFailed(
            f"not one of {skipped} updates was made, since no gradient was finite: the weights are those of"
            " the start. Lower optimizer.lr or look at the data"
        )
    depths = "".join(f", MTP {depth} {loss:.4f}" for depth, loss in enumerate(losses.mtp, start=1))
    left_out = f"; {skipped} of {progress.step} updates were skipped" if skipped else ""
    entropy = corpus.bigram_entropy
    pairs = f"; the text's bigram entropy is {entropy:.2f}" if entropy is not None else ""
    _log.info("finished: loss %.4f%s nats per token%s%s", losses.main, depths, left_out, pairs)
    result = {
        "step": progress.step,
        "skipped_updates": skipped,
        "skipped_rows": corpus.skipped_count,
        "loss": losses.main,
        "mtp_losses": list(losses.mtp),
    }
    files.write_json(directory.result, finite(result))
