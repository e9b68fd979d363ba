"""Asks questions with the present weights on all ranks, and lets the rewards judge the answers."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from bundle.data.questions import Question
from bundle.data.tokenizers import Tokenizer
from bundle.distributed.world import run_on_all_ranks
from bundle.rewards import Judgement, RewardPool, join_judgements
from bundle.rollouts import Answer, Request, Rollout, Sampling


@dataclass(frozen=True)
class AnswerBatch:
    """Answers to some questions, in groups of equal size: those to the first question, then the others.

    `questions` are those of the groups; `texts` are without the token that ended the answer. `seconds` are
    those of the slowest rank for sampling and for judging.
    """

    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]
    texts: tuple[str, ...]
    judgement: Judgement
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def group_size(self) -> int:
        """Answers to each question."""
        return len(self.answers) // max(1, len(self.questions))

    @property
    def groups(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The number of the question of each answer, [answers]."""
        return np.repeat(np.arange(len(self.questions)), self.group_size)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The ids of the question of each answer."""
        return [self.questions[group].ids for group in self.groups]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        return [len(answer.ids) for answer in self.answers]

    @property
    def is_truncated(self) -> list[bool]:
        """Which answers reached the longest length."""
        return [answer.finish_reason == "length" for answer in self.answers]

    def select(self, groups: Sequence[int]) -> "AnswerBatch":
        """Return these groups alone; failures stay those of the whole batch."""
        size = self.group_size
        numbers = [number for group in groups for number in range(group * size, (group + 1) * size)]
        judgement = replace(
            self.judgement,
            rewards=[self.judgement.rewards[number] for number in numbers],
            values={
                name: [column[number] for number in numbers] for name, column in self.judgement.values.items()
            },
        )
        return AnswerBatch(
            tuple(self.questions[group] for group in groups),
            tuple(self.answers[number] for number in numbers),
            tuple(self.texts[number] for number in numbers),
            judgement,
            self.seconds,
        )

    def measure(self) -> dict[str, float]:
        """Return what a person watches: rewards, lengths, failures and seconds, as metrics."""
        rewards = np.array(self.judgement.rewards)
        judged = rewards[~np.isnan(rewards)]
        lengths, failures = np.array(self.lengths), self.judgement.failures
        sampling, judging = self.seconds
        return {
            "reward/mean": _mean(judged),
            "reward/std": float(judged.std()) if len(judged) else math.nan,
            **{f"reward/{name}": _mean(_drop_nan(column)) for name, column in self.judgement.values.items()},
            "reward/failed": self.judgement.failed,
            "reward/unjudged": self.judgement.unjudged,
            **{f"reward/failed/{name}/{kind}": count for (name, kind), count in sorted(failures.items())},
            "completions/mean_length": _mean(lengths),
            "completions/max_length": int(lengths.max(initial=0)),
            "completions/truncated": _mean(np.array(self.is_truncated)),
            "rollout/seconds": sampling,
            "rollout/tokens_per_second": float(lengths.sum()) / sampling if sampling else 0.0,
            "reward/seconds": judging,
        }


def join_batches(batches: Sequence[AnswerBatch]) -> AnswerBatch:
    """Return all groups of several batches as one batch."""
    if len(batches) == 1:
        return batches[0]
    return AnswerBatch(
        tuple(question for batch in batches for question in batch.questions),
        tuple(answer for batch in batches for answer in batch.answers),
        tuple(text for batch in batches for text in batch.texts),
        join_judgements([batch.judgement for batch in batches]),
        (sum(batch.seconds[0] for batch in batches), sum(batch.seconds[1] for batch in batches)),
    )


class Interviewer:
    """Asks questions; each rank answers its share, then all ranks have all answers."""

    def __init__(
        self, rollout: Rollout, rewards: RewardPool, tokenizer: Tokenizer, stop: Sequence[int]
    ) -> None:
        """`stop` are the ids that end an answer."""
        self._rollout, self._rewards = rollout, rewards
        self._tokenizer, self._stop = tokenizer, frozenset(stop)

    def ask(
        self, questions: Sequence[Question], first: int, group_size: int, sampling: Sampling
    ) -> AnswerBatch:
        """Return `group_size` answers to each question; `first` counts the questions that were asked before.

        All ranks call it with the same. Raises on all of them what one raises.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = run_on_all_ranks(
            lambda: self._ask_share(
                questions[rank::size], range(first + rank, first + len(questions), size), group_size, sampling
            )
        )
        parts = [part for part in parts if part.questions]
        joined = join_batches(parts)
        # Rank r has answered the questions r, r + size, ...: back to the order of the questions.
        order = np.argsort(
            np.concatenate([np.arange(len(questions))[number::size] for number in range(size)]), kind="stable"
        )
        ordered = joined.select(order.tolist())
        seconds = max(part.seconds[0] for part in parts), max(part.seconds[1] for part in parts)
        return replace(ordered, seconds=seconds)

    def _ask_share(
        self, questions: Sequence[Question], numbers: Sequence[int], group_size: int, sampling: Sampling
    ) -> AnswerBatch:
        if not questions:
            return AnswerBatch((), (), (), Judgement([], {}, {}, 0, 0, None))
        started = time.perf_counter()
        requests = [
            Request(question.ids, number, answer)
            for question, number in zip(questions, numbers, strict=True)
            for answer in range(group_size)
        ]
        answers = tuple(self._rollout.generate(requests, sampling))
        sampled = time.perf_counter()
        texts = tuple(self._tokenizer.decode(self._strip_stop(answer.ids)) for answer in answers)
        rows = [question.row for question in questions for _ in range(group_size)]
        judgement = self._rewards.judge_all(texts, rows)
        seconds = sampled - started, time.perf_counter() - sampled
        return AnswerBatch(tuple(questions), answers, texts, judgement, seconds)

    def _strip_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self._stop else ids


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _drop_nan(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
