"""Templates of the shapes of published models: what is learned of one turn and several, tools and thoughts.

Two oracles share no code with what is tested: the learned text of a turn is written by hand
(`published.Shape`), and what stands before it is the prompt by transformers' own apply_chat_template.
"""

import itertools
import json

import numpy as np
import pytest

from bundle.data.chat import ChatTemplate, build_writer
from bundle.data.conversations import read_conversation
from bundle.data.sources import CorruptData
from bundle.data.tokenizers import HuggingFaceTokenizer
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.data import Data
from tests.data import chat
from tests.data.published import SHAPES
from tests.data.test_tools import TOOLS

TODAY = "2026-01-31"
LENGTHS = (("all_turns", 1), ("all_turns", 3), ("last_turn", 3))
CASES = list(itertools.product(LENGTHS, (False, True), (False, True), (None, "content", "reasoning_content")))


def data(learn):
    return Data(source="jsonl", path=("rows.jsonl",), sequence_length=64, learn=learn)


def assistant(text, thought, field, **keys):
    if field == "reasoning_content":
        keys |= {field: thought}
    elif field == "content":
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    return {"role": "assistant", "content": text, **keys}


def talk(turns, tools, system, thoughts):
    messages = [{"role": "system", "content": "Be short."}] if system else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {turn}?"})
        if tools:
            function = {"name": "add", "arguments": {"a": turn}}
            calls = [{"id": f"call{turn:05}", "type": "function", "function": function}]
            messages.append(assistant("", f"Call it for {turn}.", thoughts, tool_calls=calls))
            messages.append(
                {"role": "tool", "name": "add", "tool_call_id": f"call{turn:05}", "content": f"It is\n{turn}"}
            )
        messages.append(assistant(f"Answer {turn}.", f"Thought {turn}.", thoughts))
    return messages


@pytest.fixture(scope="module", params=SHAPES)
def writes(request, tmp_path_factory):
    shape = SHAPES[request.param]
    made = HuggingFaceTokenizer(chat.directory(tmp_path_factory.mktemp("tokenizer"), shape.template))
    return shape, made, ChatTemplate(made, TODAY)


def prompt(shape, made, messages, tools):
    """What the model is asked, by transformers."""
    if shape.joins_arguments:
        messages = json.loads(json.dumps(messages))
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    source = shape.template.replace("strftime_now('%Y-%m-%d')", f"'{TODAY}'")
    text = made._tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    return text.removesuffix(shape.opens)


def learned(made, documents):
    """(what stands before, what is learned) of each run of learned tokens, as text."""
    for document in documents:
        ids, mask = document.ids, np.asarray(document.loss_mask, np.int8)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2).tolist():
            yield made.decode(ids[:begin].tolist()), made.decode(ids[begin:end].tolist())


@pytest.mark.parametrize(("length", "tools", "system", "thoughts"), CASES)
def test_each_turn_is_learned_behind_the_prompt_for_it(writes, length, tools, system, thoughts):
    (shape, made, template), (learn, turns) = writes, length
    messages, functions = talk(turns, tools, system, thoughts), TOOLS if tools else None
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    asked = asked if learn == "all_turns" else asked[-1:]
    chosen = read_conversation({"messages": messages, "tools": functions}, data(learn))
    says = [shape.says(messages[index]) for index in asked]
    if (tools and not shape.tools) or (system and shape.refuses_system) or None in says:
        with pytest.raises(CorruptData) as caught:
            chat.drafts(template, chosen)
        if system and shape.refuses_system and not tools:
            assert str(caught.value).endswith(shape.refuses_system)
        return
    documents = list(template.encode(chat.drafts(template, chosen)))
    expected = [
        (prompt(shape, made, messages[:index], functions), said)
        for index, said in zip(asked, says, strict=True)
    ]
    assert list(learned(made, documents)) == expected


def test_arguments_are_given_to_the_template_and_change_the_prompt(tmp_path):
    made = HuggingFaceTokenizer(chat.directory(tmp_path, SHAPES["glm-4.5"].template))
    chosen = Data(**(data("all_turns").dump() | {"path": ("r",), "template": "chat"}))
    asked = {"template_arguments": {"enable_thinking": False}}
    arguments = Data.model_validate(chosen.model_dump() | asked)
    messages = talk(1, False, False, None)
    template = build_writer(arguments, made)
    ((before, said),) = learned(
        made, template.encode(chat.drafts(template, read_conversation({"messages": messages}, chosen)))
    )
    theirs = made._tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert (before, said) == (theirs, "\nAnswer 0.") and "/nothink" in theirs
    for name in ("enable_thinkin", "messages"):
        with pytest.raises(UsageError, match=name):
            ChatTemplate(made, None, {name: False})


def test_plain_takes_no_arguments():
    keys = ["task=sft", "data.source=jsonl", "data.template_arguments.enable_thinking=false"]
    with pytest.raises(UsageError) as caught:
        load("demo", keys)
    assert any("data.template_arguments" in line for line in caught.value.violations)
