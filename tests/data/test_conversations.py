"""SFT: what is written, and that only the assistant's words are learned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bundle.data.chat import build_writer
from bundle.data.conversations import read_conversation
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from bundle.errors import UsageError
from bundle.recipe.data import Data, Fields
from tests.data import chat

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def data(**keys):
    return Data(source="jsonl", path=("rows.jsonl",), sequence_length=64, **keys)


def written(chosen, tokenizer, *talks) -> Any:
    """Ids and what is learned of each conversation."""
    write = build_writer(chosen, tokenizer)
    drafts: list[Any] = []
    for talk in talks:
        drafts += chat.drafts(write, read_conversation({"messages": talk}, chosen))
    return [(document.ids, document.loss_mask) for document in write.encode(drafts)]


def messages_of(row, fields):
    return read_conversation(row, data(fields=fields)).messages


def refusal(row, **keys):
    with pytest.raises(CorruptData) as caught:
        read_conversation(row, data(**keys))
    return str(caught.value)


def text(ids):
    return bytes(i for i in ids.tolist() if i < 256).decode()


def write_plainly(talk):
    return "".join(f"### {turn['role'].title()}\n{turn['content']}\n" for turn in talk)


def test_plain_conversations_have_headings_and_an_end_after_each_answer():
    short = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (ids, learned), (other, _) = written(data(), ByteTokenizer(), TALK, short)
    assert text(ids) == write_plainly(TALK)
    assert text(ids[learned]) == "2\n4\n"
    assert ids[learned].tolist().count(256) == 2 and ids[-1] == 256
    assert text(other) == write_plainly(short)


def test_the_last_turn_alone_can_be_learned_of_plain_conversations():
    ((every, _),) = written(data(), ByteTokenizer(), TALK)
    ((ids, learned),) = written(data(learn="last_turn"), ByteTokenizer(), TALK)
    assert ids.tolist() == every.tolist() and ids[learned].tolist() == [*b"4\n", 256]


def test_prompt_and_response_are_a_conversation_of_two():
    fields = Fields(prompt="question", response="answer")
    assert messages_of({"question": "q", "answer": "a"}, fields) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert messages_of({"messages": TALK, "answer": 3}, fields) == TALK
    assert messages_of({"messages": TALK, "question": None, "answer": None}, fields) == TALK


def test_what_is_null_in_a_table_counts_as_missing():
    row = {"messages": None, "prompt": "q", "response": "a"}
    assert messages_of(row, Fields()) == messages_of({"prompt": "q", "response": "a"}, Fields())
    wide = [{**message, "tool_calls": None} for message in TALK]
    assert messages_of({"messages": wide}, Fields()) == TALK
    assert "field response: missing" in refusal({"messages": None, "prompt": "q"})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "x"}, "field response"),
        ({"prompt": 1, "response": "x"}, "field prompt"),
        ({"prompt": "x", "response": " "}, "field response"),
        ({"messages": None}, "field messages"),
        ({"messages": []}, "field messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "field messages[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "field messages[0]: content"),
        ({"messages": TALK[:2]}, "field messages"),
    ],
)
def test_rows_that_are_no_conversation_are_named_by_field(row, named, messages):
    why = refusal(row)
    assert why.startswith(named)
    messages(why)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return chat.directory(tmp_path_factory.mktemp("tokenizer"))


def test_a_chat_template_writes_and_the_answers_are_found_in_it(directory):
    made = HuggingFaceTokenizer(directory)
    first, third = written(data(template="chat"), made, TALK, TALK[1:3])
    with pytest.raises(CorruptData, match="message 0: "):
        written(data(template="chat"), made, TALK[2:])
    decode = made._tokenizer.decode
    ids, learned = first
    assert decode(ids.tolist()) == chat.write_simply(TALK)
    assert decode(ids[learned].tolist()) == "2<end>4<end>"
    assert decode(third[0][third[1]].tolist()) == "2<end>"


def test_half_a_surrogate_pair_becomes_a_question_mark_for_every_tokenizer(directory):
    whole = json.loads('"\\ud800 \\ud83d\\ude00\\udc00"')
    talk = [{"role": "user", "content": whole}, {"role": "assistant", "content": whole}]
    made = HuggingFaceTokenizer(directory)
    assert made._tokenizer.decode(made.encode([whole])[0].tolist()) == "? \U0001f600?"
    assert bytes(ByteTokenizer().encode([whole])[0].tolist()).decode() == "? \U0001f600?"
    ((ids, learned),) = written(data(template="chat"), made, talk)
    assert made._tokenizer.decode(ids[learned].tolist()) == "? \U0001f600?<end>"


def test_tokenizers_are_named_by_their_content_and_must_fit_the_model(directory, messages):
    made = load_tokenizer(f"hf:{directory}", 1000)
    assert made.identity == HuggingFaceTokenizer(directory).identity and made.identity.startswith(
        "hf sha256:"
    )
    assert made.end_of_text == 256 and made.vocab_size == 257
    with pytest.raises(UsageError, match=r" 256.*vocab_size .*200") as error:
        load_tokenizer(f"hf:{directory}", 200)
    messages(str(error.value).replace(str(directory), "DIRECTORY"))


@pytest.mark.parametrize("name", ["hf:/nowhere", "hf:{empty}"])
def test_directories_without_a_tokenizer_are_usage_errors(name, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"data\.tokenizer"):
        load_tokenizer(name.format(empty=tmp_path), 1000)


@pytest.mark.parametrize("content", ["[]", "{", "3", '{"tokenizer_class": []}'])
def test_a_tokenizer_whose_files_say_something_odd_is_a_usage_error(tmp_path, content):
    path = chat.directory(tmp_path / "tokenizer")
    (path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UsageError, match=rf"data\.tokenizer: {path}: ") as refused:
        HuggingFaceTokenizer(path)
    assert ("tokenizer_config.json" in str(refused.value)) is (content != '{"tokenizer_class": []}')


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "null"), ("tokenizer.json", '{"model": ')])
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path, name, content):
    path = chat.directory(tmp_path / "tokenizer")
    (path / name).write_text(content)
    with pytest.raises(UsageError, match=rf"data\.tokenizer: {path}: {name}: "):
        HuggingFaceTokenizer(path)


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken"])
def test_a_tokenizer_of_tiktokens_is_refused_with_what_to_do_and_no_code_of_it_runs(tmp_path, name):
    pytest.importorskip("transformers")
    (tmp_path / name).write_text("YQ== 0\n")
    (tmp_path / "tokenization_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    said = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(UsageError) as refused:
        HuggingFaceTokenizer(tmp_path)
    assert str(refused.value).startswith(f"data.tokenizer: {tmp_path / name} ")
    (heading,) = re.findall(r'docs/pretrained\.md .* "(.*?)"', str(refused.value))
    assert f"### {heading}\n" in (Path(__file__).parents[2] / "docs" / "pretrained.md").read_text()
    assert not (tmp_path / "ran").exists()
    (tmp_path / "tokenizer_config.json").unlink()
    (chat.directory(tmp_path / "made") / name).write_text("YQ== 0\n")
    assert HuggingFaceTokenizer(tmp_path / "made").end_of_text  # beside a tokenizer.json it is nothing


def test_ids_may_have_gaps_and_the_highest_one_must_fit_the_model(tmp_path):
    path = chat.directory(tmp_path / "tokenizer")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 900
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(f"hf:{path}", 901).encode(["ab"])[0].tolist()[0] == 900
    with pytest.raises(UsageError, match=r" 900.*vocab_size .*900"):
        load_tokenizer(f"hf:{path}", 900)
