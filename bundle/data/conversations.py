"""Rows of training files as conversations: messages, tools and what is learned, by the formats of rows."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bundle.data import media
from bundle.data.formats import Format, is_renamed, read_unambiguous_row
from bundle.data.media import Medium
from bundle.data.sources import CorruptData, Values, read_text
from bundle.errors import format_value
from bundle.recipe.data import Data, Fields, RowFormat

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None  # JSON schemas of the functions that may be called
ALLOWED_ROLES = ("system", "developer", "user", "assistant", "tool")
# The roles' names in ShareGPT, ms-swift and OpenAI's older format.
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
# The keys that say whether a turn is learned, in OpenAI, ms-swift and axolotl.
WEIGHT_KEYS = ("weight", "loss", "train")
SHAREGPT_FIELD = "conversations"
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
QUERY, RESPONSE = "query", "response"  # of ms-swift
COMPLETION_FIELD = "completion"  # of TRL
KTO_TAG_FIELD = "kto_tag"  # of LLaMA-Factory
UNSUPPORTED_MEDIA_FIELDS = ("audios",)  # media that rows may have and that are not read


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and which of them, by number, are learned."""

    messages: list[Message]  # role, content (text, or parts: text, images, videos), what else one may read
    learned_turns: Sequence[int]
    tools: Tools = None
    media: Sequence[Medium] = ()  # images and videos, in the order of their places
    format: str = ""  # how its row was read

    @property
    def learns_every_turn(self) -> bool:
        """True if every turn of the assistant is learned."""
        return len(self.learned_turns) == [message["role"] for message in self.messages].count("assistant")


def list_texts(message: Message) -> list[str]:
    """Return the texts of a message, without its images and videos."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


class RowReading(NamedTuple):
    """What a row says: its messages, of which the first `prompt_count` are not learned."""

    messages: list[Message]
    prompt_count: int = 0


def list_readable_columns(fields: Fields) -> tuple[str, ...]:
    """Return all fields of a row that `read_conversation` reads."""
    read = [
        name for row_format in _list_formats(fields) for name in (*row_format.fields, *row_format.optional)
    ]
    pair = (fields.chosen, fields.rejected)  # by which rows for DPO are known
    return tuple(
        dict.fromkeys(
            (
                *read,
                *list_format_independent_fields(fields),
                *list_kto_label_fields(fields),
                *pair,
                *UNSUPPORTED_MEDIA_FIELDS,
            )
        )
    )


def list_format_independent_fields(fields: Fields) -> tuple[str, ...]:
    """Return the fields that are read in every format, where a row has them."""
    return (*filter(None, (fields.system, fields.tools)), *media.list_media_keys(fields))


def read_conversation(values: Values, data: Data) -> Conversation:
    """Return the conversation of a row. Raise CorruptData, which says what is wrong with which field."""
    fields, formats = data.fields, _list_formats(data.fields)
    if _is_preference_pair(values, fields) and not any(
        row_format.is_complete(values) for row_format in formats
    ):
        raise CorruptData(
            f"fields {fields.chosen} and {fields.rejected}: two answers to compare. Set task: dpo, or train"
            f" on one: data.fields.response: {fields.chosen} (data.fields.messages for a whole conversation)"
        )
    shared = (*list_format_independent_fields(fields), *list_kto_label_fields(fields))
    format_, (messages, prompt_count) = read_unambiguous_row(values, formats, fields.format, shared)
    for name in list_kto_label_fields(fields):
        if values.get(name) is False:
            raise CorruptData(
                f"field {name}: false marks a bad answer (KTO), which must not be trained on. Skip the row"
                " (data.on_error: skip)"
                + ("" if name == KTO_TAG_FIELD else ", or set data.fields.label: null")
            )
    return replace(build_conversation(messages, values, data, prompt_count), format=format_)


def _is_preference_pair(values: Values, fields: Fields) -> bool:
    return all(values.get(name) is not None for name in (fields.chosen, fields.rejected))


def list_kto_label_fields(fields: Fields) -> tuple[str, ...]:
    """Return the fields that say whether an answer is a good one."""
    return (KTO_TAG_FIELD, *filter(None, (fields.label,)))


def has_kto_label(values: Values, fields: Fields) -> bool:
    """Return whether a row says whether its one answer is good, as rows for KTO do."""
    return any(isinstance(values.get(name), bool) for name in list_kto_label_fields(fields))


def build_conversation(
    messages: list[Message], values: Values, data: Data, prompt_count: int = 0
) -> Conversation:
    """Return a conversation of these messages with the tools, images and videos of its row.

    The first `prompt_count` messages are not learned.
    """
    if unread := [name for name in UNSUPPORTED_MEDIA_FIELDS if values.get(name)]:
        raise CorruptData(f"field {unread[0]}: only text, images and videos can be trained on")
    answers = len(messages) - prompt_count
    messages = _with_system(messages, values, data.fields.system)
    weights = [message.pop(WEIGHT_KEYS[0], True) for message in messages]
    answering = range(len(messages) - answers, len(messages))
    turns = [index for index in answering if messages[index]["role"] == "assistant" and weights[index]]
    if data.learn == "last_turn":
        turns = [index for index in turns if index == len(messages) - 1]
    if not turns:
        raise CorruptData("no turn to train on: the assistant messages have weight 0")
    conversation_media = media.pop_media(messages, media.find_columns_by_kind(values, data.fields))
    return Conversation(messages, turns, _read_tools(values, data.fields.tools), conversation_media)


def _list_formats(fields: Fields) -> list[Format[RowReading]]:
    """Return the formats of rows that have one conversation."""

    def build_list_reader(name: str) -> Callable[[Values], RowReading]:
        return lambda values: RowReading(read_answered_messages(values[name], name))

    def build_pair_reader(name: str) -> Callable[[Values], RowReading]:
        return lambda values: _build_reading(
            read_prompt_messages(values, fields.prompt), read_answer(values, name)
        )

    def build_format(name: str, *keys: str) -> Format[RowReading]:
        format_: RowFormat = "trl" if name == COMPLETION_FIELD else "prompt-response"
        return Format(
            format_,
            (fields.prompt, name),
            build_pair_reader(name),
            is_renamed=is_renamed(fields, "prompt", *keys),
        )

    messages = fields.messages
    prompts = {fields.response: build_format(fields.response, "response")}
    prompts.setdefault(COMPLETION_FIELD, build_format(COMPLETION_FIELD))
    return [
        Format("openai", (messages,), build_list_reader(messages), is_renamed=is_renamed(fields, "messages")),
        *prompts.values(),
        Format("ms-swift", (QUERY, RESPONSE), _read_query_response, (HISTORY,)),
        Format("sharegpt", (SHAREGPT_FIELD,), build_list_reader(SHAREGPT_FIELD)),
        Format("alpaca", (INSTRUCTION, OUTPUT), _read_alpaca, (INPUT, HISTORY)),
    ]


def _build_reading(prompt: list[Message], answer: list[Message]) -> RowReading:
    """Return a prompt and its answer; the prompt need not be marked where it has nothing to learn."""
    has_answers = any(message["role"] == "assistant" for message in prompt)
    return RowReading([*prompt, *answer], len(prompt) if has_answers else 0)


def read_prompt_messages(values: Values, name: str) -> list[Message]:
    """Return the messages that an answer follows, from a field that has a text or messages."""
    prompt = values.get(name)
    if not isinstance(prompt, list):
        return [{"role": "user", "content": read_text(values, name)}]
    messages = read_messages(prompt, name)
    if messages[-1]["role"] == "assistant":
        raise CorruptData(
            f"field {name}: ends with an assistant message, but must end before the answer. Remove that"
            " message."
        )
    return messages


def read_answer(values: Values, name: str) -> list[Message]:
    """Return an answer, from a field that has a text, a message, or messages ending with the assistant's."""
    answer = values.get(name)
    if isinstance(answer, dict):
        answer = [answer]
    if isinstance(answer, list):
        return read_answered_messages(answer, name)
    return [{"role": "assistant", "content": read_text(values, name)}]


