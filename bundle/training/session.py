"""A rank's work once megatron may be imported: groups, data, engine, checkpoint, and the loop."""

from pathlib import Path

import torch

from bundle.distributed.stopping import StopRequest
from bundle.distributed.watchdog import Watchdog
from bundle.engine import Engine
from bundle.mcore import groups
from bundle.mcore.groups import Groups
from bundle.mcore.runtime import Runtime
from bundle.recipe import Recipe
from bundle.training import data, loop
from bundle.training.batches import Batches
from bundle.training.metrics import JsonLines, Metrics, Sink, TensorBoard, terminal
from bundle.training.progress import Progress


def run(
    recipe: Recipe, directory: Path, runtime: Runtime, device: torch.device, rank: int, local_rank: int
) -> None:
    """Trains to the last step and reports the held-out losses; raises what `loop.train` raises."""
    with Watchdog(recipe.distributed.timeout_seconds, directory / "logs", rank, local_rank) as dog:
        stop = StopRequest(device)
        state = _groups(recipe, runtime)
        corpus = data.prepare(recipe, directory / "data")
        feed = data.Feed(recipe, corpus, state.dp.rank, state.dp.size)
        engine = Engine(recipe, runtime, state, device)
        progress = Progress()
        metrics = _metrics(recipe, directory, progress, reports=rank == 0)
        hooks = loop.Hooks(
            save=lambda at: None,
            should_stop=stop.agreed,
            alive=lambda step: dog.beat(f"step {step + 1}"),
        )
        try:
            loop.train(engine, Batches(recipe, feed, state, device), progress, metrics, hooks)
        finally:
            metrics.close()


def _groups(recipe: Recipe, runtime: Runtime) -> Groups:
    sizes = recipe.parallel
    with runtime.megatron():
        return groups.initialize(
            tp=sizes.tp,
            pp=sizes.pp,
            vpp=sizes.vpp,
            cp=sizes.cp,
            ep=sizes.ep,
            etp=sizes.etp,
            seed=recipe.seed,
            timeout_seconds=recipe.distributed.timeout_seconds,
        )


def _metrics(recipe: Recipe, directory: Path, progress: Progress, *, reports: bool) -> Metrics:
    if not reports:
        return Metrics([])
    sinks: list[Sink] = [JsonLines(directory / "metrics.jsonl", progress.step)]
    if recipe.metrics.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard", progress.step))
    return Metrics([*sinks, terminal(recipe.train.steps, progress.step)])
