"""Verdicts on answers, added up: the reward of each answer, and failures by kind, which are never 0."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bundle.errors import JobFailed

# died: the process that judged ended by itself, or for its memory.
FailureKind = Literal["raised", "wrong_count", "not_a_number", "text", "timed_out", "died"]
FAILURE_KINDS: tuple[FailureKind, ...] = (
    "raised",
    "wrong_count",
    "not_a_number",
    "text",
    "timed_out",
    "died",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no verdict on an answer."""

    kind: FailureKind
    reason: str


# None: the reward cannot judge this answer.
Verdict = float | None | Failure


class Judge(Protocol):
    """Judges answers; `rows` [answers] are the rows of their questions, with all columns."""

    def grade_answers(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[Verdict]:
        """Return a verdict on each answer."""


@dataclass(frozen=True)
class Judgement:
    """The rewards of answers.

    `rewards` [answers] are weighted sums, NaN for an answer that a reward did not judge. `values` has the
    verdicts of each reward by its name, [answers] each, NaN where there is none. `failures` counts answers by
    reward and kind of failure, `failed` those with any failure, `unjudged` those that a reward cannot judge
    and none failed to judge.
    """

    rewards: list[float]
    values: Mapping[str, list[float]]
    failures: Mapping[tuple[str, FailureKind], int]
    failed: int
    unjudged: int
    first_reason: str | None  # of the first failure: which reward failed, and why


def combine_verdicts(verdicts: Mapping[str, Sequence[Verdict]], weights: Mapping[str, float]) -> Judgement:
    """Return the rewards of answers by the verdicts of each reward, [answers] each."""
    failures: dict[tuple[str, FailureKind], int] = {}
    reasons: list[str] = []
    for name, column in verdicts.items():
        for verdict in column:
            if isinstance(verdict, Failure):
                key = (name, verdict.kind)
                failures[key] = failures.get(key, 0) + 1
                reasons += [f"the reward {name} failed: {verdict.reason}"] if not reasons else []
    by_answer = list(zip(*verdicts.values(), strict=True))
    has_failure = [any(isinstance(verdict, Failure) for verdict in row) for row in by_answer]
    return Judgement(
        rewards=[
            _sum_weighted_verdicts(zip(row, (weights[name] for name in verdicts), strict=True))
            for row in by_answer
        ],
        values={
            name: [_to_number_or_nan(verdict) for verdict in column] for name, column in verdicts.items()
        },
        failures=failures,
        failed=sum(has_failure),
        unjudged=sum(
            None in row and not is_failed for row, is_failed in zip(by_answer, has_failure, strict=True)
        ),
        first_reason=reasons[0] if reasons else None,
    )


def join_judgements(parts: Sequence[Judgement]) -> Judgement:
    """Return the judgement of all answers, those of each part behind those of the part before."""
    failures: dict[tuple[str, FailureKind], int] = {}
    for part in parts:
        for key, count in part.failures.items():
            failures[key] = failures.get(key, 0) + count
    reasons = [part.first_reason for part in parts if part.first_reason is not None]
    return Judgement(
        rewards=[reward for part in parts for reward in part.rewards],
        values={name: [value for part in parts for value in part.values[name]] for name in parts[0].values},
        failures=failures,
        failed=sum(part.failed for part in parts),
        unjudged=sum(part.unjudged for part in parts),
        first_reason=reasons[0] if reasons else None,
    )


def check_failed_share(failed: int, answers: int, limit: float, first_reason: str | None) -> None:
    """Raise JobFailed where rewards failed on more than a share `limit` of the answers of a step."""
    if failed > limit * answers:
        raise JobFailed(
            f"rl.max_failed: rewards failed on {failed} of {answers} answers. This share of"
            f" {failed / answers:.3g} exceeds the limit of {limit:g}. The first reason: {first_reason}."
            " Correct the reward."
        )


def _sum_weighted_verdicts(row: Iterable[tuple[Verdict, float]]) -> float:
    return sum((weight * _to_number_or_nan(verdict) for verdict, weight in row), 0.0)


def _to_number_or_nan(verdict: Verdict) -> float:
    return verdict if isinstance(verdict, int | float) else math.nan
