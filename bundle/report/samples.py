"""Reads a few answers of the first and of the last step of a run of task rl, for its report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.errors import format_count
from bundle.files import read_content
from bundle.report.reading import parse_json_or_none

_ANSWERS_PER_STEP = 4  # of a step
_TEXT_LIMIT = 400  # characters of a question and of an answer
_FILE_LIMIT = 1 << 28  # bytes


@dataclass(frozen=True)
class SampleAnswer:
    """One answer in the report; `step` is the stem of its file; long texts are cut."""

    step: str
    question: str
    text: str
    reward: str


def read_sample_selection(directory: Path, unread: list[str]) -> tuple[SampleAnswer, ...]:
    """Return the samples of a run directory; add a line to `unread` for each file that cannot be read."""
    paths = sorted((directory / "rollouts").glob("step-*.jsonl"))
    samples: list[SampleAnswer] = []
    for path in dict.fromkeys((*paths[:1], *paths[-1:])):
        try:
            lines = read_content(path, _FILE_LIMIT).splitlines()
        except OSError as error:
            unread.append(f"rollouts/{path.name}: {error.strerror or error}")
            continue
        chosen = lines[:: max(1, len(lines) // _ANSWERS_PER_STEP)][:_ANSWERS_PER_STEP]
        answers = [_build_sample(path, parse_json_or_none(line)) for line in chosen]
        samples += [answer for answer in answers if answer is not None]
        if None in answers:
            unread.append(f"rollouts/{path.name}: {format_count(answers.count(None), 'unreadable line')}")
    return tuple(samples)


def _build_sample(path: Path, line: Any) -> SampleAnswer | None:
    if not isinstance(line, Mapping) or not isinstance(line.get("text"), str):
        return None
    question, reward = line.get("prompt"), line.get("reward")
    return SampleAnswer(
        path.stem,
        question[-_TEXT_LIMIT:] if isinstance(question, str) else "",
        line["text"][:_TEXT_LIMIT],
        f"{reward:.4g}" if type(reward) in (int, float) else "none",
    )
