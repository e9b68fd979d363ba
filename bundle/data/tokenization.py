"""Rows to token documents by several processes, in the order of the rows, whoever was faster."""

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

from bundle.architectures import Vision
from bundle.data import conversations, preferences
from bundle.data.chat import writer
from bundle.data.media import IMAGE, VIDEO, Medium, Picture
from bundle.data.processing import Processing
from bundle.data.sources import Corrupt, DataErrors, Noted, Values, rows, texts
from bundle.data.store import Chunk, Document, Ints
from bundle.data.tokenizers import Tokenizer, Tokens, tokenizer
from bundle.data.videos import timed
from bundle.errors import JobFailed
from bundle.planning.datafiles import Source
from bundle.recipe.data import Data

# What ends a chunk: enough to occupy a fast tokenizer, little enough that those under way stay small.
# Journals count chunks, so both are part of the name of what is begun.
ROWS, CHARACTERS = 256, 2**22
# Below so many bytes of files a process would still be importing when all is done.
WORTH_IT = 2**26
# With images, which take longer than the rows that name them.
WORTH_IT_FOR_IMAGES = 2**20

# Rows that follow each other, after their places, and what was wrong with others between them.
_Rows = tuple[list[tuple[str, Any]], Noted]


@dataclass(frozen=True)
class Encoding:
    """What makes tokens of rows: `longest` limits conversations, `vocabulary` is the model's.

    `images` is how a model that sees images and videos takes them; None: it sees none.
    """

    data: Data
    task: str
    vocabulary: int
    longest: int
    images: Processing | None = None

    def chunks(self, sources: Iterable[Source], made: Tokenizer, first: int = 0) -> Iterator[Chunk]:
        """The files' documents from chunk number `first` on, the same however many processes make them."""
        sources = list(sources)
        rows = islice(_cut(self, sources), first, None)
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        worth_it = WORTH_IT if self.images is None else WORTH_IT_FOR_IMAGES
        if workers == 1 or sum(source.path.stat().st_size for source in sources) < worth_it:
            return map(_Encoder(self, made), rows)
        return _by_workers(self, rows, workers)


def _cut(encoding: Encoding, sources: list[Source]) -> Iterator[_Rows]:
    data, errors = encoding.data, DataErrors(encoding.data.on_error)
    read: Iterator[tuple[str, Any]]
    if encoding.task == "pretrain":
        read = texts(data, sources, errors)
    else:
        columns = preferences.columns if encoding.task == "dpo" else conversations.columns
        read = rows(sources, columns(data.fields), errors)
    chunk: list[tuple[str, Any]] = []
    size = 0
    for place, row in read:
        chunk.append((place, row))
        size += len(row) if isinstance(row, str) else 0
        if len(chunk) == ROWS or size >= CHARACTERS:
            yield chunk, errors.taken()
            chunk, size = [], 0
    if chunk or errors.corrupt.count:
        yield chunk, errors.taken()


class _Encoder:
    """Makes token documents of rows, with the tokenizer and what writes its conversations."""

    def __init__(self, encoding: Encoding, made: Tokenizer) -> None:
        self._encoding, self._tokenizer = encoding, made
        self._writer: Any = None if encoding.task == "pretrain" else writer(encoding.data, made)

    def __call__(self, given: _Rows) -> Chunk:
        """The token documents of some rows; what is corrupt in them is added to what was found before."""
        encoding, made, errors = self._encoding, self._tokenizer, DataErrors(self._encoding.data.on_error)
        chunk, noted = given
        errors.extend(noted)
        placed: Iterator[tuple[str, list[Document]]]
        if encoding.task == "pretrain":
            end = np.uint32(made.end_of_text)
            encoded = made.encode([text for _, text in chunk]) if chunk else ()
            whole = ([Document(np.append(ids, end))] for ids in encoded)
            placed = zip((place for place, _ in chunk), whole, strict=True)
        else:
            placed = self._conversations(chunk, errors)
        if (images := encoding.images) is not None:
            placed = errors.passed(
                placed,
                lambda documents: [with_room(one, one.pictures or (), images.vision) for one in documents],
            )
        found = errors.passed(placed, lambda documents: [_checked(one, made.vocab_size) for one in documents])
        if encoding.task != "pretrain":
            found = _fitting(found, encoding, errors)
        return Chunk([documents for _, documents in found], errors.dump())

    def _conversations(
        self, given: list[tuple[str, Values]], errors: DataErrors
    ) -> Iterator[tuple[str, list[Document]]]:
        """The documents of each row, after its place: those of its conversation, or two of a pair."""
        read = list(
            errors.passed(((row[0], row) for row in given), lambda row: self._prepare_row(row, errors))
        )
        drafts = iter(self._writer.draft([prepared for _, each in read for prepared in each]))
        drafted = ((place, (place, [next(drafts) for _ in each])) for place, each in read)
        rows = list(errors.passed(drafted, self._seen))
        each_draft: list[Any] = [draft for _, each in rows for draft, _ in each]
        documents = iter(self._writer.encode(each_draft) if each_draft else ())
        for place, each in rows:
            yield place, [replace(next(documents), pictures=pictures) for _, pictures in each]

    def _prepare_row(self, row: tuple[str, Values], errors: DataErrors) -> list[Any]:
        """What the writer takes of each conversation of a row; `errors` get the row's format."""
        place, values = row
        data = self._encoding.data
        read: list[conversations.Conversation] = []
        if self._encoding.task == "dpo":
            read += preferences.preference(values, data)
        else:
            read.append(conversations.conversation(values, data))
        errors.formats.add(place, read[0].format)
        return [self._writer.prepare(conversation) for conversation in read]

    def _seen(self, row: tuple[str, list[Any]]) -> list[tuple[Any, tuple[Picture, ...] | None]]:
        """The drafts of a row's conversations, with their images and videos."""
        place, conversations = row  # "file:line"
        folder, together = Path(place.rpartition(":")[0]).parent, []
        for drafts in conversations:
            if isinstance(drafts, Corrupt):
                raise drafts
            if self._encoding.task == "dpo" and len(drafts) > 1:
                raise Corrupt(
                    "the chat template rewrites earlier turns of an answer, which has one log-probability."
                    " Set data.learn: last_turn."
                )
            together += drafts
        processing, made = self._encoding.images, self._tokenizer
        return [seen(processing, made, draft, media, folder) for draft, media in together]


