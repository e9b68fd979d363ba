"""Advantages of answers from their rewards, in float64 on the host.

A group is all answers to one question. A call takes all answers of a step, of all ranks: a mean or a variance
over a part of them is another number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
FloatT = TypeVar("FloatT", bound=np.floating[Any])
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Added to a standard deviation, as GRPO does, and to a variance, as whitening does.
STD_EPSILON, VARIANCE_EPSILON = 1e-6, 1e-8


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step's answers; 0 for an answer that has no part in the loss.

    `values` [answers] are the means over the tokens of each answer, `tokens` the advantages [length] of its
    tokens, perhaps a read-only view. `is_learned` [answers] says which answers have a part in the loss.
    `flat_groups` were dropped because all their rewards are equal, `small_groups` because fewer than two
    answers have a reward. `truncated_answers` counts the answers that reached the length limit.
    """

    values: Floats
    tokens: tuple[Floats, ...]
    is_learned: Bools
    flat_groups: tuple[int, ...]
    small_groups: tuple[int, ...]
    truncated_answers: int


def compute_advantages(
    kind: AdvantageKind,
    rewards: ArrayLike,
    groups: ArrayLike,
    lengths: Sequence[int],
    *,
    penalties: Sequence[Floats] | None = None,
    discount: float = 1.0,
    is_truncated: ArrayLike | None = None,
    mask_truncated: bool = False,
) -> Advantages:
    """Return the advantages of all answers of a step.

    `rewards` [answers] has NaN for an answer without a verdict; that answer has no part in anything.
    `groups` [answers] numbers the questions, `lengths` counts the tokens of each answer. `penalties` are
    subtracted from the reward of each token (`compute_kl_penalties`); a group method sums them up. `discount`
    is that of the returns of REINFORCE++. With `mask_truncated` truncated answers count in the mean of their
    group, and are not learned.

    A group is flat if its rewards, without penalties, are exactly equal. REINFORCE++ has no baseline of
    groups and learns from flat ones.

    Raises ValueError for sizes that differ and for an infinite reward. Sources: GRPO arXiv 2402.03300 (with
    the standard deviation of a sample, n - 1), Dr.GRPO 2503.20783, RLOO 2402.14740, REINFORCE++ 2501.03262.
    """
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    sizes = np.asarray(lengths, np.int64)
    truncated = np.zeros(len(rewards), np.bool_) if is_truncated is None else np.asarray(is_truncated, bool)
    _check_sizes_and_rewards(rewards, groups, sizes, truncated, penalties)

    is_judged = ~np.isnan(rewards)
    numbers, owner = np.unique(groups, return_inverse=True)
    counts = np.bincount(owner[is_judged], minlength=len(numbers))
    is_small = counts < 2
    is_flat = ~is_small & _find_flat_groups(rewards, owner, is_judged, len(numbers))
    is_dropped = is_small if kind == "reinforce_plus_plus" else is_small | is_flat
    has_part = is_judged & ~is_dropped[owner]
    is_learned = has_part & (sizes > 0) & ~(truncated & mask_truncated)

    if kind == "reinforce_plus_plus":
        tokens = [
            _compute_returns(rewards[i], int(sizes[i]), None if penalties is None else penalties[i], discount)
            if is_learned[i]
            else np.zeros(0)
            for i in range(len(rewards))
        ]
    else:
        totals = rewards if penalties is None else rewards - np.array([one.sum() for one in penalties])
        values = _compare_in_groups(kind, totals, owner, has_part, len(numbers))
        tokens = split_by_answer(np.repeat(values, sizes), sizes)
    if kind.startswith("reinforce"):
        tokens = _whiten(tokens, is_learned)
    blanks = split_by_answer(np.zeros(sizes.sum()), sizes)
    tokens = [
        one if has_loss else blank for one, has_loss, blank in zip(tokens, is_learned, blanks, strict=True)
    ]
    flat, owners = np.concatenate([np.zeros(0), *tokens]), np.repeat(np.arange(len(sizes)), sizes)
    return Advantages(
        values=np.bincount(owners, flat, minlength=len(sizes)) / np.maximum(sizes, 1),
        tokens=tuple(tokens),
        is_learned=is_learned,
        flat_groups=tuple(numbers[is_flat & is_dropped].tolist()),
        small_groups=tuple(numbers[is_small].tolist()),
        truncated_answers=int(truncated.sum()),
    )


