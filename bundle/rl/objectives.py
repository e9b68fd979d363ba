"""Losses of a policy, in the place of the main loss: PPO's clip, GSPO, CISPO, with KL, entropy, corrections.

r = exp(log p - log p_old), A the advantage; everything is minimised. The engine masks, weights and divides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from bundle.engine.losses import Reduction
from bundle.engine.microbatch import MicroBatch
from bundle.engine.scores import Scores
from bundle.engine.sums import MicroBatchSequenceSums
from bundle.mcore.groups import Groups
from bundle.rl.corrections import LOG_RATIO_LIMIT, Correction, compute_weights


@dataclass(frozen=True)
class PolicyLossSettings:
    """The settings of a policy's loss.

    `clip` are the distances (low, high) of the bounds of r from 1; a low of 1 is no lower bound. `dual_clip`
    c bounds the loss of a negative advantage by -c * A (arXiv 1912.09729). `entropy` is the coefficient of
    the entropy bonus [nats], `kl` that of the KL divergence from the reference, estimated by `kl_kind`:
    with d = log p - log p_reference, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d. Raises ValueError for values
    out of range.
    """

    kind: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    entropy: float = 0.0
    kl: float = 0.0
    kl_kind: Literal["k2", "k3"] = "k2"
    correction: Correction | None = None

    def __post_init__(self) -> None:
        low, high = self.clip
        if not (0 <= low <= 1 and high >= 0):
            raise ValueError(f"clip: {self.clip} is not two numbers of 0 or more, the first at most 1.")
        if self.dual_clip is not None and not (self.dual_clip > 1 and self.kind != "cispo"):
            raise ValueError(f"dual_clip: {self.dual_clip} is not above 1, or kind is cispo. Leave it out.")
        for name in ("entropy", "kl"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0. Use 0 or more.")


class PolicyObjective:
    """The loss of a policy, for `Engine.forward_backward`.

    Reads `MicroBatch.extra_tensors`: advantages, old_log_probs; with a KL coefficient reference_log_probs;
    rollout_log_probs where the old ones are not the rollout's, which a correction needs. GSPO needs
    micro-batches whose mean is over sequences.

    Measures: `clip_fraction/low` and `/high`, the tokens whose gradient the clip removes (CISPO: bounds);
    `clip_fraction/dual`; `approx_kl`, k3 of the old policy against this one; `ratio/max`, the largest r;
    `entropy` [nats]; `kl` from the reference. `mismatch/k3`, `mismatch/log_prob_difference` (its mean amount)
    and `mismatch/max_log_prob_difference` [nats] are of the old log-probabilities against the rollout's; of
    the policy against them where there is but one kind.
    `correction/weight`, `/square` (of the weight), `/clip_fraction`, `/veto_fraction`.
    """

    def __init__(self, settings: PolicyLossSettings, groups: Groups) -> None:
        self._settings, self._cp = settings, groups.cp
        self.measures: Mapping[str, Reduction] = _list_measures(settings)

    def __call__(self, micro_batch: MicroBatch, scores: Scores) -> Tensor:
        """Return the loss and the measures of each token, [1 + measures, b, s / cp].

        Raises ValueError for values that a micro-batch lacks, and for GSPO with a mean over tokens.
        """
        settings, is_learned = self._settings, micro_batch.loss_mask > 0
        self._check_micro_batch(micro_batch)
        # Selected before anything is computed, as the values are: a masked position may hold anything.
        values = micro_batch.extra_tensors
        log_probs, entropy = scores.log_probs.where(is_learned, 0), scores.entropy.where(is_learned, 0)
        advantages, old = values["advantages"], values["old_log_probs"]
        sequences = self._build_sums(micro_batch)

        change = log_probs - old
        ratio = self._compute_ratio(change, is_learned, sequences)
        loss, measures = self._compute_policy_loss(ratio, log_probs, advantages)
        current = change.detach()
        measures["approx_kl"] = _estimate_k3(-current)
        measures["ratio/max"] = ratio.detach()
        measures["entropy"] = entropy.detach()

        mismatch = old - values["rollout_log_probs"] if "rollout_log_probs" in values else current
        measures["mismatch/k3"] = _estimate_k3(-mismatch)
        measures["mismatch/log_prob_difference"] = mismatch.abs()
        measures["mismatch/max_log_prob_difference"] = mismatch.abs()
        if settings.correction:
            correction = compute_weights(settings.correction, mismatch, is_learned, sequences)
            loss = loss * correction.weight
            measures["correction/weight"] = correction.weight
            measures["correction/square"] = correction.weight.square()
            measures["correction/clip_fraction"] = correction.is_clipped
            measures["correction/veto_fraction"] = correction.is_vetoed

        if settings.entropy:
            loss = loss - settings.entropy * entropy
        if settings.kl:
            distance = log_probs - values["reference_log_probs"]
            kl = distance.square() / 2 if settings.kl_kind == "k2" else _estimate_k3(distance)
            loss = loss + settings.kl * kl
            measures["kl"] = kl.detach()
        return torch.stack([loss, *(measures[name].to(loss.dtype) for name in self.measures)])

    def _check_micro_batch(self, micro_batch: MicroBatch) -> None:
        names = ["advantages", "old_log_probs"]
        names += ["reference_log_probs"] if self._settings.kl else []
        names += ["rollout_log_probs"] if self._settings.correction else []
        missing = [name for name in names if name not in micro_batch.extra_tensors]
        if missing:
            raise ValueError(f"extra_tensors: {', '.join(missing)} are missing. Give them to from_packing.")
        if self._settings.kind == "gspo" and micro_batch.learned_sequences is None:
            raise ValueError("mean: token is not allowed with GSPO. Build micro-batches with mean=sequence.")

    def _build_sums(self, micro_batch: MicroBatch) -> MicroBatchSequenceSums | None:
        correction = self._settings.correction
        if self._settings.kind == "gspo" or (correction and correction.needs_sequences):
            return MicroBatchSequenceSums(micro_batch.packing, self._cp)
        return None

    def _compute_ratio(
        self, change: Tensor, is_learned: Tensor, sequences: MicroBatchSequenceSums | None
    ) -> Tensor:
        """Return r of each token; with GSPO that of its sequence, the gradient being the token's share.

        GSPO: arXiv 2507.18071, in its form for tokens, exp(log p - sg log p + sg log s).
        """
        if self._settings.kind != "gspo":
            return change.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        assert sequences is not None
        sums, counts = sequences.sum_token_values(torch.stack([change, is_learned.to(change.dtype)]))
        mean = sequences.spread(sums / counts.clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (change - change.detach() + mean).exp()

    def _compute_policy_loss(
        self, ratio: Tensor, log_probs: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token and the measures of its clip (PPO: arXiv 1707.06347)."""
        settings = self._settings
        low, high = 1 - settings.clip[0], 1 + settings.clip[1]
        clipped_ratio = ratio.clamp(low, high)
        if settings.kind == "cispo":  # arXiv 2506.13585
            measures = {"clip_fraction/low": ratio < low, "clip_fraction/high": ratio > high}
            return -clipped_ratio.detach() * advantages * log_probs, measures
        loss = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)
        measures = {
            "clip_fraction/low": (ratio < low) & (advantages < 0),
            "clip_fraction/high": (ratio > high) & (advantages > 0),
        }
        if settings.dual_clip is not None:
            limit = -settings.dual_clip * advantages
            is_dual = (advantages < 0) & (loss.detach() > limit)
            measures["clip_fraction/dual"] = is_dual
            loss = limit.where(is_dual, loss)
        return loss, measures


def _estimate_k3(distance: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, exact for small d: the gates on it are below float32's step at 1."""
    distance = distance.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-distance) + distance


def _list_measures(settings: PolicyLossSettings) -> Mapping[str, Reduction]:
    measures: dict[str, Reduction] = {
        "clip_fraction/low": "mean",
        "clip_fraction/high": "mean",
        "approx_kl": "mean",
        "ratio/max": "maximum",
        "entropy": "mean",
        "mismatch/k3": "mean",
        "mismatch/log_prob_difference": "mean",
        "mismatch/max_log_prob_difference": "maximum",
    }
    if settings.dual_clip is not None:
        measures["clip_fraction/dual"] = "mean"
    if settings.kl:
        measures["kl"] = "mean"
    if settings.correction:
        names = ("weight", "square", "clip_fraction", "veto_fraction")
        measures |= {f"correction/{name}": "mean" for name in names}
    return MappingProxyType(measures)
