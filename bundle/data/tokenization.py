"""Files to token documents, which are written once, whole or not at all, then mapped by every rank."""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bundle.data.chat import Learned, messages_of, writer
from bundle.data.sources import DataErrors, Row, Text, rows, texts
from bundle.data.tokenizers import Tokenizer, Tokens
from bundle.digest import of_json
from bundle.errors import JobFailed
from bundle.recipe.sections import Data
from bundle.recipe.sources import Source

# Documents that are encoded together: enough to occupy a fast tokenizer, few enough to stay small.
TOGETHER = 256
FORMAT = 2  # of the files of a store
Ints = NDArray[np.int64]
Conclude = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Document:
    """Token ids of one document, its end included, and which of them are learned (None: all)."""

    ids: Tokens
    learned: Learned | None = None


@dataclass(frozen=True)
class Store:
    """All documents in one row: `ids` and `learned` are memory maps of [tokens]."""

    ids: NDArray[Any]
    learned: NDArray[np.bool_] | None
    starts: Ints  # [documents]
    lengths: Ints
    facts: dict[str, Any]  # what `conclude` said, and "sha256" of the tokens


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


def key_of(facts: Any) -> str:
    """A short digest of what a store is made from, fit for a directory name."""
    return of_json([FORMAT, facts])


def write(directory: Path, documents: Iterator[Document], vocabulary: int, conclude: Conclude) -> None:
    """Writes the store `directory`; where another process was faster, its files stay.

    `conclude` is asked after the last document for facts to keep. Raises JobFailed when the disk
    is full or not writable, and whatever `documents` and `conclude` raise; nothing half-written stays then.
    """
    building = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    try:
        building.mkdir(parents=True)
        _fill(building, documents, np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32), conclude)
        _rename(building, directory)
    except OSError as error:
        raise JobFailed(f"{directory}: the tokens cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fill(directory: Path, documents: Iterator[Document], dtype: np.dtype[Any], conclude: Conclude) -> None:
    lengths, digest, masked = [], hashlib.sha256(), False
    with (directory / "ids").open("wb") as ids, (directory / "learned").open("wb") as learned:
        for document in documents:
            lengths.append(len(document.ids))
            _append(ids, document.ids.astype(dtype), digest)
            if document.learned is not None:
                masked = True
                _append(learned, document.learned.astype(np.bool_), digest)
    np.save(directory / "lengths.npy", np.asarray(lengths, np.int64))
    digest.update(np.asarray(lengths, np.int64).tobytes())
    facts = conclude() | {
        "dtype": dtype.name,
        "masked": masked,
        "tokens": sum(lengths),
        "sha256": digest.hexdigest(),
    }
    (directory / "facts.json").write_text(json.dumps(facts))


def _append(file: BinaryIO, values: NDArray[Any], digest: Any) -> None:
    content = values.tobytes()
    digest.update(content)
    file.write(content)


def _rename(building: Path, directory: Path) -> None:
    try:
        building.rename(directory)
    except OSError:
        if not (directory / "facts.json").exists():
            raise


def open_store(directory: Path) -> Store | None:
    """The store in `directory`, or None when there is none. Raises JobFailed for a damaged one."""
    if not directory.exists():
        return None
    try:
        facts = json.loads((directory / "facts.json").read_text())
        lengths = np.load(directory / "lengths.npy", allow_pickle=False)
        ids = _mapped(directory / "ids", np.dtype(facts["dtype"]), facts["tokens"])
        learned = (
            _mapped(directory / "learned", np.dtype(np.bool_), facts["tokens"]) if facts["masked"] else None
        )
        if int(lengths.sum()) != facts["tokens"]:
            raise ValueError("lengths do not add up")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobFailed(f"{directory}: damaged ({error}); delete it, it will be made again") from error
    return Store(ids, learned, np.cumsum(lengths) - lengths, lengths, facts)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {count * dtype.itemsize}")
    return np.memmap(path, dtype, mode="r") if count else np.zeros(0, dtype)
