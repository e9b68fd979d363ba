"""The training loop: batches, step, report, evaluate, save, to the last step or a reason to end before it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bundle.data import Loader, SampleBatch
from bundle.data.samples import BLANK, SampleSizes
from bundle.engine import Engine, Losses, MicroBatch
from bundle.engine.engine import StepResult
from bundle.engine.microbatch import from_packing, from_rows
from bundle.errors import JobFailed, Preempted, UsageError
from bundle.mcore.groups import Groups
from bundle.packing.images import ImageInputs
from bundle.packing.packing import Packing
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment
from bundle.recipe.sections import EarlyStop
from bundle.runs.metrics import MetricsWriter
from bundle.training.preferences import with_reference


class Batches:
    """What the loader gives, as this rank's micro-batches of each step and of an evaluation.

    On its device, cut or packed for its layout.
    """

    def __init__(self, recipe: Recipe, loader: Loader, groups: Groups, device: torch.device) -> None:
        self._loader, self._groups, self._device = loader, groups, device
        self._options: dict[str, Any] = {
            "mtp_layers": recipe.architecture.mtp_layers,
            "mean": recipe.loss_mean,
        }
        # Every pack is filled up to the same number of rows: stages exchange activations of one shape.
        self._length = recipe.data.sequence_length
        self._alignment, self._vision = recipe.alignment, recipe.architecture.vision
        # What a reference says of every document of the corpus, once it is known; of pairs alone.
        self.reference: NDArray[np.float64] | None = None
        # Of the last step, on all replicas together.
        self.sizes = SampleSizes(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))

    def build_training_batches(self, consumed_samples: int) -> list[MicroBatch]:
        """The micro-batches of the step that begins after `consumed_samples` samples of the whole run."""
        self.sizes = self._loader.compute_sizes(consumed_samples)
        return [self._build_micro_batch(batch) for batch in self._loader.read_training_step(consumed_samples)]

    @property
    def tokens_of_step(self) -> int:
        """Tokens of the last step on all replicas, learned or not."""
        return int(self.sizes.lengths.sum())

    def iterate_once(self) -> Iterator[tuple[list[SampleBatch], list[MicroBatch]]]:
        """All that is ever trained on or evaluated with, in portions, as on the host and as on the device."""
        for batches in chain(self._loader.read_all_samples(), self._loader.read_validation().values()):
            yield batches, [self._build_micro_batch(batch) for batch in batches]

    def build_validation_batches(self) -> dict[str, list[MicroBatch]]:
        """The micro-batches to evaluate with, the same each time, by what their losses are called."""
        batch_sets = self._loader.read_validation().items()
        return {name: [self._build_micro_batch(batch) for batch in batches] for name, batches in batch_sets}

    def _build_micro_batch(self, batch: SampleBatch) -> MicroBatch:
        cp, options = self._groups.cp, {**self._options, "images": self._build_images(batch)}
        row_tensors = batch.ids, batch.labels, batch.loss_mask
        if batch.lengths is None and batch.row_lengths is None:
            ids, labels, mask = (x.to(self._device) for x in row_tensors)
            micro_batch = from_rows(ids, labels, mask, cp=cp.size, rank=cp.rank, **options)
        else:
            # Rows as `from_rows` has them, in which padding is no token.
            alignment = self._alignment if batch.lengths else Alignment("bshd", cp=cp.size)
            packing = Packing.from_lengths(
                get_lengths(batch), alignment, rank=cp.rank, length=self._length, device=self._device
            )
            ids, labels, mask = (remove_padding(batch, x).to(self._device) for x in row_tensors)
            micro_batch = from_packing(ids, labels, mask, packing, **options)
        if self.reference is None:
            return micro_batch
        log_probs = np.where(batch.documents == BLANK, 0.0, self.reference[batch.documents])
        return with_reference(micro_batch, torch.from_numpy(log_probs).float().to(self._device))

    def _build_images(self, batch: SampleBatch) -> ImageInputs | None:
        """The images and videos of a batch, for a model that sees some."""
        if self._vision is None:
            return None
        lengths, ids = np.asarray(get_lengths(batch), np.int64), remove_padding(batch, batch.ids).numpy()
        images = ImageInputs.from_sequences(
            batch.pixels, batch.grids, ids, lengths, self._vision, batch.seconds
        )
        return images.to(self._device)


def get_lengths(batch: SampleBatch) -> Sequence[int]:
    """Tokens of each sequence, padding aside."""
    rows, length = batch.ids.shape
    return batch.lengths or batch.row_lengths or (length,) * rows


def remove_padding(batch: SampleBatch, values: Tensor) -> Tensor:
    """Of values [b, s] of a batch those of its sequences, one after the other: [t]."""
    if batch.row_lengths is None:
        return values.flatten()
    return values[torch.arange(values.shape[1]) < torch.tensor(batch.row_lengths)[:, None]]


@dataclass
class Progress:
    """How far a run has come: what a checkpoint keeps beside weights and optimizer.

    Steps done, samples read, and updates left out because a gradient was not finite. `unreported_steps` took
    `unreported_seconds` and `unreported_flops` of a device for `unreported_tokens` since the last report;
    `losses` are those reported last. `lowest` is the validation loss that an early stop holds others against,
    and `unimproved` how many evaluations were not below it since.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_updates: int = 0
    unreported_steps: int = 0
    unreported_seconds: float = 0.0
    unreported_flops: float = 0.0
    unreported_tokens: int = 0
    losses: Losses | None = None
    lowest: float | None = None
    unimproved: int = 0

    def count_evaluation(self, loss: float, rule: EarlyStop) -> None:
        """Counts an evaluation; one that is no number is not below any."""
        if math.isfinite(loss) and (self.lowest is None or loss < self.lowest - rule.min_delta):
            self.lowest, self.unimproved = loss, 0
        else:
            self.unimproved += 1

    def find_early_end(self, rule: EarlyStop | None) -> str | None:
        """Why the run ends before its last step; None where it does not."""
        if rule is None or self.unimproved < rule.patience:
            return None
        least = f", by {rule.min_delta:g} or more" if rule.min_delta else ""
        lowest = "infinity" if self.lowest is None else f"{self.lowest:.4f}"
        return (
            f"train.early_stop: the validation loss was not below {lowest}{least}"
            f" in {self.unimproved} evaluations"
        )


