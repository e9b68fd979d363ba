"""Write tokens to disk in megatron's .bin and .idx, once and completely or not at all; every rank maps them.

A store is a directory with `facts.json`. It holds `tokens.bin` and `tokens.idx`. Where some tokens are not
learned, it also holds `learned.bin` and `learned.idx`: the loss mask in the same format, 1 where a token is
learned.

The store of a model with a vision tower has `pictures`: images and videos as they were read, one document for
each file. `grids` has the patches of each document in time, height and width. `videos` has more facts about
videos (`Pictures`). `rows` has the first document of each row that made several documents, and how many it
made.

The store of megatron's own files holds only their facts. A store that is being made has another name. After
an interruption, the next process continues after the last chunk that the journal names.

All ids of PREFIX.bin are in one row, and PREFIX.idx says where each document begins. The index is little
endian, as `IndexedDataset` of every release reads it: a mark, the version (uint64), the type of the ids
(uint8), the number of sequences S and of document bounds D (uint64 each). Then come the lengths of the
sequences (int32 [S]), the bytes before each (int64 [S]), the sequences before each document (int64 [D]).
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bundle import files
from bundle.data.media import Picture
from bundle.data.sources import DataErrors, RowReport
from bundle.data.tokenizers import LossMask, Tokens
from bundle.errors import JobFailed, UsageError
from bundle.packing.packing import compute_starts, concatenate_ranges

_log = logging.getLogger(__name__)

VOCABULARY_CHECK_BLOCK_TOKENS = 2**24  # tokens that are looked at together
COMMIT_SECONDS = 2.0  # between two entries of the journal: what a kill costs at most
Progress = Callable[[int], None]
Ints = NDArray[np.int64]
MAGIC, VERSION = b"MMIDIDX\0\0", 1
INDEX_HEADER_STRUCT = struct.Struct("<9sQBQQ")
# The types of the ids by number; 6 and 7 are floats, which no model takes.
DTYPE_BY_MEGATRON_CODE = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class IndexedDocuments(NamedTuple):
    """The documents of PREFIX.bin, all in one row, mapped read only."""

    values: NDArray[Any]  # [tokens]
    lengths: Ints  # [documents]


class IndexedWriter:
    """Writes PREFIX.bin document by document, and finally PREFIX.idx; raises OSError where that fails."""

    def __init__(self, prefix: Path, dtype: str, document_count: int = 0) -> None:
        """Open the files behind their first `document_count` documents, and remove what follows these.

        `dtype` is a value of `DTYPE_BY_MEGATRON_CODE`.
        """
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        (self._type,) = (number for number, name in DTYPE_BY_MEGATRON_CODE.items() if name == dtype)
        self.path = prefix.with_name(f"{prefix.name}.bin")
        self.lengths: list[int] = _read_first_lengths(prefix, document_count).tolist()
        self._file = self._open_and_truncate(self.path, sum(self.lengths) * self._dtype.itemsize)
        self._lengths_file = self._open_and_truncate(_build_lengths_path(prefix), len(self.lengths) * 8)

    def add(self, values: NDArray[Any]) -> None:
        """Append one document with one sequence."""
        self._file.write(values.astype(self._dtype).tobytes())
        self._lengths_file.write(struct.pack("<q", len(values)))
        self.lengths.append(len(values))

    def flush(self) -> None:
        """Hand the documents so far to the system, which keeps them when the process is killed."""
        self._file.flush()
        self._lengths_file.flush()

    def finish(self) -> None:
        """Write the index, without which the other files are not read."""
        self._file.close()
        self._lengths_file.close()
        _build_lengths_path(self._prefix).unlink()
        count, lengths = len(self.lengths), np.asarray(self.lengths, "<i8")
        begins = (np.cumsum(lengths) - lengths) * self._dtype.itemsize
        columns = (lengths.astype("<i4"), begins.astype("<i8"), np.arange(count + 1, dtype="<i8"))
        header = INDEX_HEADER_STRUCT.pack(MAGIC, VERSION, self._type, count, count + 1)
        index = self._prefix.with_name(f"{self._prefix.name}.idx")
        index.write_bytes(header + b"".join(column.tobytes() for column in columns))

    def _open_and_truncate(self, path: Path, size: int) -> BinaryIO:
        """Return a file to append to behind its first `size` bytes."""
        file = path.open("r+b" if size else "wb")
        file.seek(size)
        file.truncate()
        return file


def _build_lengths_path(prefix: Path) -> Path:
    """Return the path of the lengths of documents that are being written, int64."""
    return prefix.with_name(f"{prefix.name}.lengths")


def _read_first_lengths(prefix: Path, documents: int) -> Ints:
    return np.fromfile(_build_lengths_path(prefix), "<i8", documents) if documents else np.zeros(0, np.int64)


def read_indexed(prefix: Path) -> IndexedDocuments:
    """Return the documents of PREFIX.bin. Raise ValueError or OSError, which says why they cannot be read.

    The index says what a document is; a document may have several sequences.
    """
    content = prefix.with_name(f"{prefix.name}.idx").read_bytes()
    tokens = prefix.with_name(f"{prefix.name}.bin")
    if len(content) < INDEX_HEADER_STRUCT.size:
        raise ValueError(f"{prefix}.idx is too short for the index of a Megatron data set")
    mark, version, kind, sequences, bounds = INDEX_HEADER_STRUCT.unpack_from(content)
    if (mark, version) != (MAGIC, VERSION):
        raise ValueError(f"{prefix}.idx does not begin with the header of a Megatron data set's index")
    if kind not in DTYPE_BY_MEGATRON_CODE:
        known = ", ".join(map(str, DTYPE_BY_MEGATRON_CODE))
        raise ValueError(f"{prefix}.idx: token ids with dtype code {kind} are not supported, only {known}")
    if INDEX_HEADER_STRUCT.size + 12 * sequences + 8 * bounds > len(
        content
    ):  # modes of multimodal data may follow
        raise ValueError(
            f"{prefix}.idx is truncated: its header lists {sequences} sequences and {bounds} document bounds"
        )
    dtype, at = np.dtype(DTYPE_BY_MEGATRON_CODE[kind]), INDEX_HEADER_STRUCT.size
    lengths = np.frombuffer(content, "<i4", sequences, at).astype(np.int64)
    begins = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    first = np.frombuffer(content, "<i8", bounds, at + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any() or (begins != ends[:-1] * dtype.itemsize).any():
        raise ValueError(f"{prefix}.idx is damaged: its sequences are not contiguous in the .bin file")
    if bounds == 0 or first[0] != 0 or (np.diff(first) < 0).any() or first[-1] != sequences:
        raise ValueError(f"{prefix}.idx is damaged: its documents do not cover all sequences in order")
    size, named = tokens.stat().st_size, int(ends[-1]) * dtype.itemsize
    if size != named:
        raise ValueError(f"{prefix}.bin has {size} bytes instead of the {named} bytes that its index lists")
    values = np.memmap(tokens, dtype, mode="r") if size else np.zeros(0, dtype)
    return IndexedDocuments(values, np.diff(ends[first]))


@dataclass(frozen=True)
class TokenDocument:
    """Token ids of one document, its end included, and which of them are learned (None: all).

    `pictures` are its images and videos in order; None: the model takes none.
    """

    ids: Tokens
    loss_mask: LossMask | None = None
    pictures: tuple[Picture, ...] | None = None


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows with one document or more each, and the errors of other rows between them."""

    rows: list[list[TokenDocument]]
    errors: RowReport


