"""From files to token documents, one encoded batch at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from bundle.errors import UsageError
from bundle.recipe.sections import Data
from bundle.training.data import conversations, rows
from bundle.training.data.files import Source
from bundle.training.data.problems import Problems
from bundle.training.data.store import Document
from bundle.training.data.tokenizers import HuggingFace, Tokenizer, Tokens

# Documents that are encoded together: enough to occupy a fast tokenizer, few enough to stay small.
TOGETHER = 256


def documents(
    data: Data, task: str, sources: Sequence[Source], tokenizer: Tokenizer, longest: int, problems: Problems
) -> Iterator[Document]:
    """The token documents of all files; corrupt ones go to `problems`. `longest` limits SFT conversations."""
    if task == "sft":
        yield from _conversations(data, _rows(data, sources, problems), tokenizer, longest, problems)
    elif data.source == "text":
        yield from _texts(rows.texts(sources, data.separator, problems), tokenizer)
    else:
        yield from _texts(_text_fields(data, _rows(data, sources, problems), problems), tokenizer)


def _rows(data: Data, sources: Sequence[Source], problems: Problems) -> Iterator[rows.Row]:
    if data.source == "jsonl":
        return rows.json_lines(sources, problems)
    names = data.fields
    return rows.parquet_rows(sources, (names.text, names.prompt, names.response, names.messages), problems)


def _text_fields(data: Data, given: Iterable[rows.Row], problems: Problems) -> Iterator[str]:
    name = data.fields.text
    for row in given:
        text = row.values.get(name)
        if isinstance(text, str) and text.strip():
            yield text
        elif name not in row.values:
            have = ", ".join(map(str, row.values)) or "no fields"
            problems.add(row.place, f"field {name}: missing; the row has {have[:200]}")
        else:
            problems.add(row.place, f"field {name}: must be text, is {text!r:.60}")


def _texts(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[Document]:
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    while together := list(islice(texts, TOGETHER)):
        for ids in tokenizer.encode(together):
            yield Document(np.concatenate([ids, end]))


def _conversations(
    data: Data, given: Iterable[rows.Row], tokenizer: Tokenizer, longest: int, problems: Problems
) -> Iterator[Document]:
    write = _writer(data, tokenizer)
    for row in given:
        messages = conversations.messages_of(row.values, data.fields)
        written = messages if isinstance(messages, str) else write(messages)
        if isinstance(written, str):
            problems.add(row.place, written)
            continue
        ids, learned = written
        if len(ids) > longest:
            problems.add(
                row.place, f"{len(ids)} tokens exceed the {longest} that data.sequence_length allows"
            )
            continue
        yield Document(ids, learned)


Writer = Callable[[list[conversations.Message]], tuple[Tokens, conversations.Learned] | str]


def _writer(data: Data, tokenizer: Tokenizer) -> Writer:
    if data.template == "plain":
        return lambda messages: conversations.plain(messages, tokenizer)
    if not isinstance(tokenizer, HuggingFace) or not tokenizer.has_chat_template:
        raise UsageError(f"data.template: {data.tokenizer} has no chat template; use data.template: plain")
    return lambda messages: conversations.templated(messages, tokenizer)
