"""Tokens on disk in megatron's .bin and .idx: written once, whole or not at all, then mapped by every rank.

A store is a directory with `facts.json`. It holds `tokens.bin` and `tokens.idx`, and, where not every token
is learned, `learned.bin` and `learned.idx`: the loss mask in the same format, 1 where a token is learned. The
store of files that somebody else wrote holds nothing but their facts.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bundle.data import indexed
from bundle.data.sources import DataErrors
from bundle.data.tokenizers import Learned, Tokens
from bundle.digest import of_json
from bundle.errors import JobFailed

FORMAT = 3  # of the files of a store
CHUNK = 2**24  # tokens that are looked at together
Ints = NDArray[np.int64]
Progress = Callable[[int], None]
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


def key_of(facts: Any) -> str:
    """A short digest of what a store is made from, fit for a directory name."""
    return of_json([FORMAT, facts])


def write(directory: Path, documents: Iterator[Document], vocabulary: int, conclude: Conclude) -> None:
    """Writes the store `directory`; where another process was faster, its files stay.

    `conclude` is asked after the last document for facts to keep. Raises JobFailed when the disk
    is full or not writable, and whatever `documents` and `conclude` raise; nothing half-written stays then.
    """
    with _whole_or_not(directory) as building:
        ids = indexed.Writer(building / "tokens", "<u2" if vocabulary <= 2**16 else "<i4")
        digest, lengths, learned = hashlib.sha256(), [], None
        for document in documents:
            lengths.append(len(document.ids))
            digest.update(ids.add(document.ids))
            if document.learned is not None:
                learned = learned or indexed.Writer(building / "learned", "u1")
                digest.update(learned.add(document.learned))
        ids.finish()
        if learned is not None:
            learned.finish()
        digest.update(np.asarray(lengths, np.int64).tobytes())
        facts = {"prefix": "tokens", "masked": learned is not None, "sha256": digest.hexdigest()}
        (building / "facts.json").write_text(json.dumps(conclude() | facts))


def adopt(directory: Path, prefix: Path, vocabulary: int, progress: Progress) -> None:
    """Looks through somebody's PREFIX.bin once, and writes its store `directory`, which holds no tokens.

    `progress` is told how many tokens were seen so far. Raises JobFailed for files that megatron would not
    read, and for ids that a model with this vocabulary has not.
    """
    try:
        found = indexed.read(prefix)
    except (OSError, ValueError) as error:
        raise JobFailed(f"{prefix}: not megatron's .bin and .idx: {error}") from error
    digest = hashlib.sha256(found.values.dtype.name.encode())
    for start in range(0, len(found.values), CHUNK):
        part = found.values[start : start + CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= vocabulary))
        if len(wrong):
            document = int(np.searchsorted(found.starts, start + wrong[0], side="right")) - 1
            raise JobFailed(
                f"{prefix}.bin: token {part[wrong[0]]} of document {document} is not in the model's"
                f" vocabulary of {vocabulary}; name the files of the model's own tokenizer"
            )
        digest.update(part.tobytes())
        progress(start + len(part))
    digest.update(found.lengths.tobytes())
    with _whole_or_not(directory) as building:
        facts = {"prefix": str(prefix.absolute()), "masked": False, "sha256": digest.hexdigest()}
        (building / "facts.json").write_text(json.dumps(facts | DataErrors("stop").conclude()))


def open_store(directory: Path) -> Store | None:
    """The store in `directory`, or None when there is none. Raises JobFailed for a damaged one."""
    if not directory.exists():
        return None
    try:
        facts = json.loads((directory / "facts.json").read_text())
        found = indexed.read(directory / facts["prefix"])
        learned = indexed.read(directory / "learned") if facts["masked"] else None
        if learned is not None and not np.array_equal(learned.lengths, found.lengths):
            raise ValueError("tokens and loss mask are not of the same documents")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobFailed(f"{directory}: damaged ({error}); delete it, it will be made again") from error
    mask = None if learned is None else learned.values.view(np.bool_)
    return Store(found.values, mask, found.starts, found.lengths, facts)


@contextmanager
def _whole_or_not(directory: Path) -> Iterator[Path]:
    """A folder to write a store into, which becomes `directory` at the end; what was there first stays."""
    building = directory.with_name(f".{directory.name}-{uuid.uuid4().hex}")
    try:
        building.mkdir(parents=True)
        yield building
        _rename(building, directory)
    except OSError as error:
        raise JobFailed(f"{directory}: the tokens cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _rename(building: Path, directory: Path) -> None:
    try:
        building.rename(directory)
    except OSError:
        if not (directory / "facts.json").exists():
            raise
