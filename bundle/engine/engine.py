"""The engine: forward and backward of a step, the optimizer's step, evaluation."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bundle.backends import Runtime
from bundle.engine.balancing import RouterBalancer
from bundle.engine.forward_timer import ForwardTimer
from bundle.engine.losses import (
    Losses,
    LossFactors,
    ModelLossComputer,
    Objective,
    collect_scores,
    compute_factors,
)
from bundle.engine.microbatch import Mean, MicroBatch, build_blanks
from bundle.engine.reference import HostReference
from bundle.engine.replay import RouterReplay
from bundle.engine.scores import Scores
from bundle.errors import JobFailed
from bundle.mcore import mtp, optimization
from bundle.mcore.gpt import build_transformer_config
from bundle.mcore.groups import Groups
from bundle.models import adapters, gpt, vision
from bundle.pretrained import PretrainedWeights
from bundle.recipe import Recipe
from bundle.recipe.loss_chunks import choose_loss_chunks


@dataclass(frozen=True)
class StepResult:
    """The gradient norm before clipping, the learning rate used, and whether the weights changed."""

    grad_norm: float
    learning_rate: float
    updated: bool


class Engine:
    """One model with its optimizer on this rank's process groups.

    All ranks call every method, in the same order. `replay.record_routes()` gives the experts that
    routers choose, `MicroBatch.routes` gives them back.
    """

    def __init__(
        self,
        recipe: Recipe,
        runtime: Runtime,
        groups: Groups,
        device: torch.device,
        weights: PretrainedWeights | None = None,
        objective: Objective | None = None,
    ) -> None:
        """`weights` are what the model begins with; None: random ones, from the recipe's seed.

        `objective` takes the place of the main loss where a call names nothing else.
        """
        self.recipe, self.runtime, self.groups, self.device = recipe, runtime, groups, device
        torch.use_deterministic_algorithms(recipe.train.deterministic)
        with runtime.megatron_calls():
            mtp.clear_logged_losses()
            self.config = build_transformer_config(recipe, runtime.build_config_options(recipe))
            # A router's weight would come to the device in its first forward pass only, when the optimizer
            # has taken it for what it was before.
            self.models = [
                model.to(device) for model in gpt.build_chunks(recipe, self.config, runtime, groups, weights)
            ]
            self.chunks = optimization.wrap_data_parallel(recipe, self.config, self.models)
            self.optimizer = optimization.build_optimizer(recipe, self.chunks)
            if runtime.needs_torch_adam_fusion(recipe):
                optimization.fuse_adam(self.optimizer)
            if recipe.train.on_nan == "skip":
                optimization.skip_nonfinite_updates(self.optimizer)
            self.scheduler = optimization.build_scheduler(recipe, self.optimizer)
        self.has_pretrained_weights = weights is not None  # whether it began with the weights of model.path
        self.replay = RouterReplay(recipe, self.models, groups)
        self.forward_timer = ForwardTimer(device)
        self._balancing = RouterBalancer(recipe, self.models, groups)
        mtp_options = recipe.model.mtp
        if mtp_options.has_detached_part:
            mtp.detach_mtp(
                self.models[-1], trunk=mtp_options.detach_trunk, embeddings=mtp_options.detach_embeddings
            )
        self._objective = objective
        self._reference: HostReference | None = None
        self._tap = ModelLossComputer(
            self.models[-1],
            depths=recipe.architecture.mtp_layers,
            mtp_loss_scale=mtp_options.loss_scale,
            vocabulary=recipe.architecture.vocab_size,
            chunks=choose_loss_chunks(recipe),
            tp_group=groups.tp.group,
            device=device,
            measures=getattr(objective, "measures", None),
            add_gradient=runtime.add_weight_gradient,
        )

    @property
    def checkpoint_modules(self) -> list[torch.nn.Module]:
        """The modules that a checkpoint holds: the models, or their adapters alone where those train."""
        return [adapters.select_adapters_or_chunk(model) for model in self.models]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective | None = None,
        *,
        divisor: float | None = None,
        mean: Mean | None = None,
    ) -> None:
        """Add the gradients of one step's micro-batches: those of the mean loss over all tokens of all ranks.

        The mean is over all sequences where the micro-batches were made so. With a `divisor` the loss is the
        sum of the main loss over all ranks divided by it. `objective` (None: the engine's own, if any)
        replaces the main loss; MTP layers train on the labels in the same forward pass.

        A data-parallel rank may have no micro-batches, but ranks that share experts need equally many. `mean`
        (None: the recipe's) is the mean that the micro-batches of the other ranks were made for. Raises
        ValueError for a divisor together with sequence means, or a divisor that is not above 0.
        """
        micro_batches = micro_batches or self._build_idle_rank_micro_batches(mean)
        with self.runtime.megatron_calls():
            self._tap.discard_reduction()
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            factors = compute_factors(
                micro_batches, self._balancing.count_local_balanced_tokens(micro_batches), divisor
            )
            step = functools.partial(self._run_loss_forward, objective or self._objective, factors)
            with self._balancing.balance_step(micro_batches, factors.balancing):
                self._run(micro_batches, step, forward_only=False)

    def step_optimizer(self) -> StepResult:
        """Clip the gradient, update the weights and advance the learning rate.

        With `train.on_nan: skip` an update whose gradient is not finite is skipped: the norm in the result is
        not finite and `updated` is False. Otherwise raises JobFailed for such a gradient.
        """
        learning_rate = self.optimizer.param_groups[0]["lr"]
        with self.runtime.megatron_calls():
            updated, grad_norm, _ = self.optimizer.step()
            if not updated:
                self._balancing.restore_biases()
            if grad_norm is None:  # left out, or not clipped
                grad_norm = self.optimizer.get_grad_norm()
        if updated:
            self.scheduler.step(increment=1)
        if not math.isfinite(grad_norm) and self.recipe.train.on_nan == "stop":
            raise JobFailed(
                f"the gradient of step {self.scheduler.num_steps} is not finite. No checkpoint was saved"
                " since, so a resume starts from finite weights. Lower optimizer.lr, raise"
                " optimizer.warmup_steps, or set train.on_nan: skip"
            )
        return StepResult(float(grad_norm), float(learning_rate), bool(updated))

    def gather_weights(self) -> None:
        """Make `models` those of the last step on every rank; training itself needs no such call."""
        with self.runtime.megatron_calls():
            optimization.complete_overlapped_param_gather(self.recipe, self.chunks)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Losses:
        """Return the losses of these micro-batches, or of none; nothing that training reads changes."""
        micro_batches = micro_batches or self._build_idle_rank_micro_batches()
        with self._tap.isolate_sums(), self._enter_evaluation():
            self._run(
                micro_batches,
                functools.partial(self._run_loss_forward, self._objective, None),
                forward_only=True,
            )
            return self.take_losses()

    def compute_log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Scores]:
        """Return the log-probability and the entropy of every label, for each micro-batch; MTP is left out.

        Values are whole, in the order that the micro-batch was made from and without padding: concatenated
        [tokens], or [b, s] for rows. Every rank of a model replica returns the same; data-parallel ranks have
        their own micro-batches, or none.
        """
        local_scores: list[Scores] = []
        batches = micro_batches or self._build_idle_rank_micro_batches()
        with self._enter_evaluation():
            self._run(batches, functools.partial(self._run_scoring_forward, local_scores), forward_only=True)
        return collect_scores(batches, local_scores, self.groups, self.device)[: len(micro_batches)]

    def compute_reference_log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of `compute_log_probs` by the reference model.

        The reference is the model without its adapters; without adapters, the copy that `keep_reference`
        made. Raises ValueError where there is neither.
        """
        if self.recipe.model.lora is not None:
            reference = adapters.disable_adapters(self.models)
        elif self._reference is not None:
            self.gather_weights()
            reference = self._reference.swap_in()
        else:
            raise ValueError(
                "reference: a model without adapters has none. Call keep_reference before training."
            )
        with reference:
            return [scores.log_probs for scores in self.compute_log_probs(micro_batches)]

    def keep_reference(self) -> None:
        """Keep a copy of the present weights on the host, for `compute_reference_log_probs`."""
        self._reference = HostReference(self.models)

    def begin_loss_reduction(self) -> None:
        """Exchange the losses that `take_losses` returns next. That call does not wait for later work.

        All ranks call it. A forward pass afterwards makes the exchange void.
        """
        self._tap.begin_reduction()

    def take_losses(self) -> Losses:
        """Return the mean losses of everything run since the last call."""
        return self._tap.take_reduced_losses(self.groups.tp.size)

    def gather_pending_loss_sums(self) -> list[float]:
        """Return the sums that `take_losses` would divide, as plain numbers that a checkpoint can keep."""
        return self._tap.gather_pending_loss_sums()

    def restore_loss_sums(self, numbers: list[float]) -> None:
        """Restore the sums that `gather_pending_loss_sums` returned."""
        self._tap.restore_loss_sums(numbers)

    def _build_idle_rank_micro_batches(self, mean: Mean | None = None) -> list[MicroBatch]:
        return build_blanks(self.recipe, self.groups, self.device, mean or self.recipe.loss_mean)

    @contextmanager
    def _enter_evaluation(self) -> Iterator[None]:
        with self.runtime.megatron_calls(), torch.no_grad():
            for chunk in self.chunks:
                chunk.eval()
            try:
                yield
            finally:
                for chunk in self.chunks:
                    chunk.train()

    def _run(
        self, micro_batches: Sequence[MicroBatch], step: optimization.ForwardStep, *, forward_only: bool
    ) -> None:
        first = micro_batches[0]
        shapes = {(micro_batch.rows, micro_batch.sequence_length) for micro_batch in micro_batches}
        if self.groups.pp.size > 1 and len(shapes) > 1:
            raise JobFailed(
                "Pipeline stages exchange activations of one shape, but these micro-batches have"
                f" {len(shapes)} shapes: pad them to one length (the `length` of Packing.of)."
            )
        with self.replay.replay_micro_batch_routes(micro_batches, has_backward=not forward_only):
            optimization.forward_backward(
                step,
                micro_batches,
                self.chunks,
                sequence_length=first.sequence_length,
                micro_batch_size=first.rows,
                forward_only=forward_only,
            )

    def _run_loss_forward(
        self,
        objective: Objective | None,
        factors: LossFactors | None,
        iterator: Iterator[MicroBatch],
        chunk: torch.nn.Module,
    ) -> tuple[torch.Tensor, Any]:
        micro_batch = next(iterator)
        with self.forward_timer:
            output = self._forward(micro_batch, chunk, objective)

        def compute_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            return self._tap.compute_total(micro_batch, output, factors), micro_batch.learned_tokens, {}

        return output, compute_loss

    def _run_scoring_forward(
        self, local_scores: list[Scores], iterator: Iterator[MicroBatch], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        def keep(_: MicroBatch, scores: Scores) -> torch.Tensor:
            local_scores.append(scores)
            return scores.log_probs

        micro_batch = next(iterator)
        with mtp.disable_mtp(self.models[-1]):
            output = self._forward(micro_batch, chunk, keep)
        return output, lambda output: (output.sum(), micro_batch.learned_tokens, {})

    def _forward(
        self, micro_batch: MicroBatch, chunk: torch.nn.Module, objective: Objective | None
    ) -> torch.Tensor:
        self._tap.set_micro_batch(micro_batch, objective)
        number = self.chunks.index(chunk)
        with (
            self.replay.record_and_replay_forward(number, micro_batch),
            self._balancing.balance_forward(micro_batch),
        ):
            output: torch.Tensor = chunk(
                micro_batch.ids,
                micro_batch.position_ids,
                None,
                labels=micro_batch.labels,
                loss_mask=micro_batch.loss_mask,
                packed_seq_params=micro_batch.packed_seq_params,
                decoder_input=vision.build_multimodal_decoder_input(
                    self.models[number], micro_batch.ids, micro_batch.images
                ),
            )
        return output
