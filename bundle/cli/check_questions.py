"""The part of `mcore-bundle check` about the questions of task rl."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundle.data.questions import JoinedQuestions, Questions


def count_questions(questions: "Questions") -> dict[str, Any]:
    """Return the counts of the training questions and of the evaluation questions, if any.

    They are rows, the longest question [tokens], skipped rows and deleted rows.
    """
    counts = {"questions": _summarize_question_set(questions.training)}
    if questions.evaluation is not None:
        counts["evaluation"] = _summarize_question_set(questions.evaluation)
    return counts


def format_question_lines(counts: dict[str, Any]) -> list[str]:
    """Return one line for each set of questions in the result of `count_questions`."""
    lines = []
    for name, count in counts.items():
        skipped = f"; corrupt rows skipped: {count['skipped']:,}" * bool(count["skipped"])
        deleted = f"; rows deleted as too long: {count['deleted']:,}" * bool(count["deleted"])
        lines.append(f"{name:<10} {count['rows']:,} of at most {count['longest']:,} tokens{skipped}{deleted}")
    return lines


def decode_questions(questions: "Questions", count: int) -> list[str]:
    """Return the texts of the first `count` questions of the run, with the template around them."""
    return [questions.tokenizer.decode(question.ids) for question in questions.draw(0, count)]


def _summarize_question_set(questions: "JoinedQuestions") -> dict[str, int]:
    lengths: Sequence[int] = [len(question.ids) for question in questions.questions]
    return {
        "rows": len(questions),
        "longest": max(lengths, default=0),
        "skipped": questions.skipped,
        "deleted": questions.deleted,
    }
