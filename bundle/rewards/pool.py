"""All rewards of a recipe: their processes, and what they make of the answers of a step."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from bundle.errors import EnvironmentUnfit, UsageError
from bundle.recipe.rl import RLReward
from bundle.recipe.rl_rules import split_function
from bundle.rewards.exact import ExactJudge
from bundle.rewards.judging import Judgement, Verdict, combine_verdicts
from bundle.rewards.process import receive_while_busy
from bundle.rewards.references import VERL_GROUND_TRUTH_FIELD, MissingReference, find_reference, find_tests
from bundle.rewards.workers import WorkerJudge

_log = logging.getLogger(__name__)


def list_right_answer_fields(reward: RLReward, response: str) -> tuple[str, ...]:
    """Return where a row may have the right answer; `response` is data.fields.response."""
    return (reward.field,) if reward.field is not None else (VERL_GROUND_TRUTH_FIELD, response)


def describe_missing_reference(
    rewards: Sequence[RLReward], row: Mapping[str, Any], response: str
) -> str | None:
    """Return why a reward cannot judge answers to a row, behind its key; None where all can."""
    for number, reward in enumerate(rewards):
        key = "tests" if reward.tests is not None else "field"
        try:
            if reward.tests is not None:
                find_tests(row, reward.tests)
            elif reward.needs_right_answer:
                find_reference(row, list_right_answer_fields(reward, response), reward.pattern)
        except MissingReference as error:
            key = "pattern" if "does not match" in str(error) else key
            return f"rl.rewards.{number}.{key}: {error}"
    return None


def name_rewards(rewards: Sequence[RLReward]) -> list[str]:
    """Return a name for each reward: its kind or its function, numbered where several are called so."""
    bases = [
        split_function(reward.function)[1] if reward.function is not None else reward.kind
        for reward in rewards
    ]
    counts, seen = Counter(bases), Counter[str]()
    names = []
    for base in bases:
        seen[base] += 1
        names.append(base if counts[base] == 1 else f"{base}_{seen[base]}")
    return names


class RewardPool:
    """The rewards of a recipe, as long as it is open; all of them judge at the same time."""

    def __init__(self, rewards: Sequence[RLReward], response: str = "response") -> None:
        """Start the processes. `response` is data.fields.response.

        Raise UsageError with every reward that cannot be loaded, EnvironmentUnfit where a package is missing.
        """
        self.names = name_rewards(rewards)
        self._rewards = tuple(rewards)
        self._weights = {name: reward.weight for name, reward in zip(self.names, rewards, strict=True)}
        self._judges: list[ExactJudge | WorkerJudge] = []
        try:
            for reward in rewards:
                fields = list_right_answer_fields(reward, response)
                self._judges.append(
                    ExactJudge(fields, reward.pattern)
                    if reward.kind == "exact"
                    else WorkerJudge(reward, fields)
                )
            self._wait_for_loading()
        except BaseException:
            self.close()
            raise

    @property
    def _worker_judges(self) -> list[WorkerJudge]:
        return [judge for judge in self._judges if isinstance(judge, WorkerJudge)]

    def _wait_for_loading(self) -> None:
        processes = [process for worker in self._worker_judges for process in worker.processes]
        receive_while_busy(processes, lambda process: process.is_loading)
        violations = []
        for number, (reward, judge) in enumerate(zip(self._rewards, self._judges, strict=True)):
            processes = [*judge.processes] if isinstance(judge, WorkerJudge) else []
            for notice in sorted({process.notice for process in processes} - {""}):
                _log.warning("rl.rewards.%d.kind: %s: %s", number, reward.kind, notice)
            errors = [process.load_error for process in processes if process.load_error is not None]
            if not errors:
                continue
            if not errors[0].is_installed:
                raise EnvironmentUnfit(
                    f"rl.rewards.{number}.kind: {reward.kind} needs math-verify ({errors[0]})."
                    " Install it: pip install 'mcore-bundle[rl]'."
                )
            key, name = ("function", reward.function) if reward.function else ("kind", reward.kind)
            violations.append(
                f"rl.rewards.{number}.{key}: {name} cannot be loaded ({errors[0]}). Correct it."
            )
        if violations:
            raise UsageError("the rewards cannot be used", violations)

    def judge_all(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Judgement:
        """Return the rewards of answers; `rows` [answers] are the rows of their questions.

        A reward that hangs, dies or does not return numbers is counted by kind; the pool stays usable.
        """
        if len(answers) != len(rows):
            raise ValueError(f"rows: {len(rows)} for {len(answers)} answers. Give a row for each answer.")
        workers = self._worker_judges
        for worker in workers:
            worker.begin_judging(answers, rows)
        columns: dict[str, Sequence[Verdict]] = {
            name: judge.grade_answers(answers, rows)
            for name, judge in zip(self.names, self._judges, strict=True)
            if isinstance(judge, ExactJudge)
        }
        processes = [process for worker in workers for process in worker.processes]
        receive_while_busy(processes, lambda process: process.has_open_answers)
        for name, judge in zip(self.names, self._judges, strict=True):
            if isinstance(judge, WorkerJudge):
                columns[name] = judge.assemble_verdicts()
        return combine_verdicts({name: columns[name] for name in self.names}, self._weights)

    def close(self) -> None:
        """End the processes."""
        for worker in self._worker_judges:
            for process in worker.processes:
                process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
