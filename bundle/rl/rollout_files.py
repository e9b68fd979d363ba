"""Files of a run's answers: rollouts/step-N.jsonl, one line for each answer. Another run can replay them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bundle import files
from bundle.data.questions import Question
from bundle.data.tokenizers import Tokenizer
from bundle.errors import UsageError
from bundle.rewards import Judgement
from bundle.rl.answers import AnswerBatch
from bundle.rollouts import Answer

_MAX_READABLE_FILE_BYTES = 1 << 32  # bytes of a file


def find_path(directory: Path, number: int, attempt: int) -> Path:
    """Return the path of the answers of step `number`, sampled at `attempt`; both count from 0."""
    return directory / (f"step-{number:08d}-{attempt}.jsonl" if attempt else f"step-{number:08d}.jsonl")


def write_batch(path: Path, batch: AnswerBatch, tokenizer: Tokenizer) -> None:
    """Write the answers of a step; `read_batch` returns exactly the same numbers."""
    path.parent.mkdir(exist_ok=True)
    files.write_text(path, "".join(_dump(batch, tokenizer)))


def read_batch(path: Path, questions: Sequence[Question], group_size: int) -> AnswerBatch:
    """Return the answers of a file, `group_size` to each question, with their rewards and without failures.

    Raises UsageError where the file cannot be read, is damaged, or answers other questions.
    """
    text = files.read_text_if_small(path, _MAX_READABLE_FILE_BYTES)
    if text is None:
        raise UsageError(
            f"rl.rollout.path: {path} cannot be read. Name the folder `rollouts` of a run with as many steps."
        )
    try:
        lines = [json.loads(line) for line in text.splitlines()]
        batch = _load(lines, questions, group_size)
        prompt_ids = [line["prompt_ids"] for line in lines[:: batch.group_size]]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"rl.rollout.path: {path} is not a valid file of answers ({error!r}). Name another run."
        ) from error
    if prompt_ids != [list(question.ids) for question in questions]:
        raise UsageError(
            f"rl.rollout.path: {path} has answers to other questions. Use the data, the seed and the"
            " rl.prompts_per_step of the run that wrote it."
        )
    return batch


def _dump(batch: AnswerBatch, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the line of each answer; what a question says is encoded once for its answers."""
    judgement, size = batch.judgement, batch.group_size
    beginnings = [
        json.dumps(
            {
                "place": question.place,
                "prompt": tokenizer.decode(question.ids),
                "prompt_ids": list(question.ids),
            }
        )
        for question in batch.questions
    ]
    for number, (answer, text) in enumerate(zip(batch.answers, batch.texts, strict=True)):
        rest = {
            "question": answer.question,
            "answer": answer.answer,
            "ids": answer.ids,
            "text": text,
            "reward": _replace_nan(judgement.rewards[number]),
            "rewards": {name: _replace_nan(column[number]) for name, column in judgement.values.items()},
            "finish_reason": answer.finish_reason,
            "log_probs": answer.log_probs.tolist(),
            "versions": answer.versions.tolist(),
        }
        yield f"{beginnings[number // size][:-1]}, {json.dumps(rest)[1:]}\n"


def _load(lines: Sequence[Mapping[str, Any]], questions: Sequence[Question], group_size: int) -> AnswerBatch:
    if len(lines) != len(questions) * group_size:
        raise ValueError(f"{len(lines)} answers for {len(questions)} questions x {group_size}")
    for number, line in enumerate(lines, start=1):
        if not len(line["ids"]) == len(line["log_probs"]) == len(line["versions"]):
            raise ValueError(f"line {number}: ids, log_probs and versions differ in length")
    answers = tuple(
        Answer(
            line["question"],
            line["answer"],
            tuple(line["ids"]),
            np.array(line["log_probs"], np.float32),
            np.array(line["versions"], np.int32),
            line["finish_reason"],
        )
        for line in lines
    )
    judgement = Judgement(
        rewards=[_from_json(line["reward"]) for line in lines],
        values={name: [_from_json(line["rewards"][name]) for line in lines] for name in lines[0]["rewards"]},
        failures={},
        failed=0,
        unjudged=0,
        first_reason=None,
    )
    return AnswerBatch(tuple(questions), answers, tuple(line["text"] for line in lines), judgement)


def _replace_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _from_json(value: float | None) -> float:
    return math.nan if value is None else float(value)
