"""Rows in the formats that data sets have: what conversation each is, or why it is none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.data import prepare
from bundle.data.conversations import list_readable_columns, read_conversation
from bundle.data.sources import CorruptData, DataErrors
from bundle.data.sources import read_rows as table_rows
from bundle.errors import UsageError
from bundle.recipe import load
from bundle.recipe.data import Data, Fields
from bundle.recipe.datafiles import expand

CALL = {"name": "add", "arguments": {"a": 1, "b": None}}
CALLED = [{"type": "function", "function": CALL}]
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def data(**keys):
    return Data(source="jsonl", path=("rows.jsonl",), sequence_length=64, **keys)


def read_messages(row, **keys):
    return read_conversation(row, data(**keys)).messages


def refusal(row, **keys):
    with pytest.raises(CorruptData) as caught:
        read_conversation(row, data(**keys))
    return str(caught.value)


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def test_sharegpt_has_other_words_for_the_same():
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("user", "q2"), ("assistant", "a2")]
    row = {"id": 7, "conversations": [{"from": role, "value": text} for role, text in turns]}
    assert read_messages(row) == [{"role": "system", "content": "s"}, *talk("q", "a", "q2", "a2")]


def test_sharegpt_calls_of_functions_and_what_they_gave():
    turns = [
        ("human", "1+?"),
        ("function_call", json.dumps(CALL)),
        ("observation", "1"),
        ("function_call", json.dumps([CALL, {"name": "now", "arguments": ""}])),
        ("tool", "2"),
        ("gpt", "2!"),
    ]
    row = {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "tools": json.dumps([SCHEMA]),
    }
    found = read_conversation(row, data())
    assert found.tools == [SCHEMA] and found.learned_turns == [1, 3, 5]
    assert found.messages == [
        {"role": "user", "content": "1+?"},
        {"role": "assistant", "content": "", "tool_calls": CALLED},
        {"role": "tool", "content": "1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [*CALLED, {"type": "function", "function": {"name": "now", "arguments": {}}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2!"},
    ]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "add", "input": "1, 1", "output": "2"}, "add\n1, 1"),
        ({"instruction": "add", "input": "", "output": "2", "text": "whole"}, "add"),
        ({"instruction": "add", "output": "2"}, "add"),
        ({"instruction": "", "input": "1+1", "output": "2", "system": "", "history": None}, "1+1"),
    ],
)
def test_alpaca_asks_with_instruction_and_input(row, asked):
    assert read_messages(row) == talk(asked, "2")


def test_alpaca_may_have_a_system_message_and_a_history():
    row = {"instruction": "q3", "output": "a3", "system": "s", "history": [["q1", "a1"], ["q2", "a2"]]}
    found = read_conversation(row, data())
    assert found.messages == [{"role": "system", "content": "s"}, *talk("q1", "a1", "q2", "a2", "q3", "a3")]
    assert found.learned_turns == [2, 4, 6] and read_conversation(
        row, data(learn="last_turn")
    ).learned_turns == [6]


CHAT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
# rows as data sets have them, and how each is read
FORMATS = [
    ("openai (messages, tools)", {"messages": talk("q", "a"), "tools": [SCHEMA]}),
    ("openai (messages, system, label)", {"messages": talk("q", "a"), "system": "s", "label": True}),
    ("prompt-response (prompt, response)", {"prompt": "q", "response": "a"}),
    ("trl (prompt, completion)", {"prompt": "q", "completion": "a"}),
    ("trl (prompt, completion)", {"prompt": talk("q"), "completion": talk("q", "a")[1:]}),
    ("trl (prompt, completion, label)", {"prompt": "q", "completion": "a", "label": True}),
    ("ms-swift (query, response)", {"query": "q", "response": "a", "history": []}),
    ("ms-swift (query, response, system)", {"query": "q", "response": "a", "system": "s"}),
    ("sharegpt (conversations)", {"id": 1, "conversations": CHAT}),
    ("sharegpt (conversations, kto_tag)", {"conversations": CHAT, "kto_tag": True}),
    ("alpaca (instruction, output)", {"instruction": "q", "input": "", "output": "a"}),
    ("alpaca (instruction, output, kto_tag)", {"instruction": "q", "output": "a", "kto_tag": True}),
    # of UltraFeedback, binarized: the better conversation stands beside the pair
    ("openai (messages)", {"prompt": "q", "messages": talk("q", "a"), "chosen": [], "rejected": []}),
]


@pytest.mark.parametrize(("format_", "row"), FORMATS)
def test_the_format_of_a_row_is_found_by_its_fields(format_, row):
    assert row.keys() - list_readable_columns(Fields()) <= {"id"}  # which are read of a table
    found = read_conversation(row, data())
    assert found.format == format_
    assert [m for m in found.messages if m["role"] != "system"] == talk("q", "a")
    assert [found.messages[turn]["content"] for turn in found.learned_turns] == ["a"]


def test_turns_of_a_prompt_are_not_learned():
    row = {"prompt": talk("q", "a", "q2"), "completion": "a2"}
    found = read_conversation(row, data())
    assert found.messages == talk("q", "a", "q2", "a2") and found.learned_turns == [3]
    row = {"query": "q2", "response": "a2", "history": [["q", "a"]]}
    assert read_conversation(row, data()).messages == talk("q", "a", "q2", "a2")
    assert read_conversation(row, data()).learned_turns == [1, 3]  # of a history they are


def test_a_row_that_two_formats_read_differently_is_refused_until_one_is_named(messages):
    row: dict[str, Any] = {"instruction": "i", "output": "o", "conversations": CHAT, "messages": None}
    why = refusal(row)
    assert "sharegpt (conversations)" in why and "alpaca (instruction, output)" in why
    assert "sharegpt or alpaca" in why
    messages(why)
    assert read_messages(row, fields=Fields(format="alpaca")) == talk("i", "o")
    assert read_messages(row, fields=Fields(format="sharegpt")) == talk("q", "a")
    assert "messages: is null" in refusal(row, fields=Fields(format="openai"))
    assert read_messages(row, fields=Fields(messages="conversations")) == talk("q", "a")
    assert read_messages(row, fields=Fields(prompt="instruction", response="output")) == talk("i", "o")
    same = {"prompt": "q", "response": "a", "messages": talk("q", "a"), "conversations": CHAT}
    assert read_conversation(same, data()).format == "openai (messages)"
    broken = {"messages": talk("q"), "conversations": CHAT}  # which has one reading
    assert read_conversation(broken, data()).format == "sharegpt (conversations)"
    earlier = {"prompt": talk("q", "a", "q2"), "response": "a2", "messages": talk("q", "a", "q2", "a2")}
    assert "or prompt-response" in refusal(earlier)  # of the prompt's turns one would learn
    both = {"prompt": "q", "response": "a", "completion": "b"}
    assert "response or trl" in refusal(both)
    assert read_messages(both, fields=Fields(response="completion")) == talk("q", "b")


@pytest.mark.parametrize("field", ["kto_tag", "label"])
def test_an_answer_that_is_marked_as_bad_is_not_learned(field):
    for row in ({"prompt": "q", "completion": "a"}, {"conversations": CHAT}):
        assert f"field {field}: false" in refusal(row | {field: False})
        assert read_conversation(row | {field: True}, data()).learned_turns == [1]
    assert read_conversation({"messages": talk("q", "a"), "label": 0}, data()).learned_turns == [1]
    classes = {"messages": talk("q", "a"), "label": False}
    assert read_conversation(classes, data(fields=Fields(label=None))).learned_turns == [1]


def test_two_answers_to_compare_are_not_rows_of_sft():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert {"chosen", "rejected"} <= set(list_readable_columns(Fields())) and "task: dpo" in refusal(row)
    assert read_messages(row, fields=Fields(response="chosen")) == talk("q", "a")
    whole = {"prompt": "q", "chosen": talk("q", "a"), "rejected": talk("q", "b")}
    assert read_messages(whole, fields=Fields(messages="chosen")) == talk("q", "a")


def test_either_list_may_have_either_words_for_a_message():
    assert read_messages({"conversations": talk("q", "a")}) == talk("q", "a")
    assert read_messages(
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    ) == talk("q", "a")


def test_a_system_message_beside_the_conversation_comes_first_and_only_once(messages):
    system = {"role": "system", "content": "s"}
    for row in ({"messages": talk("q", "a")}, {"prompt": "q", "response": "a"}):
        assert read_messages(row | {"system": "s"}) == [system, *talk("q", "a")]
        assert read_messages(row | {"system": "s"}, fields=Fields(system=None)) == talk("q", "a")
        assert read_messages(row | {"persona": "s"}, fields=Fields(system="persona")) == [
            system,
            *talk("q", "a"),
        ]
    same = {"messages": [system, *talk("q", "a")], "system": "s"}
    assert read_messages(same) == same["messages"]
    for wrong in ("t", 3):
        why = refusal(same | {"system": wrong})
        assert why.startswith("field system: ")
        messages(why)


def test_developer_and_tool_are_roles_and_what_a_template_may_read_stays():
    rows = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": CALL}]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "2", "reasoning_content": "so", "tool_calls": []},
    ]
    found = read_messages({"messages": rows})
    assert [message["role"] for message in found] == ["developer", "user", "assistant", "tool", "assistant"]
    assert found[1]["name"] == "me" and found[3]["tool_call_id"] == "x"
    assert found[2] == {"role": "assistant", "content": "", "tool_calls": [{"id": "x", **CALLED[0]}]}
    assert found[4] == {"role": "assistant", "content": "2", "reasoning_content": "so"}


def test_arguments_are_an_object_also_where_they_are_written_as_json():
    call = {"id": "x", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
    for said in ({"tool_calls": [call]}, {"function_call": call["function"]}):
        rows = [*talk("q"), {"role": "assistant", **said}]
        (made,) = read_messages({"messages": rows})[1]["tool_calls"]
        assert made["function"] == CALL and made["type"] == "function"


def test_parts_of_a_content_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert read_messages({"messages": [{"role": "user", "content": parts}, *talk("", "x")[1:]]}) == talk(
        "a b", "x"
    )


@pytest.mark.parametrize("word", ["weight", "loss", "train"])
def test_turns_can_say_themselves_whether_they_are_learned(word, messages):
    def turns(*flags, **keys):
        rows = talk("q", "a", "q", "a")
        for row, flag in zip(rows, flags, strict=True):
            row |= {} if flag is None else {word: flag}
        found = read_conversation({"messages": rows}, data(**keys))
        assert found.messages == talk("q", "a", "q", "a")
        return found.learned_turns, found.learns_every_turn

    assert turns(None, None, None, None) == ([1, 3], True)
    assert turns(None, 0, None, 1) == ([3], False)
    assert turns(0, 1.0, False, False) == ([1], False)
    assert turns(None, True, None, None, learn="last_turn") == ([3], False)
    rows = [*talk("q"), {"role": "assistant", "content": "a", word: 0}]
    nothing = refusal({"messages": rows})
    assert "no turn" in nothing
    messages(nothing)
    for wrong in (2, 0.5, "1", [1]):
        rows[1][word] = wrong
        why = refusal({"messages": rows})
        assert "messages[1]" in why and repr(wrong) in why
        messages(why)
    rows[0][word] = 1
    why = refusal({"messages": rows})
    assert "messages[0]" in why
    messages(why)
    last = {"role": "assistant", "content": "a", "weight": 0}
    assert refusal({"messages": [*talk("q", "a", "q"), last]}, learn="last_turn") == nothing


def answered(**said):
    return {"messages": [*talk("q"), {"role": "assistant", **said}]}


def asked(content):
    return {"messages": [{"role": "user", "content": content}, *talk("q", "a")[1:]]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "x"}, "question"),
        ({}, "no fields"),
        ({"conversations": None}, "field conversations"),
        ({"conversations": [{"from": "gpt"}]}, "field conversations[0]: content"),
        ({"conversations": [{"value": "x"}]}, "field conversations[0]"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "conversations[0]"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "field conversations"),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "tool_calls: not JSON"),
        ({"conversations": [{"from": "function_call"}]}, "conversations[0]: content"),
        ({"instruction": "x", "response": "y"}, "field prompt"),
        ({"instruction": "x"}, "field output"),
        ({"instruction": 1, "output": "y"}, "field instruction"),
        ({"instruction": "x", "input": ["y"], "output": "y"}, "field input"),
        ({"instruction": " ", "output": "y"}, "instruction and input"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "field history"),
        ({"instruction": "x", "output": "y", "history": [["a", ""]]}, "field history"),
        ({"instruction": "x", "output": "y", "history": "a"}, "field history"),
        (asked([{"type": "text", "text": "x"}, {"type": "audio"}]), "{'type': 'audio'}"),
        (asked([{"type": "text", "text": None}]), "{'type': 'text', 'text': None}"),
        (asked([]), "field messages[0]: content"),
        (answered(content=None), "field messages[1]: content"),
        (answered(tool_calls=[]), "field messages[1]: content"),
        (answered(tool_calls=["x"]), "'x'"),
        (answered(tool_calls={"function": None}), "tool_calls"),
        (answered(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), "arguments"),
        (answered(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "arguments: not JSON"),
        (answered(content="a") | {"tools": "{}"}, "field tools"),
        (answered(content="a") | {"tools": "x"}, "field tools: not JSON"),
        (answered(content="a") | {"tools": ["x"]}, "field tools"),
    ],
)
def test_rows_that_are_none_are_named_by_field(row, named, messages):
    why = refusal(row)
    assert named in why
    messages(why)


def read(sources, errors):
    """The conversations of tables."""
    given = table_rows(sources, list_readable_columns(Fields()), errors)
    return (made for _, made in errors.convert_rows(given, lambda row: read_conversation(row, data())))


GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "x", "user", "gpt", "{}", "[1]"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "tool_calls", "function", "name", "type", "weight"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = (
    "messages conversations prompt response completion query system tools instruction input output history"
    " images kto_tag label"
)


@given(st.dictionaries(st.sampled_from(FIELDS.split()), GARBAGE, max_size=5))
def test_any_row_is_a_conversation_that_a_template_can_take_or_says_why_not(row):
    try:
        found = read_conversation(row, data())
    except CorruptData:
        return
    assert all(isinstance(message["content"], str) for message in found.messages)
    assert {found.messages[index]["role"] for index in found.learned_turns} == {"assistant"}


def test_broken_rows_of_all_formats_are_told_at_once_by_file_and_line(tmp_path):
    deep = '{"conversations": ' + '{"a":' * 900 + "1" + "}" * 901
    rows = ['{"prompt": "q", "response": "a"}', '{"conversations": [7]}', '{"instruction": "x"}', deep, "{}"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows))
    made = load("demo", ["task=sft", "data.source=jsonl", f"data.path={path}"])
    with pytest.raises(UsageError) as caught:
        prepare(made, tmp_path / "data")
    assert [line.split(": ")[0] for line in caught.value.violations] == [f"{path}:{n}" for n in (2, 3, 4, 5)]


def test_a_table_has_the_same_conversations(tmp_path):
    """Structs of a table have every field in each row: what is null there was not said."""
    pa = pytest.importorskip("pyarrow", exc_type=ImportError)
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
    }
    rows: list[dict[str, Any]] = [
        {"messages": [*talk("q"), called, {"role": "tool", "content": "1"}, *talk("", "a")[1:]]},
        {"messages": [{"role": "user", "content": "q", "weight": 0}, *talk("", "a")[1:]], "system": "s"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {
            "prompt": "q",
            "response": "a",
            "tools": [{"name": "add", "parameters": {"a": {"type": "integer"}}}],
        },
        {"prompt": "q", "response": "a", "tools": [{"name": "now", "parameters": {"b": {"type": "string"}}}]},
        {"instruction": "i", "output": "o", "history": [["q", "a"]]},
    ]
    parquet.write_table(
        pa.Table.from_pylist([dict.fromkeys(FIELDS.split()) | row for row in rows]), tmp_path / "x.parquet"
    )
    errors = DataErrors("stop")
    found = list(read((*expand([str(tmp_path)], "parquet"),), errors))
    assert errors.corrupt.count == 0 and found == [read_conversation(row, data()) for row in rows]
