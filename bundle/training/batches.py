"""What the loader gives, as the micro-batches of this rank: on its device, cut or packed for its layout."""

from collections.abc import Sequence
from typing import Any

import torch

from bundle.data import Batch, Loader
from bundle.engine import MicroBatch
from bundle.engine.microbatch import from_packing, from_rows
from bundle.mcore.groups import Groups
from bundle.recipe import Recipe
from bundle.sequences.packing import Packing


class Batches:
    """The micro-batches of each step and of an evaluation."""

    def __init__(self, recipe: Recipe, loader: Loader, groups: Groups, device: torch.device) -> None:
        self._loader, self._groups, self._device = loader, groups, device
        self._options: dict[str, Any] = {
            "mtp_layers": recipe.architecture.mtp_layers,
            "mean": recipe.train.loss_mean,
        }
        # Every pack is filled up to the same number of rows: stages exchange activations of one shape.
        self._length = recipe.data.sequence_length
        self._alignment = recipe.alignment
        self.lengths: list[int] = []  # of the sequences of this rank's last step, padding aside

    def training(self, consumed: int) -> list[MicroBatch]:
        """The micro-batches of the step that begins after `consumed` samples of the whole run."""
        batches = self._loader.training(consumed)
        self.lengths = [length for batch in batches for length in _lengths(batch)]
        return [self._micro_batch(batch) for batch in batches]

    def validation(self) -> dict[str, list[MicroBatch]]:
        """The micro-batches to evaluate with, the same each time, by what their losses are called."""
        given = self._loader.validation().items()
        return {name: [self._micro_batch(batch) for batch in batches] for name, batches in given}

    def _micro_batch(self, batch: Batch) -> MicroBatch:
        ids, labels, mask = (x.to(self._device) for x in (batch.ids, batch.labels, batch.loss_mask))
        cp = self._groups.cp
        if batch.lengths is None:
            return from_rows(ids, labels, mask, cp=cp.size, rank=cp.rank, **self._options)
        packing = Packing.of(
            batch.lengths, self._alignment, rank=cp.rank, length=self._length, device=self._device
        )
        return from_packing(ids[0], labels[0], mask[0], packing, **self._options)


def _lengths(batch: Batch) -> Sequence[int]:
    """Tokens of each sequence; rows of equal length count whole."""
    rows, length = batch.ids.shape
    return batch.lengths if batch.lengths is not None else [length] * rows