# The chunks from a number on.
Chunks = Callable[[int], Iterator[RowChunk]]


@dataclass(frozen=True)
class Store:
    """All documents in one row: `ids` and `loss_mask` are memory maps of [tokens]."""

    ids: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None
    lengths: Ints  # [documents]
    facts: dict[str, Any]  # what was wrong with the data, and "sha256" of the tokens
    pictures: "Pictures | None" = None
    row_groups: Ints = field(
        default_factory=lambda: np.zeros((0, 2), np.int64)
    )  # [rows of several documents, 2]

    @cached_property
    def document_starts(self) -> Ints:
        """The place where each document begins: [documents]."""
        starts: Ints = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def document_row_numbers(self) -> Ints:
        """The number of the row that each document was made of: [documents]."""
        begins = np.ones(len(self.lengths), np.int64)
        begins[concatenate_ranges(self.row_groups[:, 0] + 1, self.row_groups[:, 1] - 1)] = 0
        rows: Ints = np.cumsum(begins) - 1
        return rows


@dataclass(frozen=True)
class Pictures:
    """The images and videos of all documents: their files, their grids, and how many each document has.

    A video has four values in `videos`: its number among all images and videos, the number of its frames that
    are files of their own (0: one file has all frames), its `seconds` and its `fps`. The last two are the
    bits of float64.
    """

    contents: IndexedDocuments
    grids: Ints  # [images and videos, 3]
    counts: Ints  # [documents]
    videos: Ints  # [videos, 4]

    @cached_property
    def seconds_per_patch(self) -> NDArray[np.float64]:
        """The time from one patch of each to the next; 0 for an image: [images and videos]."""
        return self._scatter_video_values(self.videos[:, 2].view(np.float64), 0.0)

    @cached_property
    def _fps_by_medium(self) -> NDArray[np.float64]:
        return self._scatter_video_values(self.videos[:, 3].view(np.float64), 0.0)

    @cached_property
    def _separate_frame_counts(self) -> Ints:
        return self._scatter_video_values(self.videos[:, 1], 0)

    def _scatter_video_values(self, values: NDArray[Any], default: float) -> NDArray[Any]:
        values_of_all = np.full(len(self.grids), default, values.dtype)
        values_of_all[self.videos[:, 0]] = values
        return values_of_all

    @cached_property
    def item_file_counts(self) -> Ints:
        """The number of files of each: [images and videos]."""
        files: Ints = np.maximum(1, self._separate_frame_counts)
        return files

    @cached_property
    def _item_and_file_starts(self) -> tuple[Ints, Ints]:
        """The first file of each image and video, and the byte at which each file begins."""
        return compute_starts(self.item_file_counts), compute_starts(self.contents.lengths)

    @cached_property
    def document_patch_counts(self) -> Ints:
        """The number of patches of each document: [documents]."""
        patch_sums, ends = np.append(0, np.cumsum(self.grids.prod(1))), np.cumsum(self.counts)
        patches: Ints = patch_sums[ends] - patch_sums[ends - self.counts]
        return patches

    def find_pictures(self, documents: Ints) -> Ints:
        """Return the numbers of the images and videos of these documents, one after the other."""
        return concatenate_ranges(compute_starts(self.counts)[documents], self.counts[documents])

    def read_encoded_picture(self, number: int) -> Picture:
        """Return one image or video."""
        first, begins = self._item_and_file_starts
        files = range(first[number], first[number] + self.item_file_counts[number])
        lengths, values = self.contents.lengths, self.contents.values
        contents = tuple(values[begins[file] : begins[file] + lengths[file]].tobytes() for file in files)
        time, height, width = self.grids[number].tolist()
        seconds, fps, listed = (
            self.seconds_per_patch[number],
            self._fps_by_medium[number],
            self._separate_frame_counts[number] > 0,
        )
        return Picture(contents, (time, height, width), float(seconds), float(fps), bool(listed))


