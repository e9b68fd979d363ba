"""SFT rows to token ids, and which of them are learned: only what the assistant says."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bundle.recipe.sections import Fields
from bundle.training.data.tokenizers import HuggingFace, Tokenizer, Tokens

Learned = NDArray[np.bool_]
Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def messages_of(values: Mapping[str, Any], fields: Fields) -> list[Message] | str:
    """The conversation of a row (its messages, else its prompt and response), or what is wrong with it."""
    if fields.messages in values:
        return _checked(values[fields.messages], fields.messages)
    for name in (fields.prompt, fields.response):
        text = values.get(name)
        if name not in values:
            return f"field {name}: missing; the row has {', '.join(map(str, values)) or 'no fields'}"
        if not isinstance(text, str) or not text.strip():
            return f"field {name}: must be text, is {_shown(text)}"
    return [
        {"role": "user", "content": values[fields.prompt]},
        {"role": "assistant", "content": values[fields.response]},
    ]


def _checked(messages: Any, field: str) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"field {field}: must be a list of messages, is {_shown(messages)}"
    for index, message in enumerate(messages):
        where = f"field {field}[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"{where}: must be an object with a role of {', '.join(ROLES)}, is {_shown(message)}"
        if not isinstance(message.get("content"), str):
            return f"{where}: content must be text, is {_shown(message.get('content'))}"
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        return f"field {field}: must end with what the assistant says"
    return messages


def plain(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[Tokens, Learned]:
    """The conversation under headings like "### User", the end of text after each turn of the assistant."""
    texts, learned = [], []
    for message in messages:
        texts += [f"### {message['role'].capitalize()}\n", f"{message['content']}\n"]
        learned += [False, message["role"] == "assistant"]
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    parts = [
        np.concatenate([ids, end]) if says else ids
        for ids, says in zip(tokenizer.encode(texts), learned, strict=True)
    ]
    return np.concatenate(parts), np.repeat(learned, [len(part) for part in parts])


def templated(messages: Sequence[Message], tokenizer: HuggingFace) -> tuple[Tokens, Learned] | str:
    """The conversation by the tokenizer's chat template, or why the assistant's part cannot be told in it.

    A turn is what the conversation up to it adds to the prompt before it, so a template that writes earlier
    turns differently once later ones follow cannot be used.
    """
    ids = tokenizer.chat(messages, prompt=False)
    learned = np.zeros(len(ids), np.bool_)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.chat(messages[:index], prompt=True)
        after = tokenizer.chat(messages[: index + 1], prompt=False)
        if not (_begins(ids, after) and _begins(after, before)):
            return f"message {index}: the chat template writes it differently when the conversation goes on"
        learned[len(before) : len(after)] = True
    return ids, learned


def _begins(ids: Tokens, beginning: Tokens) -> bool:
    return len(beginning) <= len(ids) and np.array_equal(ids[: len(beginning)], beginning)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
