"""Weights that correct for a rollout engine whose probabilities are not quite those of the trainer.

w is exp(old - rollout) of a token, of an answer (the sum of its tokens), or of the mean over an answer.
Truncated importance sampling multiplies the loss by min(w, high). Masking multiplies it by w within
[low, high], and by 0 outside: IcePop for tokens, MIS for answers. A weight has no gradient. Tokens of
weight 0 still count in means.

Sources: Yao et al. 2025 (TIS); arXiv 2512.23075; verl's rollout_corr.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bundle.engine.sums import MicroBatchSequenceSums

# Log-ratios are clamped to this before exp: e^20 is 4.9e8.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Correction:
    """How the loss is corrected; `low` is for masking alone.

    `level` geometric is a mask alone: a token of an answer within the bounds has weight 1. An answer in which
    a token has exp(old - rollout) < `veto` has weight 0. Raises ValueError for settings that contradict.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"correction: bounds {self.low}, {self.high} are invalid. Set 0 <= low < high.")
        if self.kind == "truncate" and self.low:
            raise ValueError(f"correction.low: {self.low} is for masking. Set it to 0, or kind to mask.")
        if self.kind == "truncate" and self.level == "geometric":
            raise ValueError("correction.level: geometric is for masking only. Set kind to mask.")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(
                f"correction.veto: {self.veto} is not between 0 and 1. Leave it out for no veto."
            )

    @property
    def needs_sequences(self) -> bool:
        """True if the weights need sums over whole answers."""
        return self.level != "token" or self.veto is not None


class CorrectionWeights(NamedTuple):
    """For each token [b, s / cp] the weight of its loss, and whether it is out of bounds or vetoed."""

    weight: Tensor
    is_clipped: Tensor
    is_vetoed: Tensor


def compute_weights(
    correction: Correction, difference: Tensor, is_learned: Tensor, sequences: MicroBatchSequenceSums | None
) -> CorrectionWeights:
    """Return the weights for `difference` = old - rollout log-probabilities [b, s / cp].

    It has no gradient, and is 0 where nothing is learned.

    Every context-parallel rank calls it alike: `sequences` adds up over them.
    """
    log_ratio, is_vetoed = difference, torch.zeros_like(is_learned)
    if correction.needs_sequences:
        assert sequences is not None, "sums over answers are needed"
        veto = -math.inf if correction.veto is None else math.log(correction.veto)
        is_low = (difference < veto).to(difference.dtype)
        sums, counts, vetoes = sequences.sum_token_values(
            torch.stack([difference, is_learned.to(difference.dtype), is_low])
        )
        is_vetoed = sequences.spread(vetoes > 0) & is_learned
        if correction.level != "token":
            divisor = counts.clamp(min=1) if correction.level == "geometric" else 1.0
            log_ratio = sequences.spread(sums / divisor)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if correction.kind == "truncate":
        is_clipped, weight = ratio > correction.high, ratio.clamp(max=correction.high)
    else:
        is_clipped = (ratio < correction.low) | (ratio > correction.high)
        weight = torch.ones_like(ratio) if correction.level == "geometric" else ratio
        weight = weight.masked_fill(is_clipped, 0.0)
    return CorrectionWeights(weight.masked_fill(is_vetoed, 0.0), is_clipped, is_vetoed)
