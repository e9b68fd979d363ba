"""Rows of preferences: a better and a worse answer to one prompt, as two conversations."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from bundle.data.conversations import (
    CALL_ROLES,
    HISTORY,
    INPUT,
    INSTRUCTION,
    QUERY,
    RESPONSE,
    ROLE_ALIASES,
    SHAREGPT_FIELD,
    UNSUPPORTED_MEDIA_FIELDS,
    Conversation,
    Message,
    build_conversation,
    has_kto_label,
    list_format_independent_fields,
    list_kto_label_fields,
    read_answer,
    read_answered_messages,
    read_history_and_query,
    read_instruction_prompt,
    read_messages,
    read_prompt_messages,
)
from bundle.data.formats import Format, is_renamed, read_unambiguous_row
from bundle.data.sources import CorruptData, Values, read_text
from bundle.recipe.data import Data, Fields

# The fields of ms-swift for the worse answer; the row's conversation is the better one.
REJECTED_RESPONSE, REJECTED_MESSAGES = "rejected_response", "rejected_messages"


class AnswerPair(NamedTuple):
    """A prompt and two answers to it."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def list_readable_columns(fields: Fields) -> tuple[str, ...]:
    """Return all fields of a row that `read_preference` reads."""
    read = [
        name for row_format in _list_formats(fields) for name in (*row_format.fields, *row_format.optional)
    ]
    return tuple(
        dict.fromkeys(
            (
                *read,
                *list_format_independent_fields(fields),
                *list_kto_label_fields(fields),
                *UNSUPPORTED_MEDIA_FIELDS,
            )
        )
    )


def read_preference(values: Values, data: Data) -> tuple[Conversation, Conversation]:
    """Return the two conversations of a row, the better one first; nothing in their prompt is learned.

    Raise CorruptData, which says what is wrong with which field.
    """
    fields, formats = data.fields, _list_formats(data.fields)
    if has_kto_label(values, fields) and not any(row_format.is_complete(values) for row_format in formats):
        raise CorruptData(
            "the row has one answer and says whether it is good (KTO), but DPO compares two answers. Make"
            f" rows with {fields.chosen} and {fields.rejected}, or set task: sft, which trains on the good"
            " answers"
        )
    format_, (prompt, chosen, rejected) = read_unambiguous_row(
        values, formats, fields.format, list_format_independent_fields(fields)
    )
    better, worse = (
        build_conversation([dict(message) for message in (*prompt, *answer)], values, data, len(prompt))
        for answer in (chosen, rejected)
    )
    return replace(better, format=format_), replace(worse, format=format_)


def _list_formats(fields: Fields) -> list[Format[AnswerPair]]:
    """Return the formats of rows that have two answers."""
    chosen, rejected, messages = fields.chosen, fields.rejected, fields.messages
    has_renamed_answers = is_renamed(fields, "chosen", "rejected")

    def build_pair_reader(read: Callable[[Values], list[Message]]) -> Callable[[Values], AnswerPair]:
        return lambda values: _build_pair(
            read(values), read_answer(values, chosen), read_answer(values, rejected), (chosen, rejected)
        )

    def are_answers(values: Values) -> bool:
        return not any(_has_prompt(values[name]) for name in (chosen, rejected))

    def build_prompt_reader(name: str) -> Callable[[Values], list[Message]]:
        return lambda values: read_prompt_messages(values, name)

    return [
        Format(
            "trl",
            (fields.prompt, chosen, rejected),
            build_pair_reader(build_prompt_reader(fields.prompt)),
            is_renamed=has_renamed_answers or is_renamed(fields, "prompt"),
            fits=are_answers,
        ),
        Format(
            "openai",
            (messages, chosen, rejected),
            build_pair_reader(build_prompt_reader(messages)),
            is_renamed=has_renamed_answers or is_renamed(fields, "messages"),
            fits=are_answers,
        ),
        Format(
            "sharegpt",
            (SHAREGPT_FIELD, chosen, rejected),
            build_pair_reader(build_prompt_reader(SHAREGPT_FIELD)),
            is_renamed=has_renamed_answers,
            fits=are_answers,
        ),
        Format(
            "alpaca",
            (INSTRUCTION, chosen, rejected),
            build_pair_reader(read_instruction_prompt),
            (INPUT, HISTORY),
            is_renamed=has_renamed_answers,
            fits=are_answers,
        ),
        Format(
            "trl",
            (chosen, rejected),
            lambda values: _read_implicit_prompt_pair(values, fields),
            is_renamed=has_renamed_answers,
        ),
        Format(
            "ms-swift",
            (messages, REJECTED_RESPONSE),
            lambda values: _add_rejected_response(
                read_answered_messages(values[messages], messages), values, messages
            ),
            is_renamed=is_renamed(fields, "messages"),
        ),
        Format(
            "ms-swift",
            (messages, REJECTED_MESSAGES),
            lambda values: _split_prompt(values, messages, REJECTED_MESSAGES),
            is_renamed=is_renamed(fields, "messages"),
        ),
        Format(
            "ms-swift",
            (QUERY, RESPONSE, REJECTED_RESPONSE),
            lambda values: _add_rejected_response(
                [
                    *read_history_and_query(values),
                    {"role": "assistant", "content": read_text(values, RESPONSE)},
                ],
                values,
                RESPONSE,
            ),
            (HISTORY,),
        ),
    ]


