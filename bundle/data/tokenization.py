"""Make rows into token documents with several processes; the documents keep the order of the rows."""

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from bundle.architectures import VisionArchitecture
from bundle.data import conversations, preferences
from bundle.data.chat import build_writer
from bundle.data.media import IMAGE, VIDEO, Medium, Picture
from bundle.data.processing import MediaProcessor
from bundle.data.sources import CorruptData, DataErrors, RowReport, Values, read_rows, read_texts
from bundle.data.store import Ints, RowChunk, TokenDocument
from bundle.data.tokenizers import Tokenizer, Tokens, load_tokenizer
from bundle.data.videos import insert_frame_times
from bundle.errors import JobFailed, format_count
from bundle.recipe.data import Data
from bundle.recipe.datafiles import DataFile
from bundle.recipe.tasks import Task

# The limits of a chunk: it occupies a fast tokenizer, and unfinished chunks stay small.
# Journals count chunks, so both limits are part of the store's name.
CHUNK_ROWS, CHUNK_CHARACTERS = 256, 2**22
# With fewer bytes of files, all work is done before another process has finished its imports.
MIN_PARALLEL_BYTES = 2**26
# With images, which take longer than the rows that name them.
MIN_PARALLEL_BYTES_WITH_IMAGES = 2**20

# Consecutive rows after their places, and the errors of other rows between them.
_PlacedRows = tuple[list[tuple[str, Any]], RowReport]


@dataclass(frozen=True)
class Encoding:
    """The settings by which rows become tokens: `max_length` limits conversations, `vocabulary` the ids.

    `processor` reads images and videos for a model with a vision tower; None: the model has none.
    """

    data: Data
    task: Task
    vocabulary: int
    max_length: int
    processor: MediaProcessor | None = None

    def encode_remaining_chunks(
        self, sources: Iterable[DataFile], tokenizer: Tokenizer, first: int = 0
    ) -> Iterator[RowChunk]:
        """Return the files' documents from chunk number `first` on.

        The chunks are the same for any number of processes.
        """
        sources = list(sources)
        rows = islice(_read_row_chunks(self, sources), first, None)
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        min_bytes = MIN_PARALLEL_BYTES if self.processor is None else MIN_PARALLEL_BYTES_WITH_IMAGES
        if workers == 1 or sum(source.path.stat().st_size for source in sources) < min_bytes:
            return map(_Encoder(self, tokenizer), rows)
        return _encode_in_processes(self, rows, workers)


def _read_row_chunks(encoding: Encoding, sources: list[DataFile]) -> Iterator[_PlacedRows]:
    data, errors = encoding.data, DataErrors(encoding.data.on_error)
    read: Iterator[tuple[str, Any]]
    if encoding.task.has_plain_text_rows:
        read = read_texts(data, sources, errors)
    else:
        columns = (
            preferences.list_readable_columns
            if encoding.task.has_pairs
            else conversations.list_readable_columns
        )
        read = read_rows(sources, columns(data.fields), errors)
    chunk: list[tuple[str, Any]] = []
    size = 0
    for place, row in read:
        chunk.append((place, row))
        size += len(row) if isinstance(row, str) else 0
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield chunk, errors.drain_report()
            chunk, size = [], 0
    if chunk or errors.corrupt.count:
        yield chunk, errors.drain_report()


