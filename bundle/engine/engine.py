"""The engine: forward and backward of a step, the optimizer's step, evaluation."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bundle.engine.losses import Losses, LossTap
from bundle.engine.microbatch import MicroBatch
from bundle.mcore import optimization, schedules
from bundle.mcore.config import transformer_config
from bundle.mcore.groups import Groups
from bundle.mcore.runtime import Runtime
from bundle.models import gpt
from bundle.recipe import Recipe


@dataclass(frozen=True)
class StepResult:
    """The gradient norm before clipping, the learning rate used, and whether the weights changed."""

    grad_norm: float
    learning_rate: float
    updated: bool


class Engine:
    """One model with its optimizer on this rank's process groups.

    All ranks call every method, in the same order.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime, groups: Groups, device: torch.device) -> None:
        self.recipe, self.runtime, self.groups, self.device = recipe, runtime, groups, device
        with runtime.megatron():
            self.config = transformer_config(recipe, runtime.options(recipe))
            self.models = gpt.build(recipe, self.config, runtime, groups)
            self.chunks = optimization.data_parallel(recipe, self.config, self.models)
            self.optimizer = optimization.optimizer(recipe, self.chunks)
            self.scheduler = optimization.schedule(recipe, self.optimizer)
        depths = recipe.architecture.mtp_layers
        self._tap = LossTap(self.models[-1], depths, device)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Adds the gradients of one step's micro-batches, the mean over all tokens of all ranks."""
        with self.runtime.megatron():
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self._run(micro_batches, forward_only=False)

    def step(self) -> StepResult:
        """Clips, updates the weights and advances the learning rate.

        With `train.on_nan: skip` an update whose gradient is not finite is left out: its norm is not finite
        in the result and `updated` is False.
        """
        learning_rate = self.optimizer.param_groups[0]["lr"]
        with self.runtime.megatron():
            if self.recipe.train.on_nan == "skip":
                # Megatron would clip by a norm that is not a number and write that into every weight.
                self.optimizer.prepare_grads()
                norm = float(self.optimizer.get_grad_norm())
                if not math.isfinite(norm):
                    return StepResult(norm, float(learning_rate), False)
            updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=1)
        return StepResult(float(grad_norm), float(learning_rate), bool(updated))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """The losses of these micro-batches without changing anything that training reads."""
        with self._tap.apart(), self.runtime.megatron(), torch.no_grad():
            for chunk in self.chunks:
                chunk.eval()
            self._run(micro_batches, forward_only=True)
            for chunk in self.chunks:
                chunk.train()
            return self.take_losses()

    def take_losses(self) -> Losses:
        """The mean losses of everything run since the last call."""
        return self._tap.take(self.groups.tp.size)

    def losses_so_far(self) -> list[list[float]]:
        """What `take_losses` would divide, as plain numbers that a checkpoint can keep."""
        return self._tap.so_far()

    def restore_losses(self, rows: list[list[float]]) -> None:
        """Takes up what `losses_so_far` gave."""
        self._tap.restore(rows)

    def _run(self, micro_batches: Sequence[MicroBatch], *, forward_only: bool) -> None:
        first = micro_batches[0]
        schedules.run(
            self._forward_step,
            micro_batches,
            self.chunks,
            sequence_length=first.sequence_length,
            micro_batch_size=first.rows,
            forward_only=forward_only,
        )

    def _forward_step(
        self, iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        micro_batch = next(iterator)
        self._tap.expect(micro_batch)
        output = chunk(
            micro_batch.ids,
            micro_batch.position_ids,
            None,
            labels=micro_batch.labels,
            loss_mask=micro_batch.loss_mask,
            packed_seq_params=micro_batch.packed,
        )

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            mask = micro_batch.loss_mask
            return (output.float() * mask).sum(), mask.sum().int(), {}

        return output, loss