def seen(
    processing: Processing | None, made: Tokenizer, draft: Any, media: Sequence[Medium], folder: Path
) -> tuple[Any, tuple[Picture, ...] | None]:
    """A draft with its images and videos, whose files lie in `folder`; None: the model sees none.

    Where frames stand apart, each has its place in the draft. Raises Corrupt.
    """
    if processing is None:
        if media:
            raise Corrupt(f"has {media[0].kind}s, and the model sees none")
        return draft, None
    pictures = tuple(processing.read(medium, folder) for medium in media)
    vision = processing.vision
    if vision.frames_apart and (videos := [picture for picture in pictures if picture.seconds]):
        tokens = (vision.start_token, vision.video_token, vision.end_token)
        start, pad, end = (made.decode([token]) for token in tokens if token is not None)
        text, parts = draft
        draft = timed(text, parts, videos, (start, pad, end))
    return draft, pictures


def with_room(document: Document, pictures: Sequence[Picture], v: Vision) -> Document:
    """The document with as many tokens as embeddings, where the template has written one an image or video.

    Where frames stand apart, there is one for each of a video's. Raises Corrupt where there is not.
    """
    tokens = {IMAGE: v.image_token, VIDEO: v.video_token}
    kinds = [VIDEO if picture.seconds else IMAGE for picture in pictures]
    apart = [picture.grid[0] if v.frames_apart else 1 for picture in pictures]
    wanted = np.repeat([tokens[kind] for kind in kinds], apart)
    places = np.flatnonzero(np.isin(document.ids, [token for token in tokens.values() if token is not None]))
    if not np.array_equal(document.ids[places], wanted):
        raise Corrupt(_misplaced(document.ids[places], wanted, tokens))
    sizes = [math.prod(picture.grid) // v.patches for picture in pictures]
    counts = np.ones(len(document.ids), np.int64)
    counts[places] = np.repeat(np.asarray(sizes, np.int64) // np.asarray(apart, np.int64), apart)
    learned = None if document.learned is None else np.repeat(document.learned, counts)
    return replace(document, ids=np.repeat(document.ids, counts), learned=learned)


def _misplaced(found: Tokens, wanted: Ints, tokens: Mapping[str, int | None]) -> str:
    """How the tokens of images and videos are others than those `wanted`."""
    for kind, token in tokens.items():
        have, need = (np.count_nonzero(of == token) for of in (found, wanted))
        if have != need:
            return f"has {need} {kind}s, and its text {have} tokens for one ({kind}_token_id {token})"
    return "the chat template writes its images and videos in another order"


def _by_workers(encoding: Encoding, given: Iterator[_Rows], workers: int) -> Iterator[Chunk]:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (encoding,))
    under_way: deque[Future[Chunk]] = deque()
    try:
        for rows in given:
            under_way.append(pool.submit(_in_worker, rows))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise JobFailed(
            "a process that makes tokens was killed, perhaps for its memory; the same command goes on with"
            " what is done"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encode: Any = None  # of a worker process: what it does with rows


def _begin(encoding: Encoding) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # we are the parallel ones
    _encode = _Encoder(encoding, tokenizer(encoding.data.tokenizer, encoding.vocabulary))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _in_worker(given: _Rows) -> Chunk:
    chunk: Chunk = _encode(given)
    return chunk


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
    given: Iterator[tuple[str, list[Document]]], encoding: Encoding, errors: DataErrors
) -> Iterator[tuple[str, list[Document]]]:
    """The rows of at most `longest` tokens a document, and what `data.truncation` makes of longer ones.

    Both documents of a pair are kept, each cut where it is too long, or none. Of other rows a document is
    left out where the cut leaves nothing to learn in it.
    """
    truncation, longest = encoding.data.truncation, encoding.longest
    for row, documents in given:
        size = max(len(document.ids) for document in documents)
        if size <= longest:
            yield row, documents
            continue
        place = f"{row} ({size:,} tokens)"  # with it, rows of all lengths have one reason
        what = f"more than the {longest:,} tokens that data.sequence_length and the model's positions allow"
        cut = [_shortened(document, longest, truncation) for document in documents]
        learning = list(filter(_learns, cut))
        if truncation == "error":
            errors.add(place, f"{what}; data.truncation says what to do with such rows")
        elif truncation == "delete":
            errors.deleted.add(place, f"{what}: deleted")
        elif any(document.pictures for document in documents):
            errors.deleted.add(place, f"{what}, and images and videos are not cut: deleted")
        elif not learning or (encoding.task == "dpo" and len(learning) < len(cut)):
            errors.deleted.add(place, f"{what}, and what is left has nothing to learn: deleted")
        else:
            errors.cut.add(place, f"{what}: cut on the {truncation}")
            yield row, learning


def _shortened(document: Document, longest: int, side: str) -> Document:
    """The document without what is beyond `longest` tokens on that side."""
    begin = 0 if side == "right" else max(0, len(document.ids) - longest)
    kept = slice(begin, begin + longest)
    learned = None if document.learned is None else document.learned[kept]
    return replace(document, ids=document.ids[kept], learned=learned)