class _Encoder:
    """Makes token documents of rows, with the tokenizer and the writer of conversations."""

    def __init__(self, encoding: Encoding, tokenizer: Tokenizer) -> None:
        self._encoding, self._tokenizer = encoding, tokenizer
        self._writer: Any = (
            None if encoding.task.has_plain_text_rows else build_writer(encoding.data, tokenizer)
        )

    def __call__(self, placed_rows: _PlacedRows) -> RowChunk:
        """Return the token documents of some rows; errors in them are added to those found before."""
        encoding, tokenizer, errors = (
            self._encoding,
            self._tokenizer,
            DataErrors(self._encoding.data.on_error),
        )
        chunk, report = placed_rows
        errors.extend(report)
        placed: Iterator[tuple[str, list[TokenDocument]]]
        if encoding.task.has_plain_text_rows:
            end = np.uint32(tokenizer.end_of_text)
            encoded = tokenizer.encode([text for _, text in chunk]) if chunk else ()
            row_documents = ([TokenDocument(np.append(ids, end))] for ids in encoded)
            placed = zip((place for place, _ in chunk), row_documents, strict=True)
        else:
            placed = self._encode_conversations(chunk, errors)
        if (processor := encoding.processor) is not None:
            placed = errors.convert_rows(
                placed,
                lambda documents: [
                    expand_media_tokens(document, document.pictures or (), processor.vision)
                    for document in documents
                ],
            )
        valid_rows = errors.convert_rows(
            placed,
            lambda documents: [
                _check_ids_and_learned_tokens(document, tokenizer.vocab_size) for document in documents
            ],
        )
        if not encoding.task.has_plain_text_rows:
            valid_rows = _apply_truncation_policy(valid_rows, encoding, errors)
        return RowChunk([documents for _, documents in valid_rows], errors.dump())

    def _encode_conversations(
        self, placed_rows: list[tuple[str, Values]], errors: DataErrors
    ) -> Iterator[tuple[str, list[TokenDocument]]]:
        """Yield the documents of each row after its place: those of its conversation, or two of a pair."""
        read = list(
            errors.convert_rows(
                ((row[0], row) for row in placed_rows), lambda row: self._build_render_requests(row, errors)
            )
        )
        drafts = iter(self._writer.draft([prepared for _, entries in read for prepared in entries]))
        drafted = ((place, (place, [next(drafts) for _ in entries])) for place, entries in read)
        rows = list(errors.convert_rows(drafted, self._read_drafts_with_media))
        drafts_to_encode: list[Any] = [draft for _, entries in rows for draft, _ in entries]
        documents = iter(self._writer.encode(drafts_to_encode) if drafts_to_encode else ())
        for place, entries in rows:
            yield place, [replace(next(documents), pictures=pictures) for _, pictures in entries]

    def _build_render_requests(self, row: tuple[str, Values], errors: DataErrors) -> list[Any]:
        """Return what the writer needs of each conversation of a row; `errors` get the row's format."""
        place, values = row
        data = self._encoding.data
        read: list[conversations.Conversation] = []
        if self._encoding.task.has_pairs:
            read += preferences.read_preference(values, data)
        else:
            read.append(conversations.read_conversation(values, data))
        errors.formats.add(place, read[0].format)
        return [self._writer.prepare_render_request(conversation) for conversation in read]

    def _read_drafts_with_media(
        self, row: tuple[str, list[Any]]
    ) -> list[tuple[Any, tuple[Picture, ...] | None]]:
        """Return the drafts of a row's conversations with their images and videos."""
        place, conversations = row  # "file:line"
        folder, row_drafts = Path(place.rpartition(":")[0]).parent, []
        for drafts in conversations:
            if isinstance(drafts, CorruptData):
                raise drafts
            if self._encoding.task.has_pairs and len(drafts) > 1:
                raise CorruptData(
                    "the chat template rewrites earlier turns of an answer, so it has no single"
                    " log-probability. Set data.learn: last_turn."
                )
            row_drafts += drafts
        processor, tokenizer = self._encoding.processor, self._tokenizer
        return [
            read_media_and_insert_times(processor, tokenizer, draft, media, folder)
            for draft, media in row_drafts
        ]


def read_media_and_insert_times(
    processor: MediaProcessor | None, tokenizer: Tokenizer, draft: Any, media: Sequence[Medium], folder: Path
) -> tuple[Any, tuple[Picture, ...] | None]:
    """Return a draft with its images and videos, whose files lie in `folder`; None: the model takes none.

    Where the frames of a video are separate, each frame has its place in the draft. Raise CorruptData.
    """
    if processor is None:
        if media:
            raise CorruptData(f"the input has {media[0].kind}s, but the model takes only text")
        return draft, None
    pictures = tuple(processor.read_bytes_and_grid(medium, folder) for medium in media)
    vision = processor.vision
    if vision.has_frame_timestamps and (videos := [picture for picture in pictures if picture.seconds]):
        tokens = (vision.start_token, vision.video_token, vision.end_token)
        start, pad, end = (tokenizer.decode([token]) for token in tokens if token is not None)
        text, parts = draft
        draft = insert_frame_times(text, parts, videos, (start, pad, end))
    return draft, pictures