def read_history(values: Values) -> list[Message]:
    """Return the turns of the field history, which come before the question."""
    history = values.get(HISTORY) or []
    if not isinstance(history, list) or not all(map(_is_question_answer_pair, history)):
        raise CorruptData(
            f"field {HISTORY}: must be a list of [question, answer] pairs without blank texts, but is"
            f" {format_value(history)}"
        )
    return _build_dialogue(history)


def read_history_and_query(values: Values) -> list[Message]:
    """Return the history and the question of a row of ms-swift."""
    return [*read_history(values), {"role": "user", "content": read_text(values, QUERY)}]


def read_instruction_prompt(values: Values) -> list[Message]:
    """Return the history and the question of Alpaca: instruction and input, a line each."""
    for name in (INSTRUCTION, INPUT):
        if not isinstance(values.get(name) or "", str):
            raise CorruptData(f"field {name}: must be text, but is {format_value(values[name])}")
    question = "\n".join(text for name in (INSTRUCTION, INPUT) if (text := values.get(name) or "").strip())
    if not question:
        raise CorruptData(f"fields {INSTRUCTION} and {INPUT}: both are blank, but one must have text")
    return [*read_history(values), {"role": "user", "content": question}]


def _read_query_response(values: Values) -> RowReading:
    answer = {"role": "assistant", "content": read_text(values, RESPONSE)}
    return RowReading([*read_history_and_query(values), answer])


def _read_alpaca(values: Values) -> RowReading:
    answer = {"role": "assistant", "content": read_text(values, OUTPUT)}
    return RowReading([*read_instruction_prompt(values), answer])


