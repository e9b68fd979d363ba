"""The loss of a micro-batch: the main loss, or an objective in its place, and the loss of every MTP depth.

Megatron calls `GPTModel.compute_language_model_loss` for the main labels and once per MTP depth, in every
release. The tap tells the two apart by the identity of the labels and sums the losses itself, with masks that
were rolled before the batch was cut for context parallel. Megatron is handed the MTP losses without their
gradient: what it would divide them by differs between releases and context-parallel ranks. Here every loss,
of any depth, is divided by the same number: the tokens, or sequences, of the main loss in the whole step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.engine.microbatch import MicroBatch
from bundle.engine.scores import Head, Scores, mask_padding, score_labels
from bundle.mcore.gpt import bypass_head_and_report_weight
from bundle.mcore.groups import Groups, get_dp_cp_group
from bundle.recipe.loss_chunks import LossChunks
from bundle.transfers import HostCopy, copy_to_device

if TYPE_CHECKING:
    from bundle.backends import AddGradient


def collect_scores(
    micro_batches: Sequence[MicroBatch], local_scores: Sequence[Scores], groups: Groups, device: torch.device
) -> list[Scores]:
    """Return micro-batches' scores in original order (`MicroBatch.join_gathered_shards`), on every rank.

    `local_scores` are this rank's, [b, s / cp] each; empty on stages without a head. It takes two collectives
    for any number of micro-batches: the context-parallel ranks exchange their parts, and the last stage
    sends them to the others.
    """
    sizes = [micro_batch.ids.numel() for micro_batch in micro_batches]
    gathered = torch.empty(groups.cp.size * 2, sum(sizes), device=device)
    if local_scores:
        parts = [torch.stack((scores.log_probs, scores.entropy)).flatten(1) for scores in local_scores]
        dist.all_gather_into_tensor(gathered, torch.cat(parts, 1), group=groups.cp.group)
    if groups.pp.size > 1:
        last = dist.get_global_rank(groups.pp.group, groups.pp.size - 1)
        dist.broadcast(gathered, last, group=groups.pp.group)

    collected = []
    for micro_batch, part in zip(micro_batches, gathered.split(sizes, -1), strict=True):
        rows, columns = micro_batch.ids.shape
        log_probs, entropy = part.unflatten(0, (-1, 2)).unbind(1)
        shape = groups.cp.size * rows, columns
        collected.append(
            Scores(
                micro_batch.join_gathered_shards(log_probs.reshape(shape)),
                micro_batch.join_gathered_shards(entropy.reshape(shape)),
            )
        )
    return collected


# Takes scores where the head is; returns each token's loss [b, s / cp] before weights, masks and division,
# or with an attribute `measures` ({name: reduction}) [1 + measures, b, s / cp]: the loss, then the measures.
Objective = Callable[[MicroBatch, Scores], Tensor]
# A mean is weighted as the main loss is; a maximum is over the tokens whose weight is above 0.
Reduction = Literal["mean", "maximum"]


@dataclass(frozen=True)
class Losses:
    """Mean losses over all tokens (or all sequences) of all ranks, in nats per token (or per pair).

    `measures` are what objectives measured beside their losses, each by its reduction.
    """

    main: float
    mtp: tuple[float, ...]
    tokens: int
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossFactors:
    """What sums are multiplied by that megatron divides by the learned tokens of the step; None: by 1.

    Float32 scalars: of the main loss, of the MTP losses, and of the balancing loss of routers.
    """

    main: Tensor | None
    mtp: Tensor | None
    balancing: Tensor | None


def compute_factors(
    micro_batches: Sequence[MicroBatch], balanced: int | None, divisor: float | None = None
) -> LossFactors:
    """Return the factors for a mean over tokens or sequences, as the micro-batches were built.

    `divisor` divides the sum of the main loss over all ranks in the place of their tokens; MTP losses stay
    means. `balanced` counts this rank's tokens that routers balance. One exchange among data- and
    context-parallel ranks for all. Raises ValueError for a divisor beside sequence weights, or not above 0.
    """
    sequences = [one.learned_sequences for one in micro_batches if one.learned_sequences is not None]
    learned = torch.stack([one.learned_tokens for one in micro_batches]).sum()
    means = (
        torch.stack(sequences).sum() if sequences else None,
        None if balanced is None else copy_to_device(torch.tensor(balanced), learned.device),
    )
    if divisor is not None and sequences:
        raise ValueError("divisor: not allowed with means per sequence. Use mean=token.")
    if divisor is not None and not 0 < divisor < math.inf:
        raise ValueError(
            f"divisor: {divisor} is not a number above 0. Set it to the number of answers times a length."
        )
    counted = [count for count in means if count is not None]
    if not counted and divisor is None:
        return LossFactors(None, None, None)
    counts = torch.stack([learned, *counted]).float()
    dist.all_reduce(counts, group=get_dp_cp_group())
    ratios = iter(counts[0] / counts[1:].clamp(min=1))
    by_sequence, by_balanced = (None if count is None else next(ratios) for count in means)
    main = by_sequence if divisor is None else counts[0] / divisor
    return LossFactors(main, by_sequence, by_balanced)


class MeasureSums:
    """The measures of one objective, added up on the device."""

    def __init__(self, reductions: Mapping[str, Reduction], device: torch.device) -> None:
        self.reductions = dict(reductions)
        self._is_maximum = torch.tensor(
            [False, *(kind == "maximum" for kind in self.reductions.values())], device=device
        )
        self.values = self._build_neutral_values()  # [weight, measures...]

    def add(self, measures: Tensor, weights: Tensor) -> None:
        """Add the measures [measures, b, s] of tokens with these weights [b, s]."""
        flat, weights = measures.detach().float().flatten(1), weights.flatten()
        is_learned, is_maximum = weights > 0, self._is_maximum[1:, None]
        neutral = torch.where(is_maximum, -torch.inf, 0.0)
        flat = torch.where(is_learned, torch.where(is_maximum, flat, flat * weights), neutral)
        values = torch.where(is_maximum.squeeze(1), flat.amax(1), flat.sum(1))
        values = torch.cat([weights.sum()[None], values]).double()
        self.values = torch.where(self._is_maximum, self.values.maximum(values), self.values + values)

    def combine_rank_values(self, ranks: Tensor) -> list[float]:
        """Return one number for each value of all ranks [ranks, 1 + measures], on the host."""
        reduced: list[float] = torch.where(self._is_maximum.cpu(), ranks.amax(0), ranks.sum(0)).tolist()
        return reduced

    def finish(self, numbers: Sequence[float]) -> dict[str, float]:
        """Return each measure from the reduced numbers; one without a learned token is not a number."""
        weight, *values = numbers
        if not weight:
            return dict.fromkeys(self.reductions, float("nan"))
        pairs = zip(self.reductions.items(), values, strict=True)
        return {name: value if kind == "maximum" else value / weight for (name, kind), value in pairs}

    def clear(self) -> None:
        """Forget what was added."""
        self.values = self._build_neutral_values()

    def _build_neutral_values(self) -> Tensor:
        return torch.where(self._is_maximum, -torch.inf, 0.0).double()


class ModelLossComputer:
    """Computes the losses where the head is, and adds up [tokens, weights.., sums..] and measures of all."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        depths: int,
        mtp_loss_scale: float,
        vocabulary: int,
        chunks: LossChunks | None,
        tp_group: dist.ProcessGroup,
        device: torch.device,
        measures: Mapping[str, Reduction] | None = None,
        add_gradient: "AddGradient | None" = None,
    ) -> None:
        """`model` is the bare GPTModel; on stages without a head the sums stay zero.

        `vocabulary` is the number of tokens that there are, without padding; `mtp_loss_scale` the weight of
        the MTP losses in the total, shared by the `depths`; `chunks` tells how the loss takes tokens, None
        for all at once; `measures` are those of the engine's own objective, of which alone a checkpoint
        knows; `add_gradient` is that of `Head`.
        """
        self._depths, self._tp_group, self._vocabulary = depths, tp_group, vocabulary
        self._add_gradient = add_gradient
        self._totals = torch.zeros(3 + 2 * depths, dtype=torch.float64, device=device)
        self._engine_measures = MeasureSums(measures, device) if measures else None
        self._measures = [self._engine_measures] if self._engine_measures else []
        self._scales = torch.tensor([1.0, *[mtp_loss_scale / max(1, depths)] * depths], device=device)
        self._micro_batch: MicroBatch | None = None
        self._objective: Objective | None = None
        self._labels: Tensor | None = None
        self._mtp_sums: list[Tensor] = []
        self._gathered: HostCopy | None = None  # the totals of all ranks, if they were gathered already
        self._head: Head | None = None
        self._original = model.compute_language_model_loss
        if model.post_process:
            model.compute_language_model_loss = self._compute_objective_or_cross_entropy
            model.register_forward_pre_hook(self._record_labels, with_kwargs=True)
            if chunks is not None:
                bypass_head_and_report_weight(model, lambda weight: self._set_head(weight, chunks))

    def set_micro_batch(self, micro_batch: MicroBatch, objective: Objective | None) -> None:
        """Set the micro-batch that the model runs next, and its main loss (None: the model's own)."""
        self._micro_batch, self._objective = micro_batch, objective
        self._ensure_measure_sums(objective)  # on all ranks alike, with a head or without

    def compute_total(
        self, micro_batch: MicroBatch, output: Tensor, factors: LossFactors | None = None
    ) -> Tensor:
        """Return the loss to differentiate, summed over this rank's tokens; the model returned `output`."""
        # A masked token has no part, whatever an objective returned for it.
        learned = torch.where(micro_batch.loss_mask > 0, output.float(), 0.0)
        sums = torch.stack([(learned * micro_batch.loss_mask).sum(), *self._mtp_sums])
        self._mtp_sums = []
        self._totals += torch.cat([micro_batch.token_count_and_weight_sums, sums.detach()])
        if factors is None:
            return sums @ self._scales
        both = (factors.main, *[factors.mtp] * self._depths)
        return sums @ torch.stack(
            [
                scale if factor is None else scale * factor
                for scale, factor in zip(self._scales, both, strict=True)
            ]
        )

    def begin_reduction(self) -> None:
        """Gather the sums of ALL ranks for the next read (every rank must call it)."""
        # Gathered and added up on the host: HCCL moves float64 and reduces none of it.
        mine = torch.cat([self._totals, *(sums.values for sums in self._measures)])
        ranks = mine.new_empty(dist.get_world_size() * len(mine))
        dist.all_gather_into_tensor(ranks, mine)
        self._gathered = HostCopy(ranks)

    def discard_reduction(self) -> None:
        """Forget what `begin_reduction` gathered, because the sums change."""
        self._gathered = None

    def take_reduced_losses(self, tp_size: int) -> Losses:
        """Return the losses since the last call, reduced over ALL ranks (every rank must call it)."""
        (tokens, *rest), measured = self._reduce_totals_over_all_ranks()
        self._reset_accumulated_sums()
        count = 1 + self._depths
        pairs = zip(rest[:count], rest[count:], strict=True)
        means = [total / weight if weight else float("nan") for weight, total in pairs]
        measures: dict[str, float] = {}
        for sums, numbers in zip(self._measures, measured, strict=True):
            if numbers[0]:  # an objective that had no part is not reported
                measures |= sums.finish(numbers)
        return Losses(means[0], tuple(means[1:]), round(tokens / tp_size), measures)

    def gather_pending_loss_sums(self) -> list[float]:
        """Return the sums since the last `take_reduced_losses`, over ALL ranks (every rank must call it).

        The measures are those of the engine's own objective alone. Infinite sums become NaN, as a checkpoint
        has no infinity: above all a maximum without a token.
        """
        totals, measured = self._reduce_totals_over_all_ranks()
        numbers = [*totals, *(measured[0] if self._engine_measures else ())]
        return [number if math.isfinite(number) else float("nan") for number in numbers]

    def restore_loss_sums(self, numbers: list[float]) -> None:
        """Restore the sums that `gather_pending_loss_sums` returned; rank 0 keeps those of all ranks."""
        if dist.get_rank() != 0:
            return
        values = torch.tensor(numbers, dtype=torch.float64, device=self._totals.device)
        totals, measured = values.split([len(self._totals), len(values) - len(self._totals)])
        self._totals += totals
        if self._engine_measures and len(measured) and measured[0] > 0:  # else there was no token
            self._engine_measures.values = measured

    @contextmanager
    def isolate_sums(self) -> Iterator[None]:
        """Sum from zero inside the context, and restore the earlier sums after it."""
        before, measured = self._totals.clone(), [sums.values for sums in self._measures]
        self.discard_reduction()
        self._reset_accumulated_sums()
        try:
            yield
        finally:
            self.discard_reduction()
            self._reset_accumulated_sums()
            self._totals.copy_(before)
            for sums, values in zip(self._measures, measured, strict=False):
                sums.values = values

    def _reset_accumulated_sums(self) -> None:
        self._totals.zero_()
        for sums in self._measures:
            sums.clear()

    def _ensure_measure_sums(self, objective: Objective | None) -> MeasureSums | None:
        """Return where the measures of an objective are added up; None for one without measures."""
        reductions = dict(getattr(objective, "measures", None) or {})
        if not reductions:
            return None
        for sums in self._measures:
            if list(sums.reductions.items()) == list(reductions.items()):  # in the order of the stack
                return sums
        self._measures.append(MeasureSums(reductions, self._totals.device))
        return self._measures[-1]

    def _reduce_totals_over_all_ranks(self) -> tuple[list[float], list[list[float]]]:
        """Return the totals and each objective's measures over ALL ranks (every rank must call it)."""
        if self._gathered is None:
            self.begin_reduction()
        assert self._gathered is not None
        lengths = [len(self._totals), *(len(sums.values) for sums in self._measures)]
        totals, *measured = self._gathered.read().view(-1, sum(lengths)).split(lengths, 1)
        self._gathered = None
        pairs = zip(self._measures, measured, strict=True)
        return totals.sum(0).tolist(), [sums.combine_rank_values(values) for sums, values in pairs]

    def _record_labels(
        self, _module: torch.nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self._labels, self._mtp_sums = keywords["labels"], []

    def _compute_objective_or_cross_entropy(self, labels: Tensor, states: Tensor) -> Tensor:
        """Return the loss of each token [b, s], from `labels` [b, s] and what the head returned.

        These are the logits [s, b, vocabulary / tp], or the head's input [s, b, h] where it is deferred.
        """
        micro_batch = self._micro_batch
        assert micro_batch is not None, "expect() comes before the model's forward"
        if self._head is None:
            mask_padding(states, self._count_unpadded_local_logits(states.shape[-1]))
        if labels is self._labels:
            labels, factor = self._compute_labels_and_nan_factor(labels, micro_batch.loss_mask)
            if self._objective is None or micro_batch.is_blank:
                return self._compute_cross_entropy(labels, states) * factor
            scores = self._score(labels, states, micro_batch.temperature)
            result = self._objective(micro_batch, Scores(scores.log_probs * factor, scores.entropy * factor))
            sums = self._ensure_measure_sums(self._objective)
            if sums is None:
                return result
            sums.add(result[1:], micro_batch.loss_mask)
            return result[0]
        mask = micro_batch.mtp_masks[len(self._mtp_sums)]
        labels, factor = self._compute_labels_and_nan_factor(labels, mask)
        loss = self._compute_cross_entropy(labels, states) * factor
        self._mtp_sums.append((loss.float() * mask).sum())
        return loss.detach()

    def _compute_cross_entropy(self, labels: Tensor, states: Tensor) -> Tensor:
        """Return the model's own loss of each token [b, s]."""
        loss: Tensor = (
            self._original(labels, states) if self._head is None else -self._score(labels, states).log_probs
        )
        return loss

    def _score(self, labels: Tensor, states: Tensor, temperature: Tensor | None = None) -> Scores:
        return score_labels(states, labels, self._tp_group, temperature, self._head)

    def _set_head(self, weight: Tensor, chunks: LossChunks) -> None:
        limit = self._count_unpadded_local_logits(weight.shape[0])
        self._head = Head(weight, chunks.size, limit, self._add_gradient, chunks.kept_tokens)

    def _count_unpadded_local_logits(self, width: int) -> int:
        """Return how many of this rank's `width` logits are of the vocabulary, and not padding."""
        rank: int = self._tp_group.rank()
        return max(0, self._vocabulary - width * rank)

    def _compute_labels_and_nan_factor(self, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels, with 0 where one is not a token, and a factor for each loss.

        The factor is 1, or NaN where an unknown label would have a loss, or for the whole micro-batch where
        an id is not a token. Without the factor such a label is scored as another token, and such an id is
        embedded as nothing where ranks share the vocabulary. Nothing is read back from the device.
        """
        assert self._micro_batch is not None
        known, ids_known = self._is_token(labels), self._is_token(self._micro_batch.ids)
        made_up = (~known & (mask > 0)) | ~ids_known.all()
        return labels.where(known, 0), torch.where(made_up, float("nan"), 1.0)

    def _is_token(self, ids: Tensor) -> Tensor:
        """Return a mask of the ids that are tokens."""
        return (ids >= 0) & (ids < self._vocabulary)
