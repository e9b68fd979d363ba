"""SFT rows to token ids, and which of them are learned: only what the assistant says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bundle.errors import UsageError, shown
from bundle.recipe.sections import Data, Fields
from bundle.training.data.templates import ChatTemplate, Message
from bundle.training.data.tokenizers import HuggingFace, Tokenizer, Tokens

Learned = NDArray[np.bool_]
# The ids of each conversation and which of them are learned, or what is wrong with it.
Writer = Callable[[Sequence[list[Message]]], list[tuple[Tokens, Learned] | str]]
ROLES = ("system", "user", "assistant", "tool")


def messages_of(values: Mapping[str, Any], fields: Fields) -> list[Message] | str:
    """The conversation of a row (its messages, else its prompt and response), or what is wrong with it.

    A field that is null counts as missing where the row has the others: tables have every column in each row.
    """
    others = fields.prompt in values or fields.response in values
    if values.get(fields.messages) is not None or (fields.messages in values and not others):
        return _checked(values[fields.messages], fields.messages)
    for name in (fields.prompt, fields.response):
        text = values.get(name)
        if name not in values:
            return f"field {name}: missing; the row has {', '.join(map(str, values)) or 'no fields'}"
        if not isinstance(text, str) or not text.strip():
            return f"field {name}: must be text, is {shown(text)}"
    return [
        {"role": "user", "content": values[fields.prompt]},
        {"role": "assistant", "content": values[fields.response]},
    ]


def _checked(messages: Any, field: str) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"field {field}: must be a list of messages, is {shown(messages)}"
    for index, message in enumerate(messages):
        where = f"field {field}[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"{where}: must be an object with a role of {', '.join(ROLES)}, is {shown(message)}"
        if not isinstance(message.get("content"), str):
            return f"{where}: content must be text, is {shown(message.get('content'))}"
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        return f"field {field}: must end with what the assistant says"
    return [{key: value for key, value in one.items() if value is not None} for one in messages]


def writer(data: Data, tokenizer: Tokenizer) -> Writer:
    """What makes tokens of conversations as `data.template` says; many at once, for a tokenizer's threads.

    Raises UsageError where the tokenizer has no chat template that can be used.
    """
    if data.template == "plain":
        return lambda conversations: _plain(conversations, tokenizer, data.learn)
    if not isinstance(tokenizer, HuggingFace):
        raise UsageError(f"data.template: {data.tokenizer} has no chat template; use data.template: plain")
    template = ChatTemplate(tokenizer, data.learn)
    return lambda conversations: _templated(conversations, tokenizer, template)


def _plain(
    conversations: Sequence[list[Message]], tokenizer: Tokenizer, learn: str
) -> list[tuple[Tokens, Learned] | str]:
    """Under headings like "### User", the end of text after each turn of the assistant."""
    headed = (
        text
        for messages in conversations
        for message in messages
        for text in (f"### {message['role'].capitalize()}\n", f"{message['content']}\n")
    )
    encoded = iter(tokenizer.encode(list(headed)))
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    written: list[tuple[Tokens, Learned] | str] = []
    for messages in conversations:
        parts, learned = [], []
        for index, message in enumerate(messages):
            heading, said = islice(encoded, 2)
            answers = message["role"] == "assistant"
            parts += [heading, np.concatenate([said, end]) if answers else said]
            learned += [False, answers and (learn == "all_turns" or index == len(messages) - 1)]
        written.append((np.concatenate(parts), np.repeat(learned, [len(part) for part in parts])))
    return written


def _templated(
    conversations: Sequence[list[Message]], tokenizer: HuggingFace, template: ChatTemplate
) -> list[tuple[Tokens, Learned] | str]:
    """By the chat template: a token is learned when it begins in a part that is."""
    drafts = [template.write(messages) for messages in conversations]
    encoded = iter(tokenizer.encode_placed([draft[0] for draft in drafts if not isinstance(draft, str)]))

    def finished() -> Iterator[tuple[Tokens, Learned] | str]:
        for draft in drafts:
            if isinstance(draft, str):
                yield draft
                continue
            ids, places = next(encoded)
            learned = np.zeros(len(ids), np.bool_)
            for start, until in draft[1]:
                learned |= (places >= start) & (places < until)
            yield ids, learned

    return list(finished())
