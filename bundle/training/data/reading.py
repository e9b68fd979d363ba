"""From files to token documents, one encoded batch at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from bundle.recipe.sections import Data
from bundle.recipe.sources import Source
from bundle.training.data import rows
from bundle.training.data.conversations import Learned, messages_of, writer
from bundle.training.data.problems import Problems
from bundle.training.data.store import Document
from bundle.training.data.tokenizers import Tokenizer, Tokens

# Documents that are encoded together: enough to occupy a fast tokenizer, few enough to stay small.
TOGETHER = 256


def documents(
    data: Data, task: str, sources: Sequence[Source], tokenizer: Tokenizer, longest: int, problems: Problems
) -> Iterator[Document]:
    """The token documents of all files; corrupt ones go to `problems`. `longest` limits SFT conversations."""
    if task == "sft":
        yield from _conversations(data, _rows(data, sources, problems), tokenizer, longest, problems)
    elif data.source == "text":
        yield from _texts(rows.texts(sources, data.separator, problems), tokenizer, problems)
    else:
        yield from _texts(_text_fields(data, _rows(data, sources, problems), problems), tokenizer, problems)


def _rows(data: Data, sources: Sequence[Source], problems: Problems) -> Iterator[rows.Row]:
    if data.source == "jsonl":
        return rows.json_lines(sources, problems)
    names = data.fields
    return rows.parquet_rows(sources, (names.text, names.prompt, names.response, names.messages), problems)


def _text_fields(data: Data, given: Iterable[rows.Row], problems: Problems) -> Iterator[rows.Text]:
    name = data.fields.text
    for row in given:
        text = row.values.get(name)
        if isinstance(text, str) and text.strip():
            yield rows.Text(row.place, text)
        elif name not in row.values:
            have = ", ".join(map(str, row.values)) or "no fields"
            problems.add(row.place, f"field {name}: missing; the row has {have[:200]}")
        else:
            problems.add(row.place, f"field {name}: must be text, is {text!r:.60}")


def _texts(texts: Iterator[rows.Text], tokenizer: Tokenizer, problems: Problems) -> Iterator[Document]:
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    while together := list(islice(texts, TOGETHER)):
        for text, ids in zip(together, tokenizer.encode([one.text for one in together]), strict=True):
            if unknown := _unknown(ids, tokenizer):
                problems.add(text.place, unknown)
            else:
                yield Document(np.concatenate([ids, end]))


def _conversations(
    data: Data, given: Iterator[rows.Row], tokenizer: Tokenizer, longest: int, problems: Problems
) -> Iterator[Document]:
    write = writer(data, tokenizer)
    while together := list(islice(given, TOGETHER)):
        found = [messages_of(row.values, data.fields) for row in together]
        written = iter(write([messages for messages in found if not isinstance(messages, str)]))
        for row, messages in zip(together, found, strict=True):
            result = messages if isinstance(messages, str) else next(written)
            reason = result if isinstance(result, str) else _refused(*result, tokenizer, longest)
            if reason is None:
                yield Document(*result)
            else:
                problems.add(row.place, reason)


def _refused(ids: Tokens, learned: Learned, tokenizer: Tokenizer, longest: int) -> str | None:
    """What is wrong with a conversation as tokens, or None."""
    if len(ids) > longest:
        return f"{len(ids)} tokens exceed the {longest} that data.sequence_length allows"
    if not learned[1:].any():
        return "not one token of it would be learned"
    return _unknown(ids, tokenizer)


def _unknown(ids: Tokens, tokenizer: Tokenizer) -> str | None:
    """Which id is none of the tokenizer's, whose ids are the model's, or None."""
    highest = int(ids.max(initial=0))
    if highest >= tokenizer.vocab_size:
        return f"token {highest} is not in the vocabulary of {tokenizer.vocab_size}"
    return None
