"""The training loop on fixed data: learn, report, evaluate, save, until the last step or an early stop."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bundle.data import Loader, SampleBatch
from bundle.data.samples import BLANK_SAMPLE_NUMBER, SampleSizes
from bundle.distributed.world import run_on_rank_0
from bundle.engine import Engine, MicroBatch
from bundle.engine.microbatch import from_packing, from_rows
from bundle.errors import UsageError
from bundle.mcore.groups import Groups
from bundle.packing.images import ImageInputs
from bundle.packing.packing import Packing
from bundle.recipe import Recipe
from bundle.recipe.alignment import Alignment
from bundle.recipe.sections import EarlyStop
from bundle.runs.session import Session, name_losses
from bundle.training.preferences import with_reference
from bundle.transfers import copy_to_device


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
        """Return the micro-batches of the step after `consumed_samples` samples of the whole run."""
        self.sizes = self._loader.compute_sizes(consumed_samples)
        return [self._build_micro_batch(batch) for batch in self._loader.read_training_step(consumed_samples)]

    def iterate_all_samples(self) -> Iterator[tuple[list[SampleBatch], list[MicroBatch]]]:
        """Yield all training and validation samples once, in portions: each on the host and on the device."""
        for batches in chain(
            self._loader.read_training_samples_once(), self._loader.read_validation().values()
        ):
            yield batches, [self._build_micro_batch(batch) for batch in batches]

    def build_validation_batches(self) -> dict[str, list[MicroBatch]]:
        """Return the micro-batches for evaluation, the same each time, by the names of their losses."""
        batch_sets = self._loader.read_validation().items()
        return {name: [self._build_micro_batch(batch) for batch in batches] for name, batches in batch_sets}

    def _build_micro_batch(self, batch: SampleBatch) -> MicroBatch:
        cp, options = self._groups.cp, {**self._options, "images": self._build_vision_model_inputs(batch)}
        row_tensors = batch.ids, batch.labels, batch.loss_mask
        if batch.lengths is None and batch.row_lengths is None:
            ids, labels, mask = (copy_to_device(x, self._device) for x in row_tensors)
            micro_batch = from_rows(ids, labels, mask, cp=cp.size, rank=cp.rank, **options)
        else:
            # Rows as `from_rows` has them, in which padding is no token.
            alignment = self._alignment if batch.lengths else Alignment("bshd", cp=cp.size)
            packing = Packing.from_lengths(
                get_sequence_lengths(batch), alignment, rank=cp.rank, length=self._length, device=self._device
            )
            ids, labels, mask = (copy_to_device(remove_padding(batch, x), self._device) for x in row_tensors)
            micro_batch = from_packing(ids, labels, mask, packing, **options)
        if self.reference is None:
            return micro_batch
        log_probs = np.where(batch.documents == BLANK_SAMPLE_NUMBER, 0.0, self.reference[batch.documents])
        return with_reference(micro_batch, copy_to_device(torch.from_numpy(log_probs).float(), self._device))

    def _build_vision_model_inputs(self, batch: SampleBatch) -> ImageInputs | None:
        """Return the images and videos of a batch; None for a model without a vision tower."""
        if self._vision is None:
            return None
        lengths, ids = (
            np.asarray(get_sequence_lengths(batch), np.int64),
            remove_padding(batch, batch.ids).numpy(),
        )
        images = ImageInputs.from_sequences(
            batch.pixels, batch.grids, ids, lengths, self._vision, batch.seconds
        )
        return images.to(self._device)


def get_sequence_lengths(batch: SampleBatch) -> Sequence[int]:
    """Return the number of tokens of each sequence, without padding."""
    rows, length = batch.ids.shape
    return batch.lengths or batch.row_lengths or (length,) * rows


def remove_padding(batch: SampleBatch, values: Tensor) -> Tensor:
    """Return the values of a batch's sequences, one after the other [t], from values [b, s]."""
    if batch.row_lengths is None:
        return values.flatten()
    return values[torch.arange(values.shape[1]) < torch.tensor(batch.row_lengths)[:, None]]


@dataclass
class EarlyStopping:
    """What an early stop (train.early_stop) remembers of the evaluations of a run.

    `lowest` is the loss that others are compared with, `unimproved` counts evaluations since then that were
    not below it.
    """

    rule: EarlyStop | None
    lowest: float | None = None
    unimproved: int = 0

    def count_evaluation(self, loss: float) -> None:
        """Count an evaluation; a loss that is not a number is not below any."""
        if self.rule is None:
            return
        if math.isfinite(loss) and (self.lowest is None or loss < self.lowest - self.rule.min_delta):
            self.lowest, self.unimproved = loss, 0
        else:
            self.unimproved += 1

    @property
    def reason(self) -> str | None:
        """The reason why the run ends before its last step; None where it does not."""
        if self.rule is None or self.unimproved < self.rule.patience:
            return None
        least = f", by {self.rule.min_delta:g} or more" if self.rule.min_delta else ""
        lowest = "infinity" if self.lowest is None else f"{self.lowest:.4f}"
        return (
            f"train.early_stop: the validation loss was not below {lowest}{least}"
            f" in {self.unimproved} evaluations"
        )


def train(session: Session, batches: Batches, early_stopping: EarlyStopping) -> None:
    """Train to the last step, which an early stop may have made an earlier one.

    The session's progress holds the losses reported last: of held-out data, else of the first validation set,
    if any. Raises UsageError for an early stop without either, Preempted after a checkpoint when told to
    stop, JobFailed when a gradient or a reported loss is not finite and `train.on_nan` is stop.
    """
    engine, recipe, progress = session.engine, session.recipe, session.progress
    validation = batches.build_validation_batches()
    if early_stopping.rule is not None and not validation:
        raise UsageError(
            "train.early_stop: too little data is held out for an evaluation. Raise data.validation"
        )
    while not session.has_finished_last_step and not early_stopping.reason:
        session.export_if_due()
        step = progress.step + 1
        is_reported = step % recipe.train.log_interval == 0 or step >= recipe.train.steps
        result = session.make_update(
            lambda: _run_forward_backward(engine, batches, progress.consumed_samples),
            recipe.train.global_batch_size,
            is_reported=is_reported,
        )
        if is_reported:
            session.report_unreported_updates(result)
        if validation and (session.is_due(recipe.train.eval_interval) or session.has_finished_last_step):
            _evaluate(session, validation, early_stopping)
            session.stop_request.begin_exchange()  # a signal may have come in the meantime
        session.save_if_due_or_preempted(
            is_last=session.has_finished_last_step or early_stopping.reason is not None,
            is_save_due=session.is_due(recipe.checkpoint.interval),
        )


def _run_forward_backward(engine: Engine, batches: Batches, consumed_samples: int) -> SampleSizes:
    engine.forward_backward(batches.build_training_batches(consumed_samples))
    return batches.sizes


def _evaluate(
    session: Session, validation: Mapping[str, Sequence[MicroBatch]], early_stopping: EarlyStopping
) -> None:
    losses = {name: session.engine.evaluate(micro_batches) for name, micro_batches in validation.items()}
    session.progress.losses = first = next(iter(losses.values()))
    for name, set_losses in losses.items():
        session.metrics.write(session.progress.step, name_losses(name, set_losses))
    if early_stopping.rule is not None:
        # Ranks without the head have no loss of their own.
        early_stopping.count_evaluation(run_on_rank_0(lambda: first.main))
        session.task_state["early_stopping"] = [early_stopping.lowest, early_stopping.unimproved]
