"""Rows to token documents, a chunk of them at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bundle.data.chat import writer
from bundle.data.conversations import columns, conversation
from bundle.data.sources import Corrupt, DataErrors, rows, texts
from bundle.data.store import Document
from bundle.data.tokenizers import Tokenizer
from bundle.recipe.sections import Data
from bundle.recipe.sources import Source


def rows_of(data: Data, task: str, sources: Sequence[Source], errors: DataErrors) -> Iterator[Any]:
    """What `documents` takes, of all files, after their places."""
    if task == "sft":
        return rows(data.source, sources, columns(data.fields), errors)
    return texts(data, sources, errors)


def documents(
    given: Iterator[Any], data: Data, task: str, tokenizer: Tokenizer, longest: int, errors: DataErrors
) -> Iterator[Document]:
    """The token documents of some rows; corrupt ones go to `errors`. `longest` limits SFT conversations."""
    drafts: Iterator[tuple[str, Any]]
    encode: Callable[[Sequence[Any]], Iterator[Document]]
    if task == "sft":
        write = writer(data, tokenizer)
        drafts = errors.passed(given, lambda values: write.draft(conversation(values, data)))
        encode = write.encode
    else:
        drafts, encode = given, lambda together: _ended(together, tokenizer)
    found = errors.passed(_encoded(drafts, encode), lambda document: _checked(document, tokenizer.vocab_size))
    if task == "sft":
        found = _fitting(found, data.truncation, longest, errors)
    return (document for _, document in found)


def _encoded(
    drafts: Iterator[tuple[str, Any]], encode: Callable[[Sequence[Any]], Iterator[Document]]
) -> Iterator[tuple[str, Document]]:
    if together := list(drafts):
        places, contents = zip(*together, strict=True)
        yield from zip(places, encode(contents), strict=True)


def _ended(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Document]:
    end = np.uint32(tokenizer.end_of_text)
    return (Document(np.append(ids, end)) for ids in tokenizer.encode(texts))


def _checked(document: Document, vocabulary: int) -> Document:
    highest = int(document.ids.max(initial=0))
    if highest >= vocabulary:  # the tokenizer's ids are the model's
        raise Corrupt(f"token {highest} is not in the vocabulary of {vocabulary}")
    if not _learns(document):
        raise Corrupt("not one token of it would be learned")
    return document


def _learns(document: Document) -> bool:
    """Whether it has a label: the first token is none."""
    return document.learned is None or bool(document.learned[1:].any())


def _fitting(
    given: Iterator[tuple[str, Document]], truncation: str, longest: int, errors: DataErrors
) -> Iterator[tuple[str, Document]]:
    """The documents of at most `longest` tokens, and what `data.truncation` makes of longer ones."""
    for place, document in given:
        size = len(document.ids)
        if size <= longest:
            yield place, document
            continue
        what = f"{size} tokens exceed the {longest} that data.sequence_length allows"
        kept = slice(longest) if truncation == "right" else slice(size - longest, size)
        learned = None if document.learned is None else document.learned[kept]
        cut = Document(document.ids[kept], learned)
        if truncation == "error":
            errors.add(place, f"{what}; data.truncation says what to do with such rows")
        elif truncation == "delete":
            errors.deleted.add(place, f"{what}: deleted")
        elif not _learns(cut):
            errors.deleted.add(place, f"{what}, and what is left has nothing to learn: deleted")
        else:
            errors.cut.add(place, f"{what}: cut on the {truncation}")
            yield place, cut