def build_write_error(directory: Path, error: OSError) -> JobFailed:
    """Return the exception for a store `directory` that cannot be made because of `error`."""
    reason = f"the tokens cannot be written: {error.strerror or error}"
    return JobFailed(f"{directory}: {reason}. Free space, or set data.cache to another directory.")


def build_partial_path(directory: Path) -> Path:
    """Return the path of the store `directory` while it is being made."""
    return directory.with_name(f".{directory.name}.building")


def write_store(
    directory: Path, vocabulary: int, chunks: Chunks, errors: DataErrors, progress: Progress
) -> None:
    """Write the store `directory`, or continue where a killed process stopped.

    No other process may write the store meanwhile. `progress` is called with the number of tokens so far.
    Raise JobFailed when the disk is full or not writable, UsageError for errors that stop the job, and the
    exceptions of `chunks`. A half-written store is removed.
    """
    with _write_atomically(directory) as folder:
        parts = _StoreWriter(folder, "<u2" if vocabulary <= 2**16 else "<i4", errors)
        for chunk in chunks(parts.chunks):
            parts.add(chunk)
            progress(parts.tokens)
        parts.finish()


class _StoreWriter:
    """The files of a store that is being made, and its journal."""

    def __init__(self, folder: Path, dtype: str, errors: DataErrors) -> None:
        """Continue the files of a killed process as far as its journal goes; `errors` get its errors."""
        self._folder, self._journal, self._errors = folder, folder / "journal.json", errors
        for partial in folder.glob(".*"):  # a kill leaves the file that it interrupts
            partial.unlink()
        self._types = {"tokens": dtype, "learned": "u1", "grids": "<i4", "pictures": "u1"}
        self._types |= {"videos": "<i8", "rows": "<i8"}
        entry = _read_journal(
            folder, {name: np.dtype(type_name).itemsize for name, type_name in self._types.items()}
        )
        self.chunks = entry["chunks"]
        errors.extend(entry["errors"])
        self._writers = {
            name: IndexedWriter(folder / name, self._types[name], document_count)
            for name, document_count in entry["documents"].items()
        }
        self.tokens = sum(self._get_writer("tokens").lengths)
        self._picture_count = sum(self._writers["grids"].lengths) // 3 if "grids" in self._writers else 0
        self._committed_at = time.monotonic()

    def add(self, chunk: RowChunk) -> None:
        for row in chunk.rows:
            if len(row) > 1:
                self._get_writer("rows").add(np.asarray([len(self._get_writer("tokens").lengths), len(row)]))
            for document in row:
                self._add(document)
        self._errors.extend(chunk.errors)
        self.chunks += 1
        if time.monotonic() - self._committed_at >= COMMIT_SECONDS:
            self._flush_and_write_journal()

    def _add(self, document: TokenDocument) -> None:
        self._get_writer("tokens").add(document.ids)
        if document.loss_mask is not None:
            self._get_writer("learned").add(document.loss_mask)
        if document.pictures is not None:
            grids = [picture.grid for picture in document.pictures]
            self._get_writer("grids").add(np.asarray(grids, np.int64).flatten())
            for picture in document.pictures:
                self._append_picture_contents(picture)
        self.tokens += len(document.ids)

    def _append_picture_contents(self, picture: Picture) -> None:
        for content in picture.contents:
            self._get_writer("pictures").add(np.frombuffer(content, np.uint8))
        if picture.seconds:
            files = len(picture.contents) if picture.is_frame_list else 0
            bits = np.asarray([picture.seconds, picture.fps]).view(np.int64)
            self._get_writer("videos").add(np.asarray([self._picture_count, files, *bits]))
        self._picture_count += 1

    def _get_writer(self, name: str) -> IndexedWriter:
        """Return the writer of one of the store's files; it is made with the first document."""
        if name not in self._writers:
            self._writers[name] = IndexedWriter(self._folder / name, self._types[name])
        return self._writers[name]

    def _flush_and_write_journal(self) -> None:
        for writer in self._writers.values():
            writer.flush()
        documents = {name: len(writer.lengths) for name, writer in self._writers.items()}
        entry = {"chunks": self.chunks, "documents": documents, "errors": self._errors.dump()}
        files.write_json(self._journal, entry)
        self._committed_at = time.monotonic()

    def finish(self) -> None:
        """Write indexes and facts. Raise UsageError for errors that stop the job."""
        error_facts = self._errors.summarize_or_raise_by_policy()
        digest = hashlib.sha256()
        if "grids" in self._writers:  # of which not one document may have any
            self._get_writer("pictures")
        for _, writer in sorted(self._writers.items(), reverse=True):
            writer.finish()
            with writer.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        digest.update(np.asarray(self._get_writer("tokens").lengths, np.int64).tobytes())
        facts: dict[str, Any] = {"prefix": "tokens", "sha256": digest.hexdigest()}
        facts |= {"masked": "learned" in self._writers, "pictured": "grids" in self._writers}
        facts |= {"moving": "videos" in self._writers, "grouped": "rows" in self._writers}
        files.write_json(self._folder / "facts.json", facts | error_facts)
        self._journal.unlink(missing_ok=True)


