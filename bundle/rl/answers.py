"""Samples answers with the current weights on all ranks, and has the rewards judge them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from bundle.data.questions import Question
from bundle.data.tokenizers import Tokenizer
from bundle.distributed.world import run_and_all_gather_results
from bundle.rewards import Judgement, RewardPool, join_judgements
from bundle.rollouts import Answer, Request, Rollout, Sampling


@dataclass(frozen=True)
class AnswerBatch:
    """Judged answers in the order of their questions; every question has a group of equally many.

    `texts` leave out the token that ended the answer. `seconds` are those that the slowest rank took for
    sampling and for judging.
    """

    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]
    texts: tuple[str, ...]
    judgement: Judgement
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def group_size(self) -> int:
        """The number of answers to each question."""
        return len(self.answers) // max(1, len(self.questions))

    @property
    def groups(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The index in `questions` of each answer's question, [answers]."""
        return np.repeat(np.arange(len(self.questions)), self.group_size)

    @property
    def prompt_per_answer(self) -> list[tuple[int, ...]]:
        """The ids of each answer's question."""
        return [self.questions[group].ids for group in self.groups]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each answer."""
        return [len(answer.ids) for answer in self.answers]

    @property
    def is_truncated(self) -> list[bool]:
        """True for each answer that reached the length limit."""
        return [answer.finish_reason == "length" for answer in self.answers]

    def select(self, groups: Sequence[int]) -> "AnswerBatch":
        """Return the batch of these groups alone, in this order; its failures stay those of all groups."""
        size = self.group_size
        indices = [index for group in groups for index in range(group * size, (group + 1) * size)]
        judgement = replace(
            self.judgement,
            rewards=[self.judgement.rewards[index] for index in indices],
            values={
                name: [column[index] for index in indices] for name, column in self.judgement.values.items()
            },
        )
        return AnswerBatch(
            tuple(self.questions[group] for group in groups),
            tuple(self.answers[index] for index in indices),
            tuple(self.texts[index] for index in indices),
            judgement,
            self.seconds,
        )

    def measure(self) -> dict[str, float]:
        """Return the metrics of the answers: rewards, failures, lengths [tokens] and seconds."""
        rewards = np.array(self.judgement.rewards)
        judged = rewards[~np.isnan(rewards)]
        lengths, failures = np.array(self.lengths), self.judgement.failures
        sampling, judging = self.seconds
        return {
            "reward/mean": _compute_mean_or_nan(judged),
            "reward/std": float(judged.std()) if len(judged) else math.nan,
            **{
                f"reward/{name}": _compute_mean_or_nan(_drop_nan(column))
                for name, column in self.judgement.values.items()
            },
            "reward/failed": self.judgement.failed,
            "reward/unjudged": self.judgement.unjudged,
            **{f"reward/failed/{name}/{kind}": count for (name, kind), count in sorted(failures.items())},
            "completions/mean_length": _compute_mean_or_nan(lengths),
            "completions/max_length": int(lengths.max(initial=0)),
            "completions/truncated": _compute_mean_or_nan(np.array(self.is_truncated)),
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


class AnswerSampler:
    """Samples and judges answers: each rank its share of the questions; all ranks get all answers."""

    def __init__(
        self,
        rollout: Rollout,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        stop: Sequence[int],
        *,
        asking_ranks: int,
    ) -> None:
        """`stop` are the ids that end an answer. Ranks below `asking_ranks` share out the questions."""
        self._rollout, self._rewards, self._asking_ranks = rollout, rewards, asking_ranks
        self._tokenizer, self._stop = tokenizer, frozenset(stop)

    def sample_and_judge(
        self, questions: Sequence[Question], first: int, group_size: int, sampling: Sampling
    ) -> AnswerBatch:
        """Return `group_size` judged answers to each question.

        Question i has the number `first` + i, a key of its random numbers. All ranks call it with the same
        arguments. Raises an error on all ranks where one rank fails.
        """
        rank, size = dist.get_rank(), self._asking_ranks
        if dist.get_world_size() == 1:
            return self._sample_and_judge_share(
                questions, range(first, first + len(questions)), group_size, sampling
            )
        places = range(rank, len(questions), size) if rank < size else range(0)
        share, numbers = [questions[place] for place in places], [first + place for place in places]
        parts = run_and_all_gather_results(
            lambda: self._sample_and_judge_share(share, numbers, group_size, sampling)
        )
        parts = [part for part in parts if part.questions]
        joined = join_batches(parts)
        # Rank r answered the questions r, r + size, ...: this restores the order of the questions.
        order = np.argsort(
            np.concatenate([np.arange(len(questions))[number::size] for number in range(size)]), kind="stable"
        )
        ordered = joined.select(order.tolist())
        seconds = max(part.seconds[0] for part in parts), max(part.seconds[1] for part in parts)
        return replace(ordered, seconds=seconds)

    def _sample_and_judge_share(
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


def _compute_mean_or_nan(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _drop_nan(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