def compute_kl_penalties(
    log_probs: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]], coefficient: float
) -> list[Floats]:
    """Return for each token the KL penalty coefficient * (log p - log p_reference), the estimator k1.

    It belongs into the reward: as a loss its expected gradient is 0. Raises ValueError for other lengths.
    """
    return [
        coefficient * np.subtract(policy, other, dtype=np.float64)
        for policy, other in zip(log_probs, reference, strict=True)
        if _has_same_shape_or_raise(policy, other)
    ]


def compute_overlong_reward_terms(lengths: ArrayLike, longest: int, buffer: int) -> Floats:
    """Return what is added to the reward of long answers, [answers] in [-1, 0] (DAPO, arXiv 2503.14476).

    0 up to `longest` - `buffer` tokens, from there falling to -1 at `longest`, and -1 beyond. Raises
    ValueError for a buffer outside 1 .. longest.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"buffer: {buffer} is not from 1 to {longest}. Set it below the longest answer.")
    excess = np.asarray(lengths, np.float64) - (longest - buffer)
    return -np.clip(excess / buffer, 0, 1)


def _has_same_shape_or_raise(policy: NDArray[Any], other: NDArray[Any]) -> bool:
    if policy.shape != other.shape:
        raise ValueError(f"log_probs: shape {policy.shape} differs from the reference's, {other.shape}.")
    return True


def _check_sizes_and_rewards(
    rewards: Floats,
    groups: NDArray[Any],
    lengths: NDArray[np.int64],
    truncated: Bools,
    penalties: Sequence[Floats] | None,
) -> None:
    count = (len(rewards),)
    for name, values in (("groups", groups), ("lengths", lengths), ("is_truncated", truncated)):
        if values.shape != count:
            raise ValueError(f"{name}: shape {values.shape} differs from the rewards' shape, {count}.")
    if np.isinf(rewards).any():
        raise ValueError("rewards: a reward is infinite. Use NaN for an answer without a verdict.")
    if penalties is not None and [len(one) for one in penalties] != lengths.tolist():
        raise ValueError("penalties: their lengths differ from those of the answers.")


def _find_flat_groups(rewards: Floats, owner: NDArray[np.intp], is_judged: Bools, count: int) -> Bools:
    """Return for each group whether the rewards of its judged answers are exactly equal."""
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(lowest, owner[is_judged], rewards[is_judged])
    np.maximum.at(highest, owner[is_judged], rewards[is_judged])
    is_flat: Bools = lowest == highest
    return is_flat


def _compare_in_groups(
    kind: AdvantageKind, totals: Floats, owner: NDArray[np.intp], has_part: Bools, count: int
) -> Floats:
    """Return each answer's total [answers] against the others of its group; 0 without a part."""

    def sum_by_group(values: Floats) -> Floats:
        return np.bincount(owner[has_part], values[has_part], minlength=count).astype(np.float64)

    counts = np.maximum(
        sum_by_group(np.ones_like(totals)), 2
    )  # a group that has a part has two answers at least
    centred = np.where(has_part, totals - (sum_by_group(totals) / counts)[owner], 0.0)
    if kind == "grpo":
        deviation = np.sqrt(sum_by_group(centred**2) / (counts - 1))
        centred /= (deviation + STD_EPSILON)[owner]
    if kind == "rloo":  # the mean of the others is as far as this from the reward
        centred *= (counts / (counts - 1))[owner]
    return centred


def split_by_answer(values: NDArray[FloatT], sizes: NDArray[np.int64]) -> list[NDArray[FloatT]]:
    """Return for each answer its values [size] of values [tokens]."""
    ends = np.cumsum(sizes).tolist()
    return [values[start:end] for start, end in pairwise((0, *ends))]


def _compute_returns(reward: float, length: int, penalty: Floats | None, discount: float) -> Floats:
    """Return for each token [length] the discounted sum of what follows; the reward is the last token's."""
    steps = np.zeros(length) if penalty is None else -np.asarray(penalty, np.float64)
    steps[-1] += reward
    if discount == 1:
        return np.cumsum(steps[::-1])[::-1]
    sums = accumulate(steps[::-1].tolist(), lambda later, step: step + discount * later)
    return np.array(list(sums))[::-1]


def _whiten(tokens: Sequence[Floats], is_learned: Bools) -> list[Floats]:
    """Return the values less their mean over all learned tokens, divided by their standard deviation."""
    learned = [one for one, has_part in zip(tokens, is_learned, strict=True) if has_part]
    if not learned:
        return list(tokens)
    values = np.concatenate(learned)
    mean = values.mean()
    # One token has no variance of a sample, and differs from nothing.
    variance = ((values - mean) ** 2).sum() / max(1, len(values) - 1)
    return [(one - mean) / np.sqrt(variance + VARIANCE_EPSILON) for one in tokens]
