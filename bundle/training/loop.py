"""The training loop: batches, step, report, evaluate, save, until the last step or until told to stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bundle.engine import Engine, Losses
from bundle.errors import JobFailed, Preempted
from bundle.training.batches import Batches
from bundle.training.metrics import Metrics
from bundle.training.progress import Progress


@dataclass(frozen=True)
class Hooks:
    """What the loop calls besides the engine; all ranks call each, and `should_stop` answers all alike."""

    save: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    alive: Callable[[int], None]


@dataclass
class _Interval:
    """Wall time since the last report."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0


def train(engine: Engine, data: Batches, progress: Progress, metrics: Metrics, hooks: Hooks) -> Losses | None:
    """The losses reported last: held-out ones where there are any; None when there was no step left.

    Raises Preempted after a checkpoint when told to stop, JobFailed when a gradient is not finite and the
    recipe says `train.on_nan: stop`.
    """
    recipe = engine.recipe
    interval = _Interval()
    losses = None
    held_out = data.validation()
    while progress.step < recipe.train.steps:
        engine.forward_backward(data.training(progress.consumed_samples))
        result = engine.step()
        progress.step += 1
        progress.consumed_samples += recipe.train.global_batch_size
        interval.steps += 1
        hooks.alive(progress.step)

        if not math.isfinite(result.grad_norm):
            _not_finite(recipe.train.on_nan, progress)
        if _due(progress.step, recipe.train.log_interval) or progress.step == recipe.train.steps:
            losses = engine.take_losses()
            metrics.write(progress.step, _report(losses, result.grad_norm, result.learning_rate, interval))
            interval = _Interval()
        last = progress.step == recipe.train.steps
        if held_out and (last or _due(progress.step, recipe.train.eval_interval)):
            losses = engine.evaluate(held_out)
            metrics.write(progress.step, _named("validation", losses))
            interval.started = time.perf_counter()
        stop = hooks.should_stop()
        if stop or last or _due(progress.step, recipe.checkpoint.interval):
            hooks.save(progress)
        if stop and not last:
            raise Preempted(
                f"stopped at step {progress.step} as told; a checkpoint is written, start it again"
            )
    return losses


def _not_finite(policy: str, progress: Progress) -> None:
    if policy == "stop":
        raise JobFailed(
            f"the gradient of step {progress.step} is not finite; no checkpoint was written since, so that a"
            " resume starts from finite weights. Lower optimizer.lr, raise optimizer.warmup_steps, or set"
            " train.on_nan: skip"
        )
    progress.skipped_updates += 1


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _named(part: str, losses: Losses) -> dict[str, float]:
    values = {f"{part}/loss": losses.main}
    return values | {f"{part}/mtp_{depth + 1}_loss": loss for depth, loss in enumerate(losses.mtp)}


def _report(losses: Losses, grad_norm: float, learning_rate: float, interval: _Interval) -> dict[str, float]:
    seconds = time.perf_counter() - interval.started
    return _named("train", losses) | {
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "train/tokens_per_second": losses.tokens / seconds,
        "train/step_seconds": seconds / max(1, interval.steps),
    }
