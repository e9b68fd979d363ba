"""Tokens on disk in megatron's .bin and .idx: written once, whole or not at all, then mapped by every rank.

A store is a directory with `facts.json`. It holds `tokens.bin` and `tokens.idx`, and, where not every token
is learned, `learned.bin` and `learned.idx`: the loss mask in the same format, 1 where a token is learned. The
store of files that somebody else wrote holds nothing but their facts. One that is being made has another
name; when it is interrupted, whoever makes it next goes on after the last chunk that its journal names.

All ids of PREFIX.bin are in one row, and PREFIX.idx says where each document begins. The index, as
`IndexedDataset` of every release reads it, little endian: a mark, the version (uint64), the type of the ids
(uint8), the number of sequences S and of document bounds D (uint64 each), then the lengths of the sequences
(int32 [S]), the bytes before each (int64 [S]), the sequences before each document (int64 [D]).
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bundle import files
from bundle.data.sources import DataErrors, Noted
from bundle.data.tokenizers import Learned, Tokens
from bundle.errors import JobFailed

_log = logging.getLogger(__name__)

TOGETHER = 2**24  # tokens that are looked at together
COMMIT_SECONDS = 2.0  # between two entries of the journal: what a kill costs at most
Progress = Callable[[int], None]
Ints = NDArray[np.int64]
MARK, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
# What the type of the ids is called; 6 and 7 are floats, of which no model takes any.
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Indexed(NamedTuple):
    """What PREFIX.bin holds: all documents in one row, mapped read only."""

    values: NDArray[Any]  # [tokens]
    lengths: Ints  # [documents]


class IndexedWriter:
    """Writes PREFIX.bin document by document, and at last PREFIX.idx; raises OSError where that fails."""

    def __init__(self, prefix: Path, dtype: str, kept: Ints | None = None) -> None:
        """`dtype` is one of TYPES; `kept` are lengths of documents that are there: what follows them goes."""
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        (self._type,) = (number for number, name in TYPES.items() if name == dtype)
        self.path = prefix.with_name(f"{prefix.name}.bin")
        self.lengths: list[int] = [] if kept is None else kept.tolist()
        self._file = self.path.open("r+b" if self.lengths else "wb")
        self._file.seek(sum(self.lengths) * self._dtype.itemsize)
        self._file.truncate()

    def add(self, values: NDArray[Any]) -> None:
        """Appends one document, of one sequence."""
        self._file.write(values.astype(self._dtype).tobytes())
        self.lengths.append(len(values))

    def flush(self) -> None:
        """Hands what was added to the system, where a killed process leaves it."""
        self._file.flush()

    def finish(self) -> None:
        """Writes the index, without which nobody reads the rest."""
        self._file.close()
        count, lengths = len(self.lengths), np.asarray(self.lengths, "<i8")
        begins = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        columns = (lengths.astype("<i4"), begins.astype("<i8"), np.arange(count + 1, dtype="<i8"))
        header = HEADER.pack(MARK, VERSION, self._type, count, count + 1)
        index = self._prefix.with_name(f"{self._prefix.name}.idx")
        index.write_bytes(header + b"".join(column.tobytes() for column in columns))


def read_indexed(prefix: Path) -> Indexed:
    """The documents of PREFIX.bin; raises ValueError or OSError saying why they cannot be had.

    A document is what the index says to be one, of however many sequences.
    """
    content = prefix.with_name(f"{prefix.name}.idx").read_bytes()
    tokens = prefix.with_name(f"{prefix.name}.bin")
    if len(content) < HEADER.size:
        raise ValueError(f"{prefix}.idx is too short to be megatron's")
    mark, version, kind, sequences, bounds = HEADER.unpack_from(content)
    if (mark, version) != (MARK, VERSION):
        raise ValueError(f"{prefix}.idx does not begin as an index of megatron's")
    if kind not in TYPES:
        raise ValueError(f"{prefix}.idx: ids of type {kind} are none that a model takes")
    if HEADER.size + 12 * sequences + 8 * bounds > len(content):  # modes of multimodal data may follow
        raise ValueError(f"{prefix}.idx is cut: it has not all of {sequences} sequences, {bounds} documents")
    dtype, at = np.dtype(TYPES[kind]), HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at).astype(np.int64)
    begins = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    first = np.frombuffer(content, "<i8", bounds, at + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any() or (begins != ends[:-1] * dtype.itemsize).any():
        raise ValueError(f"{prefix}.idx names sequences that do not follow each other")
    if bounds == 0 or first[0] != 0 or (np.diff(first) < 0).any() or first[-1] != sequences:
        raise ValueError(f"{prefix}.idx names documents that do not follow each other")
    size, named = tokens.stat().st_size, int(ends[-1]) * dtype.itemsize
    if size != named:
        raise ValueError(f"{prefix}.bin has {size} bytes instead of the {named} that its index names")
    values = np.memmap(tokens, dtype, mode="r") if size else np.zeros(0, dtype)
    return Indexed(values, np.diff(ends[first]))


@dataclass(frozen=True)
class Document:
    """Token ids of one document, its end included, and which of them are learned (None: all)."""

    ids: Tokens
    learned: Learned | None = None


@dataclass(frozen=True)
class Chunk:
    """Documents that follow each other, and what was wrong with others between them."""

    documents: list[Document]
    errors: Noted


# The chunks from a number on.
Chunks = Callable[[int], Iterator[Chunk]]


@dataclass(frozen=True)
class Store:
    """All documents in one row: `ids` and `learned` are memory maps of [tokens]."""

    ids: NDArray[Any]
    learned: NDArray[np.bool_] | None
    lengths: Ints  # [documents]
    facts: dict[str, Any]  # what was wrong with the data, and "sha256" of the tokens

    @cached_property
    def starts(self) -> Ints:
        """Where each document begins: [documents]."""
        starts: Ints = np.cumsum(self.lengths) - self.lengths
        return starts


def unwritable(directory: Path, error: OSError) -> JobFailed:
    """What to raise where the store `directory` cannot be made because of `error`."""
    why = f"the tokens cannot be written: {error.strerror or error}"
    return JobFailed(f"{directory}: {why}; make room, or name another place in data.cache")


def building(directory: Path) -> Path:
    """Where the store `directory` is while it is being made."""
    return directory.with_name(f".{directory.name}.building")


def write(directory: Path, vocabulary: int, chunks: Chunks, errors: DataErrors, progress: Progress) -> None:
    """Writes the store `directory`, which nobody else may do meanwhile; goes on where a killed process was.

    `progress` is told how many tokens there are so far. Raises JobFailed when the disk is full or not
    writable and for what `errors` do not let pass, and whatever `chunks` raise; nothing half-written stays.
    """
    with _whole_or_not(directory) as folder:
        parts = _Parts(folder, "<u2" if vocabulary <= 2**16 else "<i4", errors)
        for chunk in chunks(parts.chunks):
            parts.add(chunk)
            progress(parts.tokens)
        parts.finish()


class _Parts:
    """The files of a store that is being made, and its journal."""

    def __init__(self, folder: Path, dtype: str, errors: DataErrors) -> None:
        """Takes what a killed process has left as far as the journal goes; `errors` get what it had found."""
        self._folder, self._journal, self._errors = folder, folder / "journal.json", errors
        kept, noted = _noted(folder, np.dtype(dtype).itemsize)
        self.chunks, self.tokens = noted["chunks"], int(kept.sum())
        errors.extend(noted["errors"])
        self._ids = IndexedWriter(folder / "tokens", dtype, kept)
        self._learned = IndexedWriter(folder / "learned", "u1", kept) if noted["masked"] else None
        self._lengths = (folder / "lengths").open("r+b" if len(kept) else "wb")
        self._lengths.seek(8 * len(kept))
        self._lengths.truncate()
        self._committed = time.monotonic()

    def add(self, chunk: Chunk) -> None:
        for document in chunk.documents:
            self._ids.add(document.ids)
            if document.learned is not None:
                self._learned = self._learned or IndexedWriter(self._folder / "learned", "u1")
                self._learned.add(document.learned)
            self.tokens += len(document.ids)
        self._lengths.write(np.asarray([len(one.ids) for one in chunk.documents], "<i8").tobytes())
        self._errors.extend(chunk.errors)
        self.chunks += 1
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self._commit()

    def _writers(self) -> list[IndexedWriter]:
        return [self._ids] if self._learned is None else [self._ids, self._learned]

    def _commit(self) -> None:
        self._lengths.flush()
        for writer in self._writers():
            writer.flush()
        noted = {"chunks": self.chunks, "documents": len(self._ids.lengths)}
        noted |= {"masked": self._learned is not None, "errors": self._errors.dump()}
        files.write_json(self._journal, noted)
        self._committed = time.monotonic()

    def finish(self) -> None:
        """Writes indexes and facts. Raises JobFailed where the errors are none to pass over."""
        found = self._errors.conclude()
        self._lengths.close()
        digest = hashlib.sha256()
        for each in self._writers():
            each.finish()
            with each.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(np.asarray(self._ids.lengths, np.int64).tobytes())
        facts = {"prefix": "tokens", "masked": self._learned is not None, "sha256": digest.hexdigest()}
        files.write_json(self._folder / "facts.json", facts | found)
        for left in (self._folder / "lengths", self._journal):
            left.unlink(missing_ok=True)


def _noted(folder: Path, itemsize: int) -> tuple[Ints, dict[str, Any]]:
    """The lengths of the documents that are kept, and what the journal says; nothing where files lack any."""
    nothing = {"chunks": 0, "documents": 0, "masked": False, "errors": DataErrors("stop").dump()}
    journal = folder / "journal.json"
    if not journal.exists():
        return np.zeros(0, np.int64), nothing
    noted = json.loads(journal.read_text(encoding="utf-8"))
    kept: Ints = np.zeros(0, np.int64)
    if documents := noted["documents"]:
        kept = np.fromfile(folder / "lengths", "<i8", documents)
    tokens = int(kept.sum())
    sizes = {"lengths": 8 * documents, "tokens.bin": tokens * itemsize}
    sizes |= {"learned.bin": tokens} if noted["masked"] else {}
    paths = {folder / name: size for name, size in sizes.items()}
    if any(not path.exists() or path.stat().st_size < size for path, size in paths.items()):
        _log.warning("%s: files are cut, all is made anew", folder)
        return np.zeros(0, np.int64), nothing
    _log.info("goes on with tokens that were begun: %s are there", f"{tokens:,}")
    return kept, noted


def adopt(directory: Path, prefix: Path, vocabulary: int, progress: Progress) -> None:
    """Looks through somebody's PREFIX.bin once, and writes its store `directory`, which holds no tokens.

    `progress` is told how many tokens were seen so far. Raises JobFailed for files that megatron would not
    read, and for ids that a model with this vocabulary has not.
    """
    try:
        found = read_indexed(prefix)
    except (OSError, ValueError) as error:
        raise JobFailed(f"{prefix}: not megatron's .bin and .idx: {error}") from error
    digest = hashlib.sha256(found.values.dtype.name.encode())
    for start in range(0, len(found.values), TOGETHER):
        part = found.values[start : start + TOGETHER]
        wrong = np.flatnonzero((part < 0) | (part >= vocabulary))
        if len(wrong):
            document = int(np.searchsorted(np.cumsum(found.lengths), start + wrong[0], side="right"))
            raise JobFailed(
                f"{prefix}.bin: token {part[wrong[0]]} of document {document} is not in the model's"
                f" vocabulary of {vocabulary}; name the files of the model's own tokenizer"
            )
        digest.update(part.tobytes())
        progress(start + len(part))
    digest.update(found.lengths.tobytes())
    with _whole_or_not(directory) as folder:
        facts = {"prefix": str(prefix.absolute()), "masked": False, "sha256": digest.hexdigest()}
        files.write_json(folder / "facts.json", facts | DataErrors("stop").conclude())


def open_store(directory: Path) -> Store | None:
    """The store in `directory`, or None when there is none. Raises JobFailed for a damaged or foreign one."""
    if not directory.exists():
        return None
    _refuse_strangers(directory)
    try:
        facts = json.loads((directory / "facts.json").read_text())
        found = read_indexed(directory / facts["prefix"])
        learned = read_indexed(directory / "learned") if facts["masked"] else None
        if learned is not None and not np.array_equal(learned.lengths, found.lengths):
            raise ValueError("tokens and loss mask are not of the same documents")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobFailed(f"{directory}: damaged ({error}); delete it, it will be made again") from error
    mask = None if learned is None else learned.values.view(np.bool_)
    return Store(found.values, mask, found.lengths, facts)


def _refuse_strangers(path: Path) -> None:
    if (owner := path.stat().st_uid) not in (os.geteuid(), 0):
        raise JobFailed(
            f"{path}: made by user {owner}, whose tokens are not trusted; name a data.cache of your own"
        )


@contextmanager
def _whole_or_not(directory: Path) -> Iterator[Path]:
    """A folder to write a store into, which becomes `directory` at the end; only a kill leaves it there."""
    folder = building(directory)
    if folder.exists():
        _refuse_strangers(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        folder.rename(directory)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise unwritable(directory, error) from error
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
