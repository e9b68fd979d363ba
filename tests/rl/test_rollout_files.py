"""What a run keeps of its answers, and what another run reads of them."""

import json
import math

import numpy as np
import pytest

from bundle.data.questions import Question
from bundle.data.tokenizers import ByteTokenizer
from bundle.errors import UsageError
from bundle.rewards import Judgement
from bundle.rl.answers import AnswerBatch, join_batches
from bundle.rl.rollout_files import find_path, read_batch, write_batch
from bundle.rollouts import Answer


def draw_batch(seed: int = 0, first: int = 0) -> AnswerBatch:
    generator = np.random.default_rng(seed)
    questions = tuple(
        Question(
            number, tuple(generator.integers(0, 99, 3 + number).tolist()), {"q": "é"}, f"a.jsonl:{number}"
        )
        for number in range(2)
    )
    answers = []
    for number in range(6):
        ids = tuple(generator.integers(0, 99, 1 + number).tolist())
        log_probs = generator.normal(size=len(ids)).astype(np.float32)
        versions = np.full(len(ids), 7 + number, np.int32)
        answers.append(
            Answer(first + number // 3, number % 3, ids, log_probs, versions, "stop" if number else "length")
        )
    values = generator.normal(size=6).tolist()
    values[4] = math.nan
    judgement = Judgement(values, {"exact": values, "other": [1.0] * 6}, {("other", "died"): 1}, 1, 0, "why")
    return AnswerBatch(questions, tuple(answers), tuple("äbc def"[:6]), judgement, (2.0, 1.0))


def check_equal(batch: AnswerBatch, other: AnswerBatch) -> None:
    assert batch.texts == other.texts
    for ours, theirs in zip(batch.answers, other.answers, strict=True):
        for name in ("question", "answer", "ids", "finish_reason"):
            assert getattr(ours, name) == getattr(theirs, name)
        np.testing.assert_array_equal(ours.log_probs, theirs.log_probs)
        np.testing.assert_array_equal(ours.versions, theirs.versions)
        assert ours.log_probs.dtype == theirs.log_probs.dtype
    np.testing.assert_array_equal(batch.judgement.rewards, other.judgement.rewards)
    for name, column in batch.judgement.values.items():
        np.testing.assert_array_equal(column, other.judgement.values[name])


def test_a_file_gives_back_every_number_as_it_was(tmp_path):
    batch, path = draw_batch(), find_path(tmp_path / "rollouts", 12, 0)
    write_batch(path, batch, ByteTokenizer())
    assert path.name == "step-00000012.jsonl"
    assert find_path(tmp_path, 12, 2).name == "step-00000012-2.jsonl"
    check_equal(batch, read_batch(path, batch.questions, 3))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reward"] is None for line in lines] == [False] * 4 + [True, False]
    assert lines[3]["prompt_ids"] == list(batch.questions[1].ids) and lines[3]["place"] == "a.jsonl:1"


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "field", "empty", "group", "length"])
def test_a_file_that_does_not_fit_is_refused_by_its_name(tmp_path, damage):
    batch, path = draw_batch(), find_path(tmp_path / "rollouts", 0, 0)
    write_batch(path, batch, ByteTokenizer())
    text, questions = path.read_text(), batch.questions
    if damage == "missing":
        path.unlink()
    if damage == "cut":
        path.write_text(text[:-30])
    if damage == "field":
        path.write_text(text.replace('"ids"', '"di"'))
    if damage == "length":
        path.write_text(text.replace('"log_probs": [', '"log_probs": [0.5, '))
    if damage == "empty":
        path.write_text("")
    if damage == "other":
        questions = draw_batch(1).questions
    with pytest.raises(UsageError) as caught:
        read_batch(path, questions, 4 if damage == "group" else 3)
    assert caught.value.code == 2
    assert str(caught.value).startswith("rl.rollout.path: ") and path.name in str(caught.value)


def test_groups_are_selected_and_joined_with_all_that_belongs_to_them():
    first, second = draw_batch(), draw_batch(1, first=2)
    joined = join_batches([first.select([1]), second])
    assert joined.group_size == 3 and joined.groups.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert joined.questions == (first.questions[1], *second.questions)
    assert joined.prompt_per_answer[0] == first.questions[1].ids
    check_equal(joined.select([1, 2]), second)
    check_equal(joined.select([0]), first.select([1]))
    assert joined.judgement.failed == 2 and joined.judgement.failures == {("other", "died"): 2}
    assert joined.seconds == (4.0, 2.0)


def test_metrics_leave_out_answers_without_a_reward():
    batch = draw_batch()
    metrics = batch.measure()
    judged = [value for value in batch.judgement.rewards if not math.isnan(value)]
    assert metrics["reward/mean"] == pytest.approx(np.mean(judged))
    died, speed = "reward/failed/other/died", "rollout/tokens_per_second"
    assert metrics["reward/other"] == 1 and metrics[died] == 1
    assert metrics["completions/mean_length"] == 3.5 and metrics["completions/max_length"] == 6
    assert metrics["completions/truncated"] == pytest.approx(1 / 6)
    assert metrics[speed] == pytest.approx(21 / 2)
