"""Advantages against their formulas over plain lists of float64 tensors, a group and a token at a time."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies

from bundle.rl.advantages import (
    AdvantageKind,
    compute_advantages,
    compute_kl_penalties,
    compute_overlong_reward_terms,
)

KINDS: tuple[AdvantageKind, ...] = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)


def reference(
    kind: str,
    rewards: list[float],
    groups: list[int],
    lengths: list[int],
    penalties: list[list[float]],
    discount: float,
    hidden: list[bool],
) -> list[list[float]]:
    """The advantage of each token of each answer; 0 without a part in the loss."""
    result = [[0.0] * n for n in lengths]
    learned = []
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and not math.isnan(rewards[i])]
        if len(members) < 2 or (kind != "reinforce_plus_plus" and len({rewards[i] for i in members}) == 1):
            continue
        totals = torch.tensor([rewards[i] - sum(penalties[i]) for i in members], dtype=torch.float64)
        for place, i in enumerate(members):
            if hidden[i]:
                continue
            learned.append(i)
            value = float(totals[place] - totals.mean())
            if kind == "grpo":
                value /= float(totals.std()) + 1e-6
            elif kind == "rloo":
                value = float(totals[place] - torch.cat([totals[:place], totals[place + 1 :]]).mean())
            result[i] = [value] * lengths[i]
            if kind == "reinforce_plus_plus":
                later = 0.0
                for t in reversed(range(lengths[i])):
                    later = -penalties[i][t] + rewards[i] * (t == lengths[i] - 1) + discount * later
                    result[i][t] = later
    if kind.startswith("reinforce") and learned:
        every = torch.tensor([x for i in learned for x in result[i]], dtype=torch.float64)
        mean, variance = every.mean(), every.var() if len(every) > 1 else torch.tensor(0.0)
        for i in learned:
            result[i] = [float((x - mean) * (variance + 1e-8).rsqrt()) for x in result[i]]
    return result


@settings(max_examples=150)
@given(
    seed=strategies.integers(0, 2**30),
    kind=strategies.sampled_from(KINDS),
    questions=strategies.integers(1, 5),
    has_penalties=strategies.booleans(),
    discount=strategies.sampled_from([1.0, 0.9]),
    masks=strategies.booleans(),
    scale=strategies.sampled_from([1e-4, 1.0, 1e5]),
)
def test_advantages_are_those_of_the_formulas(seed, kind, questions, has_penalties, discount, masks, scale):
    draw = random.Random(seed)
    groups = [draw.choice([7, -2, 40, 3, 11][:questions]) for _ in range(draw.randint(2, 20))]
    rewards = [
        draw.choice([0.0, 1.0, draw.random(), math.nan]) * scale if draw.random() > 0.2 else 0.25
        for _ in groups
    ]
    lengths = [draw.choice([0, 1, 3, draw.randint(1, 12)]) for _ in groups]
    penalties = [[draw.gauss(0, 0.3) * scale * has_penalties for _ in range(n)] for n in lengths]
    truncated = [draw.random() < 0.3 for _ in groups]
    result = compute_advantages(
        kind,
        rewards,
        groups,
        lengths,
        penalties=[np.array(one, np.float64) for one in penalties] if has_penalties else None,
        discount=discount,
        is_truncated=truncated,
        mask_truncated=masks,
    )
    hidden = [(t and masks) or not n for t, n in zip(truncated, lengths, strict=True)]
    wanted = reference(kind, rewards, groups, lengths, penalties, discount, hidden)
    largest = max((abs(x) for row in wanted for x in row), default=0.0)
    # Whitening divides the last bits of the values by the root of 1e-8 where all of them are equal.
    rounding = 1e-12 + (1e-11 * scale if kind.startswith("reinforce") else 0.0)
    assert [len(one) for one in result.tokens] == lengths
    for ours, theirs in zip(result.tokens, wanted, strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9 * largest + rounding)
    for value, row, is_learned in zip(result.values, wanted, result.is_learned, strict=True):
        assert value == pytest.approx(sum(row) / max(1, len(row)), rel=1e-8, abs=1e-8 * largest + rounding)
        assert is_learned or not any(row)
    assert result.truncated_answers == sum(truncated)
    small = {g for g in groups if sum(of == g and r == r for of, r in zip(groups, rewards, strict=True)) < 2}
    assert set(result.small_groups) == small


def test_only_exactly_equal_rewards_are_flat():
    nearly = 1.0 - 2**-53
    result = compute_advantages("grpo", [1.0, 1.0, 1.0, nearly], [0, 0, 1, 1], [2, 2, 2, 2])
    assert result.flat_groups == (0,)
    assert result.is_learned.tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_reinforce_plus_plus_alone_learns_from_flat_groups(kind):
    result = compute_advantages(kind, [1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 2, 2], [1] * 6)
    if kind == "reinforce_plus_plus":
        assert result.flat_groups == () and result.is_learned.all()
    else:
        assert result.flat_groups == (0, 1) and result.is_learned.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_verdict_has_no_part(kind):
    """Its reward is not 0: the others' advantages are those that they have without it."""
    rewards, groups, lengths = [1.0, 0.0, 0.5, math.nan], [0, 0, 0, 0], [2, 3, 1, 4]
    result = compute_advantages(kind, rewards, groups, lengths)
    alone = compute_advantages(kind, rewards[:3], groups[:3], lengths[:3])
    assert np.array_equal(result.values[:3], alone.values) and result.values[3] == 0
    assert not result.is_learned[3]


