"""A run of any task on one rank: engine, checkpoints, metrics, and the parts of a step that tasks share.

The rooms `training` and `rl` add data and a loop.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bundle import files
from bundle.checkpoints.checkpoints import Checkpoints
from bundle.checkpoints.state import TrainState
from bundle.distributed.watchdog import Watchdog
from bundle.distributed.world import StopRequest, run_on_rank_0
from bundle.engine import Engine, Losses, StepResult
from bundle.errors import JobFailed, Preempted
from bundle.files import compute_short_json_digest
from bundle.models import exporting
from bundle.recipe import Recipe
from bundle.runs.directory import RunDirectory
from bundle.runs.metrics import MetricsDispatcher, Profiler, Speed, replace_nonfinite
from bundle.runs.progress import Progress
from bundle.runs.stragglers import Stragglers

_log = logging.getLogger(__name__)


class SequenceAndImageSizes(Protocol):
    """The sizes of the data of an update, on all replicas together."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sequence, learned or not, [sequences]."""

    @property
    def grids(self) -> NDArray[np.int64]:
        """The patches of each image in time, height and width, [images, 3]."""


@dataclass
class Session:
    """One run on this rank. All ranks call its methods, in the same order.

    The length of `recipe` is given in steps. `task_state` are plain values that the task adds to every
    checkpoint; after a resume they are those of the checkpoint. `identity` holds digests of the data by name.
    An export writes `end_tokens` as those that end an answer.
    """

    recipe: Recipe
    engine: Engine
    directory: RunDirectory
    checkpoints: Checkpoints
    watchdog: Watchdog
    metrics: MetricsDispatcher
    speed: Speed
    stragglers: Stragglers
    profiler: Profiler
    stop_request: StopRequest
    progress: Progress
    identity: Mapping[str, str]
    task_state: dict[str, Any] = field(default_factory=dict)
    end_tokens: Collection[int] = ()

    def train_and_finalize(
        self, train: Callable[[], None], describe_result: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Call `train`, then complete the last checkpoint, export, and write the result.

        Raise what `train` raises; at Preempted the last checkpoint is complete. Raise JobFailed where no
        update had a finite gradient.
        """
        with self.metrics, self.profiler:
            _log.info("training starts at step %d", self.progress.step + 1)
            try:
                train()
            except Preempted:  # its message promises a checkpoint, which may still be written
                self._complete_checkpoint()
                raise
            self._complete_checkpoint()
            self.write_configured_export()
            run_on_rank_0(lambda: self._write_result(describe_result()))

    @property
    def has_finished_last_step(self) -> bool:
        """True if the last update of the recipe was made."""
        return self.progress.step >= self.recipe.train.steps

    def is_due(self, interval: int, previous_step: int | None = None) -> bool:
        """Return whether a multiple of `interval` was reached after `previous_step` (None: the last update).

        An interval of 0 is never due.
        """
        step = self.progress.step
        previous_step = step - 1 if previous_step is None else previous_step
        return interval > 0 and step // interval > previous_step // interval

    def make_update(
        self, learn: Callable[[], SequenceAndImageSizes], samples: int, *, is_reported: bool = False
    ) -> StepResult:
        """Make one update: `learn` adds the gradients and returns sizes; `samples` are counted as read.

        Values that the host reads after the update are exchanged before it. So the next step starts while the
        device still updates weights. `is_reported`: whether `report_unreported_updates` follows.
        Raise JobFailed for a gradient that is not finite, unless `train.on_nan` is skip.
        """
        progress = self.progress
        started = time.perf_counter()
        with self.profiler.step(progress.step + 1):
            sizes = learn()
            self.stop_request.begin_exchange()
            if is_reported:
                self.engine.begin_loss_reduction()
            result = self.engine.step_optimizer()
        seconds = time.perf_counter() - started
        flops = self.speed.compute_flops_per_rank(sizes.lengths, sizes.grids)
        progress.count_update(seconds, flops, int(sizes.lengths.sum()), samples)
        progress.skipped_updates += not math.isfinite(result.grad_norm)
        self.watchdog.report_progress(f"step {progress.step + 1}")
        self.checkpoints.poll()
        return result

    def report_unreported_updates(self, result: StepResult, extra: Mapping[str, float] | None = None) -> None:
        """Write the metrics of the updates since the last report, and `extra`; `result` is of the last one.

        Raise JobFailed for a loss that is not finite, unless `train.on_nan` is skip.
        """
        progress = self.progress
        progress.losses = losses = self.engine.take_losses()
        values = self._describe_updates(losses, result)
        values |= self.speed.compute_speed_and_memory(progress.unreported_flops, progress.unreported_seconds)
        forward_seconds = self.engine.forward_timer.take_seconds_if_supported()
        if forward_seconds is not None:
            values |= self.stragglers.measure(progress.step, forward_seconds / progress.unreported_steps)
        self.metrics.write(progress.step, values | dict(extra or {}))
        if self.recipe.train.on_nan == "stop":
            self._refuse_nonfinite_main_loss(losses)
        progress.clear_unreported()

    def save_if_due_or_preempted(self, *, is_last: bool, is_save_due: bool) -> None:
        """Save a checkpoint if due, at the end, or after a signal; raise Preempted after a signal."""
        is_told_to_stop = self.stop_request.agree_to_stop()
        if is_told_to_stop or is_last or is_save_due:
            self._save()
        if is_told_to_stop and not is_last:
            raise Preempted(f"stopped by a signal at step {self.progress.step}; a checkpoint is saved")

    def write_configured_export(self, step: int | None = None) -> None:
        """Write the model as `checkpoint.export` says; `step` is None for the export at the end."""
        kind = self.recipe.checkpoint.export
        if kind is None:
            return
        directory = self.directory.build_export_path(kind, step)
        engine = self.engine
        engine.gather_weights()
        with self.watchdog.extend_patience("exporting"), engine.runtime.megatron_calls():
            if kind == "peft":
                exporting.export_adapters(directory, self.recipe, engine.models)
            else:
                exporting.export(directory, self.recipe, engine.models, engine.groups, self.end_tokens)
        _log.info("exported to %s", directory)

    def export_if_due(self, previous_step: int | None = None) -> None:
        """Write an export before the last step if `checkpoint.export_interval` makes it due (`is_due`)."""
        is_due = self.is_due(self.recipe.checkpoint.export_interval, previous_step)
        if self.progress.step and not self.has_finished_last_step and is_due:
            self.write_configured_export(self.progress.step)

    def _save(self) -> None:
        progress, engine = self.progress, self.engine
        carried = {
            "progress": progress.dump(),
            "losses": engine.gather_pending_loss_sums(),
            "data": dict(self.identity),
            "task": self.task_state,
        }
        state = TrainState(
            progress.step, progress.consumed_samples, compute_short_json_digest(self.identity), carried
        )
        with self.watchdog.extend_patience(f"saving step {progress.step}"):
            self.metrics.sync()
            self.checkpoints.save(state)

    def _complete_checkpoint(self) -> None:
        with self.watchdog.extend_patience("completing the last checkpoint"):
            self.checkpoints.poll(wait=True)

    def _describe_updates(self, losses: Losses, result: StepResult) -> dict[str, float]:
        """Return the metrics of the updates since the last report; rates exclude the time between updates."""
        progress = self.progress
        is_skipping = self.recipe.train.on_nan == "skip"
        skipped = {"train/skipped_updates": progress.skipped_updates} if is_skipping else {}
        seconds = progress.unreported_seconds / progress.unreported_steps
        return name_losses("train", losses) | {
            "train/grad_norm": result.grad_norm,
            "train/learning_rate": result.learning_rate,
            "train/tokens_per_second": progress.unreported_tokens / progress.unreported_seconds,
            "train/step_seconds": seconds,
            "train/seconds_left": seconds * (self.recipe.train.steps - progress.step),
            "train/samples": progress.consumed_samples,
            **skipped,
        }

    def _refuse_nonfinite_main_loss(self, losses: Losses) -> None:
        if math.isfinite(losses.main):
            return
        last = self.progress.step
        first = last - self.progress.unreported_steps + 1
        reason = (
            "although every gradient was" if losses.tokens else "because no token of these steps is learned"
        )
        raise JobFailed(
            f"the loss of steps {first} to {last} is not finite, {reason}. No checkpoint includes these"
            " steps. See with `mcore-bundle check` which tokens of the rows are learned."
        )

    def _write_result(self, values: Mapping[str, Any]) -> None:
        """Write result.json, which marks a finished run; raise JobFailed where all updates were skipped."""
        progress = self.progress
        if progress.step and progress.skipped_updates == progress.step:
            raise JobFailed(
                f"none of {progress.step} updates was made, because no gradient was finite: the weights are"
                " unchanged. Lower optimizer.lr, or correct the data."
            )
        result = {"step": progress.step, "skipped_updates": progress.skipped_updates, **values}
        files.write_json(self.directory.result, replace_nonfinite(result))


def name_losses(part: str, losses: Losses) -> dict[str, float]:
    """Return the losses and measures as metrics whose names begin with `part`, such as train."""
    values = {f"{part}/loss": losses.main}
    values |= {f"{part}/{name}": value for name, value in losses.measures.items()}
    return values | {f"{part}/mtp_{depth + 1}_loss": loss for depth, loss in enumerate(losses.mtp)}
