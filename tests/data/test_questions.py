"""Questions of task rl: as the template writes them, with every column, drawn as samples are; refusals."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bundle.data.questions import read_rl_prompts
from bundle.data.samples import Blend
from bundle.errors import UsageError
from bundle.recipe import load
from tests.data import chat

GSM8K = Path(os.environ.get("BUNDLE_GSM8K", Path(__file__).parents[3] / "shared/data/gsm8k"))
EXACT = "{kind: exact, field: answer}"


def write(path: Path, rows) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def build(*overrides, reward=EXACT, length=128, longest=16):
    rl = f"rl={{prompts_per_step: 2, num_generations: 2, rollout: {{max_completion_length: {longest}}}}}"
    return load(
        "demo",
        [
            *("task=rl", "data.source=jsonl", f"data.sequence_length={length}", "train.global_batch_size=4"),
            *("train.micro_batch_size=1", rl, f"rl.rewards=[{reward}]", "parallel.ep=1", *overrides),
        ],
    )


def refuse(*overrides, **keys) -> list[str]:
    with pytest.raises(UsageError) as caught:
        read_rl_prompts(build(*overrides, **keys))
    assert caught.value.code == 2
    return list(caught.value.violations)


ROWS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a, "more": {"tags": ["x", b]}}
    for a, b in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))
]


def test_rows_keep_every_column_and_are_rendered_up_to_the_answer(tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    questions = read_rl_prompts(build(f"data.path={path}")).training
    assert [question.row for question in questions.questions] == ROWS
    texts = [bytes(question.ids).decode() for question in questions.questions]
    assert texts == [f"### User\n{row['prompt']}\n### Assistant\n" for row in ROWS]
    assert [question.number for question in questions.questions] == [*range(5)]
    assert [question.place for question in questions.questions] == [f"{path}:{n}" for n in range(1, 6)]


@pytest.mark.parametrize("name", ["SIMPLE", "THINKING", "ALTERNATING", "RENAMED", "CALLING"])
def test_questions_are_what_transformers_renders(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    directory = chat.directory(tmp_path / "tokenizer", getattr(chat, name), merged=("ab", "12"))
    conversation = [
        {"role": "user", "content": "ab?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "And é 12ab?"},
    ]
    rows = [{"prompt": "ab 12?", "answer": "1"}, {"prompt": conversation, "answer": "1"}]
    path = write(tmp_path / "rows.jsonl", rows)
    recipe = build(
        f"data.path={path}",
        f"data.tokenizer=hf:{directory}",
        "data.template=chat",
        "model.config.vocab_size=384",
        length=256,
        longest=100,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [[{"role": "user", "content": "ab 12?"}], conversation]
    expected = [
        tokenizer.encode(
            tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )
        for one in messages
    ]
    questions = read_rl_prompts(recipe)
    assert [list(question.ids) for question in questions.training.questions] == expected
    assert questions.stop[0] == tokenizer.eos_token_id


def test_rows_in_the_form_of_verl_are_read_as_they_are(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"1+{n}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(1 + n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(4)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    recipe = build(f"data.path={path}", "data.source=parquet", reward="{kind: exact}")
    questions = read_rl_prompts(recipe).training.questions
    assert [question.row for question in questions] == rows
    assert bytes(questions[3].ids) == b"### System\nAdd.\n### User\n1+3\n### Assistant\n"


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not in {GSM8K}: set BUNDLE_GSM8K to its directory")
def test_gsm8k_is_read_as_published(tmp_path):
    reward = "{kind: exact, field: answer, pattern: '#### (.+)'}"
    fields = "data.fields={prompt: question, response: answer}"
    recipe = build(
        f"data.path={GSM8K}/train.jsonl", fields, "model.config.max_position_embeddings=4096",
        f"rl.evaluation={{path: [{GSM8K}/test.jsonl]}}", reward=reward, length=2048, longest=1024,
    )  # fmt: skip
    questions = read_rl_prompts(recipe)
    assert questions.evaluation is not None
    assert (len(questions.training), len(questions.evaluation)) == (7473, 1319)
    assert questions.training.questions[0].row["answer"].endswith("#### 72")


@pytest.mark.parametrize("seed", [1, 2])
def test_questions_are_drawn_as_samples_are(tmp_path, seed):
    small, large = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:])
    recipe = build(f"data.path=[{small}, {large}]", "data.weights=[0.25, 0.75]", f"seed={seed}")
    questions = read_rl_prompts(recipe)
    assert questions.training.sizes == (2, 3)
    order = Blend((2, 3), (0.25, 0.75), seed)
    drawn = [question.number for question in questions.draw(7, 40)]
    assert drawn == order.draw_samples(7, 40).tolist()
    assert drawn[10:20] == [question.number for question in questions.draw(17, 10)]
    # Whole periods have the shares of the weights; each set is gone through before a question comes again.
    first = [question.number for question in questions.draw(0, 8)]
    assert np.bincount(first, minlength=5)[2:].sum() == 6 and np.bincount(first, minlength=5)[
        :2
    ].tolist() == [1, 1]
    assert all(questions.training.questions[number].row == ROWS[number] for number in range(5))


def test_evaluation_rows_are_apart_and_keep_their_order(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS[:3]), write(tmp_path / "test.jsonl", ROWS[3:])
    questions = read_rl_prompts(build(f"data.path={train}", f"rl.evaluation={{path: [{test}]}}"))
    assert questions.evaluation is not None
    assert [question.row for question in questions.evaluation.questions] == ROWS[3:]
    assert {question.number for question in questions.draw(0, 50)} == {0, 1, 2}
    other = read_rl_prompts(build(f"data.path={train}", f"rl.evaluation={{path: [{train}]}}"))
    assert other.identity != questions.identity
    assert questions.identity["questions"] == other.identity["questions"]


def test_a_changed_column_is_another_identity(tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    before = read_rl_prompts(build(f"data.path={path}")).identity
    assert read_rl_prompts(build(f"data.path={path}")).identity == before
    write(path, [ROWS[0] | {"answer": "4"}, *ROWS[1:]])
    assert read_rl_prompts(build(f"data.path={path}")).identity != before


def test_stop_texts_are_tokens_beside_the_end_of_text(tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    assert read_rl_prompts(build(f"data.path={path}")).stop == (256,)
    questions = read_rl_prompts(build(f"data.path={path}", 'rl.rollout.stop=["\\n", ";"]'))
    assert questions.stop == (256, 10, ord(";"))


def test_all_that_is_wrong_comes_at_once(tmp_path, messages):
    path = write(tmp_path / "train.jsonl", ROWS)
    gone = tmp_path / "gone.jsonl"
    lines = refuse(
        f"data.path={path}",
        "rl.rollout.stop=[two]",
        f"rl.evaluation={{path: [{gone}]}}",
        reward="{kind: exact, field: label}",
    )
    assert any(line.startswith("rl.rollout.stop: ") for line in lines)
    assert any(line.startswith(f"rl.evaluation.path '{gone}'") for line in lines)
    (line,) = [line for line in lines if "rl.rewards.0.field" in line]
    assert (
        line.startswith(f"{path}:1, {path}:2, {path}:3 and 2 more: ") and "label" in line and "level" in line
    )
    assert len(lines) == 3
    for line in lines:
        messages(line)


@pytest.mark.parametrize(
    ("row", "overrides", "key", "value"),
    [
        ({"prompt": "x", "answer": "#"}, [], "rl.rewards.0.pattern", "[0-9]+"),
        ({"prompt": "x", "answer": ["1"]}, [], "rl.rewards.0.field", "answer"),
        ({"prompt": "", "answer": "1"}, [], "field prompt", "''"),
        ({"question": "x", "answer": "1"}, [], "field prompt", "question"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}, [], "field prompt", "assistant"),
        ({"prompt": "x" * 100, "answer": "1"}, [], "rl.rollout.max_completion_length", "16"),
        ({"prompt": "x", "answer": "1", "tools": [{"name": "f"}]}, [], "field tools", "tools"),
        ({"prompt": "x", "answer": "1", "images": ["a.png"]}, [], "image", "image"),
        ({"prompt": "x", "answer": "1"}, ["rl.warm_start_steps=3"], "rl.warm_start_steps", "response"),
    ],
)
def test_a_row_that_cannot_be_asked_or_judged_is_corrupt(tmp_path, row, overrides, key, value, messages):
    path = write(tmp_path / "train.jsonl", [ROWS[0] | {"response": "3"}, row])
    reward = "{kind: exact, field: answer, pattern: '[0-9]+'}"
    (line,) = refuse(f"data.path={path}", *overrides, reward=reward)
    assert line.startswith(f"{path}:2: ") and key in line and value in line
    messages(line)
    questions = read_rl_prompts(build(f"data.path={path}", "data.on_error=skip", *overrides, reward=reward))
    assert (len(questions.training), questions.training.skipped) == (1, 1)
    assert questions.training.left_out == (line,)


@pytest.mark.parametrize("room", [50, 51])
def test_the_longest_answer_has_room_behind_the_longest_question(tmp_path, room):
    """A question of 31 tokens and an answer of 20."""
    path = write(
        tmp_path / "train.jsonl", [{"prompt": "1+2=777", "answer": "3"}, {"prompt": "x", "answer": "3"}]
    )
    recipe = build(f"data.path={path}", "data.truncation=delete", length=room, longest=20)
    questions = read_rl_prompts(recipe).training
    assert len(bytes(questions.questions[-1].ids)) == 25
    assert (len(questions), questions.deleted) == ((2, 0) if room == 51 else (1, 1))


def test_a_set_without_a_question_is_refused(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "x"}])
    (line,) = refuse(f"data.path={path}", "data.on_error=skip")
    assert line.startswith("data.path: ") and str(path) in line


def test_files_without_rows_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (line,) = refuse(f"data.path={tmp_path}/a.txt", "data.source=null")
    assert line.startswith("data.path: ")


def test_texts_alone_follow_each_other_and_the_rows_answer_ends_with_the_end_of_text(tmp_path):
    rows = [
        {"prompt": "1+2=", "response": "3", "answer": "3"},
        {"prompt": "é?", "response": "ab", "answer": "x"},
    ]
    path = write(tmp_path / "train.jsonl", rows)
    built = build(f"data.path={path}", "data.template=none", "rl.warm_start_steps=1")
    questions = read_rl_prompts(built).training.questions
    assert [bytes(question.ids).decode() for question in questions] == ["1+2=", "é?"]
    assert [question.response for question in questions] == [(ord("3"), 256), (ord("a"), ord("b"), 256)]


def test_an_own_answer_is_that_of_the_template_and_must_have_room(tmp_path):
    rows = [{"prompt": "1+2=", "response": "3", "answer": "3"}]
    path = write(tmp_path / "train.jsonl", rows)
    (question,) = read_rl_prompts(build(f"data.path={path}", "rl.warm_start_steps=1")).training.questions
    assert bytes(question.response[:-1]).decode() == "3\n" and question.response[-1] == 256
    assert read_rl_prompts(build(f"data.path={path}")).training.questions[0].response == ()
    write(path, [{**rows[0], "response": "9" * 200}])
    (line,) = refuse(f"data.path={path}", "rl.warm_start_steps=1")
    assert line.startswith(f"{path}:1") and "202" in line


def test_files_of_the_package_are_read_by_their_name():
    name = "builtin:arithmetic-test.jsonl"
    built = build(f"data.path={name}", "data.fields={prompt: question, response: answer}")
    questions = read_rl_prompts(built).training.questions
    assert len(questions) == 80 and questions[0].place == f"{name}:1"
    for question in questions:
        first, _, second = question.row["question"].rstrip("=").partition("+")
        assert int(first) + int(second) == int(question.row["answer"])
        assert all(int(a) + int(b) < 10 for a, b in zip(first, second, strict=True))
    for wrong in ("builtin:none.jsonl", "builtin:../demo.yaml", "builtin:"):
        with pytest.raises(UsageError) as caught:
            read_rl_prompts(build(f"data.path={wrong}"))
        assert caught.value.code == 2 and wrong in str(caught.value)


def test_no_question_to_evaluate_with_is_learned():
    rows: dict[str, set[str]] = {}
    for name in ("train", "test"):
        built = build(
            f"data.path=builtin:arithmetic-{name}.jsonl", "data.fields={prompt: question, response: answer}"
        )
        rows[name] = {q.row["question"] for q in read_rl_prompts(built).training.questions}
    assert len(rows["train"]) == 320 and not rows["train"] & rows["test"]