@dataclass(frozen=True)
class Hooks:
    """What the loop calls besides the engine; all ranks call each, and `should_stop` answers all alike."""

    save: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    send_heartbeat: Callable[[int], None]
    profile_step: Callable[[int], AbstractContextManager[None]]
    count_flops: Callable[[], float]  # of a device, in the step that was just made
    compute_gauges: Callable[[float, float], Mapping[str, float]]  # of FLOPs and the seconds that they took
    broadcast_from_rank_0: Callable[[float], float]  # on every rank, what rank 0 calls it with
    # Writes the model as others open it, after this many steps: before the next one, or when a run goes on.
    export: Callable[[int], None] = lambda _: None
    # What is unusual about the steps that are about to be reported, as metrics.
    measure_anomalies: Callable[[Progress], Mapping[str, float]] = lambda _: {}


def train(engine: Engine, data: Batches, progress: Progress, metrics: MetricsWriter, hooks: Hooks) -> None:
    """Returns after the last step, which an early stop may have made an earlier one.

    `progress` holds the losses reported last: of held-out data, else of the first validation set, if any.
    Raises UsageError for an early stop without either, Preempted after a checkpoint when told to stop,
    JobFailed when a gradient or a reported loss is not finite and the recipe says `train.on_nan: stop`.
    """
    recipe, early_stop = engine.recipe, engine.recipe.train.early_stop
    validation = data.build_validation_batches()
    if early_stop is not None and not validation:
        raise UsageError("train.early_stop: so little data is held out that there is no evaluation")
    while progress.step < recipe.train.steps and not progress.find_early_end(early_stop):
        if progress.step and _is_due(progress.step, recipe.checkpoint.export_interval):
            hooks.export(progress.step)
        started = time.perf_counter()
        with hooks.profile_step(progress.step + 1):
            engine.forward_backward(data.build_training_batches(progress.consumed_samples))
            result = engine.step()
        progress.unreported_seconds += time.perf_counter() - started
        progress.unreported_flops += hooks.count_flops()
        progress.unreported_tokens += data.tokens_of_step
        progress.unreported_steps += 1
        progress.step += 1
        progress.consumed_samples += recipe.train.global_batch_size
        hooks.send_heartbeat(progress.step)

        if not math.isfinite(result.grad_norm):
            _handle_infinite_gradient(recipe.train.on_nan, progress)
        if _is_due(progress.step, recipe.train.log_interval) or progress.step == recipe.train.steps:
            progress.losses = engine.take_losses()
            report = _build_report(recipe, progress, progress.losses, result)
            gauges = hooks.compute_gauges(progress.unreported_flops, progress.unreported_seconds)
            metrics.write(progress.step, report | dict(gauges) | dict(hooks.measure_anomalies(progress)))
            if recipe.train.on_nan == "stop":
                _refuse_infinite_loss(progress, progress.losses)
            progress.unreported_steps, progress.unreported_seconds = 0, 0.0
            progress.unreported_flops, progress.unreported_tokens = 0.0, 0
        last = progress.step == recipe.train.steps
        if validation and (last or _is_due(progress.step, recipe.train.eval_interval)):
            losses = {name: engine.evaluate(batches) for name, batches in validation.items()}
            progress.losses = next(iter(losses.values()))
            for name, set_losses in losses.items():
                metrics.write(progress.step, _name_losses(name, set_losses))
            if early_stop is not None:
                progress.count_evaluation(hooks.broadcast_from_rank_0(progress.losses.main), early_stop)
                last = last or progress.find_early_end(early_stop) is not None
        stop = hooks.should_stop()
        if stop or last or _is_due(progress.step, recipe.checkpoint.interval):
            hooks.save(progress)
        if stop and not last:
            raise Preempted(
                f"stopped at step {progress.step} as told; a checkpoint is written, start it again"
            )