def _build_pair(
    prompt: list[Message], chosen: list[Message], rejected: list[Message], field_names: tuple[str, str]
) -> AnswerPair:
    """Return the answers with their prompt. Raises CorruptData where there is nothing to prefer."""
    if chosen == rejected:
        raise CorruptData(f"fields {' and '.join(field_names)}: are the same, so neither is better")
    if not chosen or not rejected:
        raise CorruptData(
            f"fields {' and '.join(field_names)}: one begins with all messages of the other, so a second"
            " answer is missing"
        )
    return AnswerPair(prompt, chosen, rejected)


def _has_prompt(answer: Any) -> bool:
    """Return whether an answer is a conversation that begins with its prompt."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return isinstance(role, str) and role not in CALL_ROLES and ROLE_ALIASES.get(role, role) != "assistant"


def _read_implicit_prompt_pair(values: Values, fields: Fields) -> AnswerPair:
    """Return the pair of two conversations that begin with their prompt."""
    chosen, rejected = fields.chosen, fields.rejected
    has_prompt = [_has_prompt(values[name]) for name in (chosen, rejected)]
    if not any(has_prompt):
        raise CorruptData(
            f"no prompt: the row needs a field {fields.prompt}, {fields.messages}, {SHAREGPT_FIELD} or"
            f" {INSTRUCTION}. Without it, {chosen} and {rejected} must both begin with the prompt"
        )
    if not all(has_prompt):
        raise CorruptData(
            f"fields {chosen} and {rejected}: only one of them begins with the prompt. Let both or neither"
            " begin with it"
        )
    pair = _split_prompt(values, chosen, rejected)
    if isinstance(values.get(fields.prompt), list):
        prompt = read_messages(values[fields.prompt], fields.prompt)
        if pair.prompt[: len(prompt)] != prompt:
            raise CorruptData(
                f"field {fields.prompt}: {chosen} and {rejected} begin with another prompt. Leave the"
                f" prompt out of {chosen} and {rejected}, or rename the field {fields.prompt}"
            )
    return pair


def _split_prompt(values: Values, chosen: str, rejected: str) -> AnswerPair:
    """Return two conversations as answers to the turns that they begin with alike."""
    better, worse = (read_answered_messages(values[name], name) for name in (chosen, rejected))
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(better, worse, strict=False))
    prompt = [message for message, _ in pairs]
    if not prompt and (better or worse):
        raise CorruptData(f"fields {chosen} and {rejected}: begin with different prompts")
    return _build_pair(prompt, better[len(prompt) :], worse[len(prompt) :], (chosen, rejected))


def _add_rejected_response(better: list[Message], values: Values, name: str) -> AnswerPair:
    """Return the pair of a conversation and another last answer to it."""
    *prompt, chosen = better
    rejected: Message = {"role": "assistant", "content": read_text(values, REJECTED_RESPONSE)}
    return _build_pair(prompt, [chosen], [rejected], (name, REJECTED_RESPONSE))
