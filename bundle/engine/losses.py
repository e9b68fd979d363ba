"""Sums the main loss and the loss of every MTP depth while megatron computes them.

Megatron calls `GPTModel.compute_language_model_loss` for the main labels and once per MTP depth, in every
release. The tap tells the two apart by the identity of the labels and adds up both with our own masks, which
were rolled before the batch was cut for context parallel: so the numbers are exact where megatron's own MTP
tracker (a mean of rank means) is not, and they exist in evaluation too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bundle.engine.microbatch import MicroBatch


@dataclass(frozen=True)
class Losses:
    """Mean losses over all tokens of all ranks, in nats per token."""

    main: float
    mtp: tuple[float, ...]
    tokens: int


class LossTap:
    """Adds up [sum, token count] of the main loss and of each MTP depth, where the head is."""

    def __init__(self, model: torch.nn.Module, depths: int, device: torch.device) -> None:
        """`model` is the bare GPTModel; on stages without a head the sums stay zero."""
        self._totals = torch.zeros(1 + depths, 2, dtype=torch.float64, device=device)
        self._micro_batch: MicroBatch | None = None
        self._labels: torch.Tensor | None = None
        self._depth = 0
        self._original = model.compute_language_model_loss
        if model.post_process:
            model.compute_language_model_loss = self._compute
            model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def expect(self, micro_batch: MicroBatch) -> None:
        """Says which micro-batch the model is about to run."""
        self._micro_batch = micro_batch

    def take(self, tensor_parallel: int) -> Losses:
        """The losses since the last call, reduced over ALL ranks (every rank must call it)."""
        rows = self.so_far()
        self._totals.zero_()
        means = [total / count if count else float("nan") for total, count in rows]
        return Losses(means[0], tuple(means[1:]), round(rows[0][1] / tensor_parallel))

    def so_far(self) -> list[list[float]]:
        """[sum, count] of each loss since the last `take`, over ALL ranks (every rank must call it)."""
        totals = self._totals.clone()
        dist.all_reduce(totals)
        rows: list[list[float]] = totals.tolist()
        return rows

    def restore(self, rows: list[list[float]]) -> None:
        """Takes up what `so_far` gave; the sums of all ranks are kept on the first."""
        if dist.get_rank() == 0:
            self._totals += torch.tensor(rows, dtype=torch.float64, device=self._totals.device)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Sums from zero inside; what was summed before comes back afterwards."""
        before = self._totals.clone()
        self._totals.zero_()
        try:
            yield
        finally:
            self._totals.copy_(before)

    def _enter(self, _module: torch.nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._labels, self._depth = keywords["labels"], 0

    def _compute(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`labels` [b, s] and `logits` [s, b, vocabulary / tp] -> the loss of each token [b, s]."""
        loss: torch.Tensor = self._original(labels, logits)
        assert self._micro_batch is not None, "expect() comes before the model's forward"
        if labels is self._labels:
            row, mask = 0, self._micro_batch.loss_mask
        else:
            mask = self._micro_batch.mtp_masks[self._depth]
            self._depth += 1
            row = self._depth
        self._totals[row, 0] += (loss.detach() * mask).sum()
        self._totals[row, 1] += mask.sum()
        return loss