def _handle_infinite_gradient(policy: str, progress: Progress) -> None:
    if policy == "stop":
        raise JobFailed(
            f"the gradient of step {progress.step} is not finite; no checkpoint was written since, so that a"
            " resume starts from finite weights. Lower optimizer.lr, raise optimizer.warmup_steps, or set"
            " train.on_nan: skip"
        )
    progress.skipped_updates += 1


def _refuse_infinite_loss(progress: Progress, losses: Losses) -> None:
    if math.isfinite(losses.main):
        return
    begun = progress.step - progress.unreported_steps + 1
    reason = "although every gradient was" if losses.tokens else "since not one of their tokens is learned"
    raise JobFailed(
        f"the loss of steps {begun} to {progress.step} is not finite, {reason}; no checkpoint was written of"
        " these. Look at the data: which parts of its rows are answers, and whether any are"
    )


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _name_losses(part: str, losses: Losses) -> dict[str, float]:
    values = {f"{part}/loss": losses.main} | {
        f"{part}/{name}": value for name, value in losses.measures.items()
    }
    return values | {f"{part}/mtp_{depth + 1}_loss": loss for depth, loss in enumerate(losses.mtp)}


def _build_report(recipe: Recipe, progress: Progress, losses: Losses, result: StepResult) -> dict[str, float]:
    """What training did since the last report; rates are of the steps alone, without evaluation or saving."""
    skipped = {"train/skipped_updates": progress.skipped_updates} if recipe.train.on_nan == "skip" else {}
    seconds = progress.unreported_seconds / progress.unreported_steps
    return _name_losses("train", losses) | {
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        "train/tokens_per_second": progress.unreported_tokens / progress.unreported_seconds,
        "train/step_seconds": seconds,
        "train/seconds_left": seconds * (recipe.train.steps - progress.step),
        "train/samples": progress.consumed_samples,
        **skipped,
    }