def expand_media_tokens(
    document: TokenDocument, pictures: Sequence[Picture], vision: VisionArchitecture
) -> TokenDocument:
    """Return the document with a token for each embedding of an image or video.

    The template writes one token for each image or video, or one for each patch in time where frames are
    separate. Raise CorruptData where it does not.
    """
    tokens = {IMAGE: vision.image_token, VIDEO: vision.video_token}
    kinds = [VIDEO if picture.seconds else IMAGE for picture in pictures]
    repeats = [picture.grid[0] if vision.has_frame_timestamps else 1 for picture in pictures]
    expected_ids = np.repeat([tokens[kind] for kind in kinds], repeats)
    places = np.flatnonzero(np.isin(document.ids, [token for token in tokens.values() if token is not None]))
    if not np.array_equal(document.ids[places], expected_ids):
        raise CorruptData(_describe_media_token_mismatch(document.ids[places], expected_ids, tokens))
    sizes = [math.prod(picture.grid) // vision.patches_per_embedding for picture in pictures]
    counts = np.ones(len(document.ids), np.int64)
    counts[places] = np.repeat(np.asarray(sizes, np.int64) // np.asarray(repeats, np.int64), repeats)
    learned = None if document.loss_mask is None else np.repeat(document.loss_mask, counts)
    return replace(document, ids=np.repeat(document.ids, counts), loss_mask=learned)


def _describe_media_token_mismatch(
    actual_ids: Tokens, expected_ids: Ints, tokens: Mapping[str, int | None]
) -> str:
    """Return how the tokens of images and videos differ from `expected_ids`."""
    for kind, token in tokens.items():
        have, need = (int(np.count_nonzero(ids == token)) for ids in (actual_ids, expected_ids))
        if have != need:
            return (
                f"the row has {format_count(need, kind)}, but its text has {format_count(have, 'token')} for"
                f" {kind}s ({kind}_token_id {token})"
            )
    return "the chat template renders images and videos in another order than the row has"


def _encode_in_processes(
    encoding: Encoding, chunks: Iterator[_PlacedRows], workers: int
) -> Iterator[RowChunk]:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _initialize_worker, (encoding,))
    under_way: deque[Future[RowChunk]] = deque()
    try:
        for rows in chunks:
            under_way.append(pool.submit(_encode_rows, rows))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise JobFailed(
            "a tokenizing process was killed, perhaps for its memory. Run the same command again: it"
            " continues with what is done."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encode: Any = None  # of a worker process: what it does with rows


def _initialize_worker(encoding: Encoding) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    threading.Thread(target=_wait_for_parent_and_exit, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # we are the parallel ones
    _encode = _Encoder(encoding, load_tokenizer(encoding.data.tokenizer, encoding.vocabulary))


def _wait_for_parent_and_exit() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_rows(placed_rows: _PlacedRows) -> RowChunk:
    chunk: RowChunk = _encode(placed_rows)
    return chunk


def _check_ids_and_learned_tokens(document: TokenDocument, vocabulary: int) -> TokenDocument:
    highest = int(document.ids.max(initial=0))
    if highest >= vocabulary:  # the tokenizer's ids are the model's
        raise CorruptData(f"token {highest} is not in the vocabulary (ids 0 to {vocabulary - 1})")
    if not _has_learned_tokens(document):
        raise CorruptData("no token of the row would be trained on")
    return document


def _has_learned_tokens(document: TokenDocument) -> bool:
    """Return whether a token of the document is a label; the first one never is."""
    return document.loss_mask is None or bool(document.loss_mask[1:].any())


def _apply_truncation_policy(
    placed_documents: Iterator[tuple[str, list[TokenDocument]]], encoding: Encoding, errors: DataErrors
) -> Iterator[tuple[str, list[TokenDocument]]]:
    """Yield the rows with at most `max_length` tokens a document, and longer ones as `data.truncation` says.

    Both documents of a pair are kept, each cut where it is too long, or none. In other rows a document is
    left out where the cut leaves nothing to learn in it.
    """
    truncation, max_length = encoding.data.truncation, encoding.max_length
    for row, documents in placed_documents:
        size = max(len(document.ids) for document in documents)
        if size <= max_length:
            yield row, documents
            continue
        place = f"{row} ({size:,} tokens)"  # with it, rows of all lengths have one reason
        reason = (
            f"longer than the {max_length:,} tokens that data.sequence_length and the model's positions allow"
        )
        cut = [_shorten(document, max_length, truncation) for document in documents]
        learning = list(filter(_has_learned_tokens, cut))
        if truncation == "error":
            remedy = "Set data.truncation: delete (leave out such rows), right or left (cut them)"
            errors.record_corrupt_data(place, f"{reason}. {remedy}")
        elif truncation == "delete":
            errors.deleted.add(place, f"{reason}; deleted")
        elif any(document.pictures for document in documents):
            errors.deleted.add(place, f"{reason}; images and videos are not cut, so the row is deleted")
        elif not learning or (encoding.task.has_pairs and len(learning) < len(cut)):
            errors.deleted.add(place, f"{reason}; a cut leaves no token to train on, so the row is deleted")
        else:
            errors.cut.add(place, f"{reason}; cut on the {truncation}")
            yield row, learning


def _shorten(document: TokenDocument, max_length: int, side: str) -> TokenDocument:
    """Return the document without the tokens that exceed `max_length` on that side."""
    begin = 0 if side == "right" else max(0, len(document.ids) - max_length)
    span = slice(begin, begin + max_length)
    learned = None if document.loss_mask is None else document.loss_mask[span]
    return replace(document, ids=document.ids[span], loss_mask=learned)
