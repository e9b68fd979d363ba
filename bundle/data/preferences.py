"""Rows of preferences: a better and a worse answer to one prompt, as two conversations."""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from bundle.data.conversations import (
    ALIASES,
    CALLS,
    HISTORY,
    INPUT,
    INSTRUCTION,
    QUERY,
    RESPONSE,
    SHAREGPT,
    UNREAD,
    Conversation,
    Message,
    answered,
    is_tagged,
    list_shared_fields,
    listed,
    of_messages,
    read_answer,
    read_instruction,
    read_prompt,
    read_query,
    tag_fields,
)
from bundle.data.formats import Format, is_renamed, read_row
from bundle.data.sources import Corrupt, Values, text_of
from bundle.recipe.data import Data, Fields

# Of ms-swift, beside the better conversation.
REJECTED_RESPONSE, REJECTED_MESSAGES = "rejected_response", "rejected_messages"


class AnswerPair(NamedTuple):
    """A prompt and two answers to it."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def columns(fields: Fields) -> tuple[str, ...]:
    """All fields of a row that `preference` reads."""
    read = [name for each in _formats(fields) for name in (*each.fields, *each.optional)]
    return tuple(dict.fromkeys((*read, *list_shared_fields(fields), *tag_fields(fields), *UNREAD)))


def preference(values: Values, data: Data) -> tuple[Conversation, Conversation]:
    """The conversations of a row, the better one first; nothing of their prompt is learned.

    Raises Corrupt saying which field is wrong, and how.
    """
    fields, formats = data.fields, _formats(data.fields)
    if is_tagged(values, fields) and not any(each.is_complete(values) for each in formats):
        raise Corrupt(
            "has one answer and whether it is good (KTO), and DPO compares two answers. Make rows with"
            f" {fields.chosen} and {fields.rejected}, or set task: sft, which learns the good ones"
        )
    format_, (prompt, chosen, rejected) = read_row(values, formats, fields.format, list_shared_fields(fields))
    better, worse = (
        of_messages([dict(message) for message in (*prompt, *answer)], values, data, len(prompt))
        for answer in (chosen, rejected)
    )
    return replace(better, format=format_), replace(worse, format=format_)


def _formats(fields: Fields) -> list[Format[AnswerPair]]:
    """Return the formats of rows that have two answers."""
    chosen, rejected, messages = fields.chosen, fields.rejected, fields.messages
    answers = is_renamed(fields, "chosen", "rejected")

    def read_pair_after(read: Callable[[Values], list[Message]]) -> Callable[[Values], AnswerPair]:
        return lambda values: _pair(
            read(values), read_answer(values, chosen), read_answer(values, rejected), (chosen, rejected)
        )

    def are_answers(values: Values) -> bool:
        return not any(_has_prompt(values[name]) for name in (chosen, rejected))

    def with_prompt(name: str) -> Callable[[Values], list[Message]]:
        return lambda values: read_prompt(values, name)

    return [
        Format(
            "trl",
            (fields.prompt, chosen, rejected),
            read_pair_after(with_prompt(fields.prompt)),
            is_renamed=answers or is_renamed(fields, "prompt"),
            fits=are_answers,
        ),
        Format(
            "openai",
            (messages, chosen, rejected),
            read_pair_after(with_prompt(messages)),
            is_renamed=answers or is_renamed(fields, "messages"),
            fits=are_answers,
        ),
        Format(
            "sharegpt",
            (SHAREGPT, chosen, rejected),
            read_pair_after(with_prompt(SHAREGPT)),
            is_renamed=answers,
            fits=are_answers,
        ),
        Format(
            "alpaca",
            (INSTRUCTION, chosen, rejected),
            read_pair_after(read_instruction),
            (INPUT, HISTORY),
            is_renamed=answers,
            fits=are_answers,
        ),
        Format(
            "trl",
            (chosen, rejected),
            lambda values: _whole_pair(values, fields),
            is_renamed=answers,
        ),
        Format(
            "ms-swift",
            (messages, REJECTED_RESPONSE),
            lambda values: _other_ending(answered(values[messages], messages), values, messages),
            is_renamed=is_renamed(fields, "messages"),
        ),
        Format(
            "ms-swift",
            (messages, REJECTED_MESSAGES),
            lambda values: _split(values, messages, REJECTED_MESSAGES),
            is_renamed=is_renamed(fields, "messages"),
        ),
        Format(
            "ms-swift",
            (QUERY, RESPONSE, REJECTED_RESPONSE),
            lambda values: _other_ending(
                [*read_query(values), {"role": "assistant", "content": text_of(values, RESPONSE)}],
                values,
                RESPONSE,
            ),
            (HISTORY,),
        ),
    ]


def _pair(
    prompt: list[Message], chosen: list[Message], rejected: list[Message], names: tuple[str, str]
) -> AnswerPair:
    """Return the answers with their prompt. Raises Corrupt where there is nothing to prefer."""
    if chosen == rejected:
        raise Corrupt(f"fields {' and '.join(names)}: the same, so that neither is better")
    if not chosen or not rejected:
        raise Corrupt(f"fields {' and '.join(names)}: one is how the other begins")
    return AnswerPair(prompt, chosen, rejected)


def _has_prompt(answer: Any) -> bool:
    """Return whether it is a conversation that begins with what is answered."""
    first = answer[0] if isinstance(answer, list) and answer else answer
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return isinstance(role, str) and role not in CALLS and ALIASES.get(role, role) != "assistant"


def _whole_pair(values: Values, fields: Fields) -> AnswerPair:
    """Return the pair of two conversations that begin with their prompt."""
    chosen, rejected = fields.chosen, fields.rejected
    has_prompt = [_has_prompt(values[name]) for name in (chosen, rejected)]
    if not any(has_prompt):
        raise Corrupt(
            f"no prompt: none of the fields {fields.prompt}, {fields.messages}, {SHAREGPT} and {INSTRUCTION},"
            f" and {chosen} and {rejected} are no conversations that begin with one"
        )
    if not all(has_prompt):
        raise Corrupt(f"fields {chosen} and {rejected}: only one of them begins with its prompt")
    pair = _split(values, chosen, rejected)
    if isinstance(values.get(fields.prompt), list):
        prompt = listed(values[fields.prompt], fields.prompt)
        if pair.prompt[: len(prompt)] != prompt:
            raise Corrupt(
                f"field {fields.prompt}: {chosen} and {rejected} begin with another prompt. Leave out that of"
                f" {chosen} and {rejected}, or name the field {fields.prompt} otherwise"
            )
    return pair


def _split(values: Values, chosen: str, rejected: str) -> AnswerPair:
    """Return two conversations as answers to the turns that they begin with alike."""
    better, worse = (answered(values[name], name) for name in (chosen, rejected))
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(better, worse, strict=False))
    prompt = [message for message, _ in pairs]
    if not prompt and (better or worse):
        raise Corrupt(f"fields {chosen} and {rejected}: begin with different prompts")
    return _pair(prompt, better[len(prompt) :], worse[len(prompt) :], (chosen, rejected))


def _other_ending(better: list[Message], values: Values, name: str) -> AnswerPair:
    """Return the pair of a conversation and another last answer to it."""
    *prompt, chosen = better
    rejected: Message = {"role": "assistant", "content": text_of(values, REJECTED_RESPONSE)}
    return _pair(prompt, [chosen], [rejected], (name, REJECTED_RESPONSE))