def _build_dialogue(turns: Sequence[Sequence[str]]) -> list[Message]:
    """Return the messages of (question, answer) pairs."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _is_question_answer_pair(value: Any) -> bool:
    texts = value if isinstance(value, list) and len(value) == 2 else ("", "")
    return all(isinstance(text, str) and bool(text.strip()) for text in texts)


def _with_system(messages: list[Message], values: Values, name: str | None) -> list[Message]:
    """Return the messages behind the system message of the row's own field, where the row has one."""
    if name is None or values.get(name) in (None, ""):
        return messages
    system = read_text(values, name)
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise CorruptData(
            f"field {name}: differs from the system message in the messages. Leave one of them out."
        )
    return messages


def _read_tools(values: Values, name: str | None) -> Tools:
    if name is None or values.get(name) in (None, ""):
        return None
    tools = _parse_json(values[name], f"field {name}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise CorruptData(
            f"field {name}: must be a list of objects or its JSON text, but is {format_value(tools)}"
        )
    return tools or None


def read_messages(value: Any, field: str) -> list[Message]:
    """Return a list of {role, content} or {from, value} as messages.

    A message has a role, a content and, where the row gives one, a weight.
    """
    if not isinstance(value, list) or not value:
        raise CorruptData(
            f"field {field}: must be a list with at least one message, but is {format_value(value)}"
        )
    return [_read_message(message, f"field {field}[{index}]") for index, message in enumerate(value)]


def read_answered_messages(value: Any, field: str) -> list[Message]:
    """Return what `read_messages` returns. Raise CorruptData unless the last message is the assistant's."""
    messages = read_messages(value, field)
    last = messages[-1]
    if last["role"] != "assistant" or not (last["content"].strip() or "tool_calls" in last):
        raise CorruptData(f"field {field}: must end with an assistant message that has text or tool calls")
    return messages


def _read_message(raw_message: Any, field_path: str) -> Message:
    rest: Message = {}
    if isinstance(raw_message, dict):
        rest = {key: value for key, value in raw_message.items() if value is not None}
    names = ("role", "content") if "role" in rest else ("from", "value")
    role, content = (rest.pop(name, None) for name in names)
    if role in CALL_ROLES:
        role, content, rest["tool_calls"] = "assistant", None, content
    role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ALLOWED_ROLES:
        raise CorruptData(
            f"{field_path}: must be an object with the role"
            f" {', '.join(ALLOWED_ROLES[:-1])} or {ALLOWED_ROLES[-1]}, but is {format_value(raw_message)}"
        )
    if weights := {name: rest.pop(name) for name in WEIGHT_KEYS if name in rest}:
        keys, first = " and ".join(weights), next(iter(weights.values()))
        if any(weight not in (0, 1) or weight != first for weight in weights.values()):
            raise CorruptData(
                f"{field_path}: {keys} must be {'equal, ' if len(weights) > 1 else ''}0 or 1, but the"
                f" message has {format_value(weights)}"
            )
        if first and role != "assistant":
            raise CorruptData(
                f"{field_path}: {keys} must be 0 or absent, because only assistant messages are trained on"
            )
        rest[WEIGHT_KEYS[0]] = bool(first)
    calls = [rest.pop("function_call")] if "function_call" in rest else rest.pop("tool_calls", None)
    if calls:
        rest["tool_calls"] = _read_calls(calls, f"{field_path}.tool_calls")
        content = "" if content is None else content
    content = _read_content(content, f"{field_path}: content")
    if role == "assistant" and not isinstance(content, str):
        raise CorruptData(
            f"{field_path}: an assistant message must be text, and this one has an image or a video"
        )
    return {"role": role, "content": content, **rest}


def _read_content(value: Any, field_path: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts where some of them are images or videos.

    Parts that are all text are joined to one text.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise CorruptData(
            f"{field_path} must be text or a list of one or more objects, but is {format_value(value)}"
        )
    parts = []
    for part in value:
        if part.get("type") in media.MEDIA_KIND_BY_PART_TYPE:
            parts.append(media.normalize_media_part(part, field_path))
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise CorruptData(
                f"{field_path} must have only parts with text, an image or a video, but one is"
                f" {format_value(part)}"
            )
    if any(part["type"] in media.MEDIA_KINDS for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _read_calls(value: Any, field_path: str) -> list[dict[str, Any]]:
    """Return calls of functions as {type, function: {name, arguments}}, with the arguments as an object."""
    value = _parse_json(value, field_path)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        arguments = {} if arguments in (None, "") else _parse_json(arguments, f"{field_path}: arguments")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CorruptData(
                f"{field_path}: each call must be an object with a function's name and arguments, but is"
                f" {format_value(call)}"
            )
        if not isinstance(arguments, dict):
            raise CorruptData(
                f"{field_path}: arguments must be an object or its JSON text, but is"
                f" {format_value(arguments)}"
            )
        identity = {"id": call["id"]} if "id" in call else {}
        function_call = {"name": function["name"], "arguments": arguments}
        calls.append({**identity, "type": "function", "function": function_call})
    return calls


def _parse_json(value: Any, field_path: str) -> Any:
    """Return the value of a JSON text; return a value that is not text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise CorruptData(f"{field_path}: not JSON ({error})") from error