def test_groups_with_fewer_than_two_verdicts_are_dropped():
    result = compute_advantages("rloo", [1.0, math.nan, math.nan, 0.0, 1.0], [5, 5, 6, 7, 7], [1] * 5)
    assert result.small_groups == (5, 6) and result.flat_groups == ()
    assert result.is_learned.tolist() == [False, False, False, True, True]


def test_truncated_answers_count_in_the_mean_and_are_not_learned():
    rewards, groups, lengths = [1.0, 0.0, 0.0], [0, 0, 0], [2, 2, 2]
    masked = compute_advantages(
        "dr_grpo", rewards, groups, lengths, is_truncated=[0, 0, 1], mask_truncated=True
    )
    assert masked.values.tolist() == pytest.approx([2 / 3, -1 / 3, 0]) and masked.truncated_answers == 1
    learned = compute_advantages("dr_grpo", rewards, groups, lengths, is_truncated=[0, 0, 1])
    assert learned.values[2] == pytest.approx(-1 / 3) and learned.is_learned.all()


@pytest.mark.parametrize("kind", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_is_over_all_tokens_of_all_groups(kind):
    """Parts of a batch that are whitened alone have other advantages: ranks must not do it."""
    rewards, groups, lengths = [1.0, 0.0, 5.0, 3.0], [0, 0, 1, 1], [9, 1, 2, 2]
    result = compute_advantages(kind, rewards, groups, lengths)
    every = np.concatenate(result.tokens)
    assert every.mean() == pytest.approx(0, abs=1e-12) and every.std(ddof=1) == pytest.approx(1)
    part = compute_advantages(kind, rewards[:2], groups[:2], lengths[:2])
    assert abs(part.values[0] - result.values[0]) > 1e-3


def test_one_learned_token_has_no_advantage():
    result = compute_advantages(
        "reinforce_plus_plus_baseline",
        [1.0, 0.0],
        [0, 0],
        [1, 3],
        is_truncated=[False, True],
        mask_truncated=True,
    )
    assert result.values.tolist() == [0.0, 0.0] and result.is_learned.tolist() == [True, False]


def test_no_answers_have_no_advantages():
    for kind in KINDS:
        result = compute_advantages(kind, [], [], [])
        assert result.values.shape == (0,) and result.tokens == () and result.flat_groups == ()


def test_a_penalty_is_the_log_ratio_in_double():
    policy, other = (np.array([-1.5, -0.25], np.float32), np.array([-2.0, -0.5], np.float32))
    (penalty,) = compute_kl_penalties([policy], [other], 0.1)
    assert penalty.dtype == np.float64 and penalty.tolist() == [0.05, 0.025]
    with pytest.raises(ValueError, match="log_probs"):
        compute_kl_penalties([policy], [other[:1]], 0.1)
    with pytest.raises(ValueError):
        compute_kl_penalties([policy], [], 0.1)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)]
)
def test_long_answers_lose_reward_within_the_buffer(length, penalty):
    assert compute_overlong_reward_terms([length], 100, 20)[0] == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [0, 101, -3])
def test_a_buffer_that_is_no_part_of_an_answer_is_refused(buffer):
    with pytest.raises(ValueError, match=r"^buffer:"):
        compute_overlong_reward_terms([1], 100, buffer)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"groups": [0]}, "groups"),
        ({"lengths": [1, 2, 3]}, "lengths"),
        ({"is_truncated": [True]}, "is_truncated"),
        ({"rewards": [1.0, math.inf]}, "rewards"),
        ({"penalties": [np.zeros(3), np.zeros(3)]}, "penalties"),
    ],
)
def test_sizes_that_differ_and_infinite_rewards_are_refused(changes, key):
    fields = {"rewards": [1.0, 0.0], "groups": [0, 0], "lengths": [3, 4], **changes}
    with pytest.raises(ValueError, match=f"^{key}:"):
        compute_advantages("grpo", **fields)
