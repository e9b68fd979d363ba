"""The reward exact: the answer is the text of a field."""

from collections.abc import Mapping, Sequence
from typing import Any

from bundle.rewards.judging import Failure, Verdict
from bundle.rewards.references import MissingReference, find_reference


class ExactJudge:
    """1 for an answer that is the right one, blanks around it aside, else 0."""

    def __init__(self, fields: Sequence[str], pattern: str | None = None) -> None:
        """`fields` are where a row may have its right answer, `pattern` finds it there."""
        self._fields, self._pattern = fields, pattern

    def grade_answers(self, answers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """Return the verdict on each answer; a row without a right answer is a failure."""
        verdicts: list[Verdict] = []
        for answer, row in zip(answers, rows, strict=True):
            try:
                reference = find_reference(row, self._fields, self._pattern)
            except MissingReference as error:
                verdicts.append(Failure("raised", str(error)))
            else:
                verdicts.append(float(answer.strip() == reference))
        return verdicts
