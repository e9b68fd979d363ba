"""Files to token documents, one encoded batch at a time."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from bundle.data.chat import Learned, messages_of, writer
from bundle.data.sources import DataErrors, Row, Text, rows, texts
from bundle.data.store import Document
from bundle.data.tokenizers import Tokenizer, Tokens
from bundle.recipe.sections import Data
from bundle.recipe.sources import Source

# Documents that are encoded together: enough to occupy a fast tokenizer, few enough to stay small.
TOGETHER = 256


def documents(
    data: Data, task: str, sources: Sequence[Source], tokenizer: Tokenizer, longest: int, errors: DataErrors
) -> Iterator[Document]:
    """The token documents of all files; corrupt ones go to `errors`. `longest` limits SFT conversations."""
    if task == "sft":
        yield from _conversations(data, rows(data, sources, errors), tokenizer, longest, errors)
    else:
        yield from _texts(texts(data, sources, errors), tokenizer, errors)


def _texts(given: Iterator[Text], tokenizer: Tokenizer, errors: DataErrors) -> Iterator[Document]:
    end = np.asarray([tokenizer.end_of_text], np.uint32)
    while together := list(islice(given, TOGETHER)):
        for text, ids in zip(together, tokenizer.encode([one.text for one in together]), strict=True):
            if unknown := _unknown(ids, tokenizer):
                errors.add(text.place, unknown)
            else:
                yield Document(np.concatenate([ids, end]))


def _conversations(
    data: Data, given: Iterator[Row], tokenizer: Tokenizer, longest: int, errors: DataErrors
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
                errors.add(row.place, reason)


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
