"""Conversations that call functions: what a chat template is given, and which tokens are learned.

The oracle is transformers' own apply_chat_template over beginnings of the conversation, token by token.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bundle.data.chat import ChatTemplate, build_writer
from bundle.data.conversations import read_conversation
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from bundle.recipe.data import Data
from tests.data import chat

PUBLISHED = importlib.util.find_spec("trl")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def call(name, **arguments):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}}]


TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1 and 2+2?"},
    {"role": "assistant", "content": "Adding.", "tool_calls": call("add", a=1) + call("add", a=2)},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "2, 4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "", "tool_calls": call("add", a=3)},
    {"role": "tool", "name": "add", "content": "6"},
    {"role": "assistant", "content": "6."},
]


def data(**keys):
    return Data(source="jsonl", path=("rows.jsonl",), sequence_length=64, template="chat", **keys)


def ids(made, messages, *, prompt=False):
    """A token per byte: what one rendering has before another is a number of tokens."""
    whole = made._tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=prompt, return_dict=True
    )
    return whole["input_ids"]


def expected(made, messages, turns):
    learned = [False] * len(ids(made, messages))
    for turn in turns:
        begin, end = ids(made, messages[:turn], prompt=True), ids(made, messages[: turn + 1])
        assert end[: len(begin)] == begin and ids(made, messages)[: len(end)] == end
        learned[len(begin) : len(end)] = [True] * (len(end) - len(begin))
    return learned


def written(made, row, **keys):
    template = ChatTemplate(made)
    (document,) = template.encode(chat.drafts(template, read_conversation(row, data(**keys))))
    return document


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return HuggingFaceTokenizer(chat.directory(tmp_path_factory.mktemp("tokenizer"), chat.CALLING))


@pytest.mark.parametrize(("learn", "turns"), [("all_turns", [2, 5, 7, 9]), ("last_turn", [9])])
def test_calls_and_answers_are_learned_and_nothing_that_a_tool_gave(made, learn, turns):
    document = written(made, {"messages": TALK, "tools": TOOLS}, learn=learn)
    assert document.ids.tolist() == ids(made, TALK)
    assert document.loss_mask.tolist() == expected(made, TALK, turns)
    if learn == "all_turns":
        text = made.decode(document.ids[document.loss_mask].tolist())
        assert text.count("<call>add") == 3 and "<answer>" not in text and "<tools>" not in text


def test_a_template_that_joins_arguments_to_text_is_given_text(tmp_path):
    made = HuggingFaceTokenizer(chat.directory(tmp_path, chat.JOINING))
    talk = [message for message in TALK if message["role"] != "system"]
    for message in (message for message in talk if "tool_calls" in message):
        given = [{**one, "function": {**one["function"]}} for one in message["tool_calls"]]
        for one in given:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        talk[talk.index(message)] = {**message, "content": message["content"] or None, "tool_calls": given}
    document = written(made, {"messages": [m for m in TALK if m["role"] != "system"]})
    whole = made._tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    assert document.ids.tolist() == whole
    text = made.decode(document.ids[document.loss_mask].tolist())
    assert text.count('<call>add {"a": ') == 3 and "None" not in text


def test_turns_without_weight_are_not_learned(made):
    weighted = [message | ({"weight": 0} if index in (2, 9) else {}) for index, message in enumerate(TALK)]
    document = written(made, {"messages": weighted, "tools": TOOLS})
    assert document.ids.tolist() == ids(made, TALK)
    assert document.loss_mask.tolist() == expected(made, TALK, [5, 7])


def test_marks_of_generation_hold_within_the_turns_that_are_learned(tmp_path):
    made = HuggingFaceTokenizer(chat.directory(tmp_path, chat.MARKED))
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"{i} said"} for i in range(6)]
    theirs = made._tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    marked = list(map(bool, theirs["assistant_masks"]))
    turn = ids(made, talk[:3], prompt=True), ids(made, talk[:4])
    document = written(made, {"messages": [m | {"weight": i == 3} for i, m in enumerate(talk) if i % 2 or 1]})
    within = range(len(turn[0]), len(turn[1]))
    assert document.loss_mask.tolist() == [is_marked and at in within for at, is_marked in enumerate(marked)]
    assert made.decode(document.ids[document.loss_mask].tolist()) == "3 said<end>"


def test_the_same_row_is_read_in_sharegpts_words(made):
    words = {"user": "human", "assistant": "gpt", "tool": "observation"}
    turns = []
    for message in TALK:
        if "tool_calls" in message:
            value = (
                "[" + ",".join(['{"name": "add", "arguments": {"a": 1}}'] * len(message["tool_calls"])) + "]"
            )
            turns.append({"from": "function_call", "value": value})
        else:
            turns.append({"from": words.get(message["role"], message["role"]), "value": message["content"]})
    document = written(made, {"conversations": turns, "tools": TOOLS})
    theirs = read_conversation({"conversations": turns}, data()).messages
    assert document.ids.tolist() == ids(made, theirs)
    assert document.loss_mask.tolist() == expected(made, theirs, [2, 5, 7, 9])


def test_what_a_template_does_not_write_is_told(tmp_path, made, messages):
    silent = HuggingFaceTokenizer(chat.directory(tmp_path, chat.SIMPLE))
    with pytest.raises(CorruptData, match="tools") as error:
        written(silent, {"messages": TALK, "tools": TOOLS})
    messages(error.value)
    with pytest.raises(CorruptData, match="'add'") as error:
        written(silent, {"messages": TALK})
    messages(error.value)
    plain = build_writer(Data(source="jsonl", path=("x",), sequence_length=64), ByteTokenizer())
    for row in ({"messages": TALK}, {"messages": [TALK[1], TALK[9]], "tools": TOOLS}):
        with pytest.raises(CorruptData, match="plain") as error:
            plain.prepare_render_request(read_conversation(row, data()))
        messages(error.value)


@pytest.mark.skipif(PUBLISHED is None, reason="trl is not installed, which carries the templates of models")
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3_1", "glm4moe", "qwen3"])
@pytest.mark.parametrize("learn", ["all_turns", "last_turn"])
def test_published_templates_learn_what_is_called_and_answered(tmp_path, name, learn):
    assert PUBLISHED is not None and PUBLISHED.submodule_search_locations is not None
    path = Path(PUBLISHED.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    made = HuggingFaceTokenizer(chat.directory(tmp_path, path.read_text()))
    talk = [*TALK[:2], *TALK[7:]]
    if (name, learn) == ("qwen3", "all_turns"):  # which writes thoughts of the last turn only
        template = ChatTemplate(made)
        row = read_conversation({"messages": talk, "tools": TOOLS}, data())
        documents: Any = list(template.encode(chat.drafts(template, row)))
        for document, turn in zip(documents, (2, 4), strict=True):
            assert document.ids.tolist() == ids(made, talk[: turn + 1])
            assert document.loss_mask.tolist() == expected(made, talk[: turn + 1], [turn])
        return
    document = written(made, {"messages": talk, "tools": TOOLS}, learn=learn)
    turns = [2, 4] if learn == "all_turns" else [4]
    assert document.ids.tolist() == ids(made, talk)
    assert document.loss_mask.tolist() == expected(made, talk, turns)
