"""Direct preference optimisation (Rafailov et al., 2023): its sigmoid loss, in the place of the main loss.

Sequences come in pairs, the better one first, and a pair is in one micro-batch. The loss of a pair is a
function of four sums over sequences, of which context-parallel ranks have parts: they exchange these sums
alone, and each token then has the loss of its pair as its value and its own share of the gradient.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from bundle.engine.losses import Reduction
from bundle.engine.microbatch import MicroBatch
from bundle.engine.scores import Scores
from bundle.engine.sums import MicroBatchSequenceSums
from bundle.mcore.groups import Groups
from bundle.recipe.recipe import DPO

# What is measured of the pairs beside the loss, as TRL calls it.
PAIR_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def with_reference(micro_batch: MicroBatch, reference: Tensor) -> MicroBatch:
    """Return the micro-batch of pairs with the reference's log-probability [sequences] of each answer.

    MTP layers learn the better answers: their loss is a mean over these.
    """
    better = torch.zeros_like(reference)
    better[::2] = 2  # of a mean over all sequences
    counted = micro_batch.packing.repeat_per_packed_row(better)
    return replace(
        micro_batch,
        reference_log_probs=reference,
        mtp_masks=tuple(mask * counted for mask in micro_batch.mtp_masks),
    )


class PreferenceObjective:
    """The loss -log sigmoid(beta * log-ratio of the better answer - beta * that of the worse one) of pairs.

    An objective for micro-batches whose mean is one over sequences (`with_reference`).
    """

    measures: Mapping[str, Reduction] = MappingProxyType(dict.fromkeys(PAIR_METRICS, "mean"))

    def __init__(self, dpo: DPO, groups: Groups) -> None:
        self._beta, self._smoothing, self._cp = dpo.beta, dpo.label_smoothing, groups.cp

    def __call__(self, micro_batch: MicroBatch, scores: Scores) -> Tensor:
        """Return [1 + PAIR_METRICS, b, s / cp]: for each token the loss of its pair, then its measures."""
        packing, weight, log_probs = micro_batch.packing, micro_batch.loss_mask, scores.log_probs
        assert micro_batch.reference_log_probs is not None, "pairs are made by `paired`"
        sequences, learned = MicroBatchSequenceSums(packing, self._cp), weight > 0
        sums = sequences.sum_token_values(log_probs.detach().float().where(learned, 0))
        chosen, rejected = (self._beta * (sums - micro_batch.reference_log_probs)).view(-1, 2).unbind(1)
        margin = chosen - rejected
        right, wrong = 1 - self._smoothing, self._smoothing
        loss = -right * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
        slope = self._beta * (wrong * margin.sigmoid() - right * (-margin).sigmoid())

        pair_values = torch.stack([loss, chosen, rejected, margin, (margin > 0).to(loss.dtype)])
        values = pair_values[:, sequences.owner // 2]
        # The mean over sequences gives each token its weight, and counts every pair twice.
        slopes = torch.stack([slope, -slope], 1).flatten()[sequences.owner] * 2 / weight.where(learned, 1)
        gradient = slopes * (log_probs - log_probs.detach())
        return torch.cat([(values[0] + gradient)[None], values[1:]])
