"""Accuracy on held-out questions: of the greedy answer, or pass@k of several answers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bundle.data.questions import Question
from bundle.recipe.rl import RLReward
from bundle.rewards.pool import name_rewards
from bundle.rl.answers import AnswerBatch, AnswerSampler
from bundle.rollouts import Sampling


def evaluate(
    sampler: AnswerSampler,
    questions: Sequence[Question],
    sampling: Sampling,
    samples: int,
    rewards: Sequence[RLReward],
) -> dict[str, float]:
    """Return the metrics of `samples` answers to each question; all ranks call it.

    An answer is right where the first reward of kind exact, math or code is 1; without such a reward, where
    the weighted sum of all rewards is above 0. An answer without a verdict is not right.
    """
    # Numbers below 0: the random numbers of training questions are others.
    batch = sampler.sample_and_judge(questions, -len(questions), samples, sampling)
    is_right = find_right_answers(batch, rewards).reshape(len(questions), samples)
    values = np.array(batch.judgement.rewards)
    metrics = {
        "evaluation/accuracy": float(is_right.mean()),
        "evaluation/reward": float(np.nanmean(values)) if not np.isnan(values).all() else float("nan"),
        "evaluation/mean_length": float(np.mean(batch.lengths)),
        "evaluation/failed": batch.judgement.failed,
    }
    if samples > 1:
        metrics[f"evaluation/pass@{samples}"] = float(is_right.any(1).mean())
    return metrics


def find_right_answers(batch: AnswerBatch, rewards: Sequence[RLReward]) -> NDArray[np.bool_]:
    """Return whether each answer is right (`evaluate`), [answers]."""
    for name, reward in zip(name_rewards(rewards), rewards, strict=True):
        if reward.needs_right_answer:
            return np.equal(batch.judgement.values[name], 1)
    return np.greater(batch.judgement.rewards, 0)