def _read_journal(folder: Path, item_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the journal; an empty one where files lack any of its documents.

    `item_sizes` are the sizes of one value of each file [bytes].
    """
    empty_entry = {"chunks": 0, "documents": {}, "errors": DataErrors("stop").dump()}
    journal = folder / "journal.json"
    if not journal.exists():
        return empty_entry
    entry: dict[str, Any] = json.loads(journal.read_text(encoding="utf-8"))
    tokens = 0
    for name, documents in entry["documents"].items():
        prefix = folder / name
        values, lengths_path = prefix.with_name(f"{name}.bin"), _build_lengths_path(prefix)
        lengths = _read_first_lengths(prefix, documents) if lengths_path.exists() else np.zeros(0, np.int64)
        is_complete = len(lengths) == documents and values.exists()
        if not is_complete or values.stat().st_size < int(lengths.sum()) * item_sizes[name]:
            _log.warning("%s: unfinished files are truncated; all tokens are written again", folder)
            return empty_entry
        tokens += int(lengths.sum()) if name == "tokens" else 0
    _log.info("continuing unfinished tokens: %s are written", f"{tokens:,}")
    return entry


def register_megatron_files(directory: Path, prefix: Path, vocabulary: int, progress: Progress) -> None:
    """Check the ids of a user's PREFIX.bin once, and write its store `directory`, which holds no tokens.

    `progress` is called with the number of tokens so far. Raise UsageError for files that megatron would not
    read, and for ids outside the vocabulary of the model.
    """
    try:
        documents = read_indexed(prefix)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{prefix}: cannot be read as Megatron's .bin and .idx ({error}). Copy or write both files again."
        ) from error
    digest = hashlib.sha256(documents.values.dtype.name.encode())
    for start in range(0, len(documents.values), VOCABULARY_CHECK_BLOCK_TOKENS):
        part = documents.values[start : start + VOCABULARY_CHECK_BLOCK_TOKENS]
        wrong = np.flatnonzero((part < 0) | (part >= vocabulary))
        if len(wrong):
            document = int(np.searchsorted(np.cumsum(documents.lengths), start + wrong[0], side="right"))
            raise UsageError(
                f"{prefix}.bin: token {part[wrong[0]]} of document {document} is not in the model's"
                f" vocabulary (ids 0 to {vocabulary - 1}). Name files that the model's tokenizer wrote."
            )
        digest.update(part.tobytes())
        progress(start + len(part))
    digest.update(documents.lengths.tobytes())
    with _write_atomically(directory) as folder:
        facts: dict[str, Any] = {"prefix": str(prefix.absolute()), "sha256": digest.hexdigest()}
        facts |= {"masked": False, "pictured": False, "grouped": False}
        files.write_json(folder / "facts.json", facts | DataErrors("stop").summarize_or_raise_by_policy())


def open_store(directory: Path) -> Store | None:
    """Return the store in `directory`; None where there is none.

    Raise JobFailed for a damaged store, and for one of another user.
    """
    if not directory.exists():
        return None
    _refuse_foreign_owner(directory)
    try:
        facts = json.loads((directory / "facts.json").read_text())
        documents = read_indexed(directory / facts["prefix"])
        loss_mask = read_indexed(directory / "learned") if facts["masked"] else None
        if loss_mask is not None and not np.array_equal(loss_mask.lengths, documents.lengths):
            raise ValueError("tokens and loss mask have different documents")
        pictures = (
            _read_pictures(directory, len(documents.lengths), facts["moving"]) if facts["pictured"] else None
        )
        rows = read_indexed(directory / "rows").values if facts["grouped"] else np.zeros(0, np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobFailed(
            f"{directory}: damaged ({error}). Delete it; the next run writes it again."
        ) from error
    mask = None if loss_mask is None else loss_mask.values.view(np.bool_)
    return Store(documents.values, mask, documents.lengths, facts, pictures, np.asarray(rows).reshape(-1, 2))


def _read_pictures(directory: Path, documents: int, moving: bool) -> Pictures:
    grids, contents = read_indexed(directory / "grids"), read_indexed(directory / "pictures")
    videos = read_indexed(directory / "videos").values if moving else np.zeros(0, np.int64)
    if len(grids.lengths) != documents:
        raise ValueError("tokens and images have different documents")
    document_grids = grids.values.astype(np.int64).reshape(-1, 3)
    pictures = Pictures(contents, document_grids, grids.lengths // 3, np.asarray(videos).reshape(-1, 4))
    if pictures.item_file_counts.sum() != len(contents.lengths):
        raise ValueError("images and their files have different documents")
    return pictures


def _refuse_foreign_owner(path: Path) -> None:
    if (owner := path.stat().st_uid) not in (os.geteuid(), 0):
        raise JobFailed(
            f"{path}: written by user {owner}, whose tokens are not trusted. Set data.cache to your own"
            " directory."
        )


@contextmanager
def _write_atomically(directory: Path) -> Iterator[Path]:
    """Give a folder to write a store into, and rename it to `directory` at the end.

    An error removes the folder; only a killed process leaves it there.
    """
    folder = build_partial_path(directory)
    if folder.exists():
        _refuse_foreign_owner(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        for path in folder.iterdir():  # a disk that fails later must not leave a part of the store
            with path.open("rb") as file:
                os.fsync(file.fileno())
        files.sync_directory(folder)
        folder.rename(directory)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise build_write_error(directory, error) from error
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
