"""Rows to token documents by several processes, in the order of the rows, whoever was faster."""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Any

from bundle.data.sources import DataErrors, Noted
from bundle.data.store import Chunk
from bundle.data.tokenization import documents, rows_of
from bundle.data.tokenizers import Tokenizer, tokenizer
from bundle.errors import JobFailed
from bundle.recipe.sections import Data
from bundle.recipe.sources import Source

# What ends a chunk: enough to occupy a fast tokenizer, little enough that those under way stay small.
# Journals count chunks, so both are part of the name of what is begun.
ROWS, CHARACTERS = 256, 2**22
# Below so many bytes of files a process would still be importing when all is done.
WORTH_IT = 2**26


@dataclass(frozen=True)
class Encoding:
    """What makes tokens of rows: `longest` limits SFT conversations, `vocabulary` is the model's."""

    data: Data
    task: str
    vocabulary: int
    longest: int

    def chunks(self, sources: Iterable[Source], made: Tokenizer, first: int = 0) -> Iterator[Chunk]:
        """The files' documents from chunk number `first` on, the same however many processes make them."""
        sources = list(sources)
        rows = islice(_cut(self, sources), first, None)
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers == 1 or sum(source.path.stat().st_size for source in sources) < WORTH_IT:
            return (_encoded(self, made, each) for each in rows)
        return _by_workers(self, rows, workers)


@dataclass(frozen=True)
class _Rows:
    """Some rows that follow each other, and what was wrong with others between them."""

    rows: list[Any]
    errors: Noted


def _cut(encoding: Encoding, sources: list[Source]) -> Iterator[_Rows]:
    errors = DataErrors(encoding.data.on_error)
    rows = rows_of(encoding.data, encoding.task, sources, errors)
    chunk: list[Any] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row[1]) if isinstance(row[1], str) else 0
        if len(chunk) == ROWS or size >= CHARACTERS:
            yield _Rows(chunk, errors.taken())
            chunk, size = [], 0
    if chunk or errors.count:
        yield _Rows(chunk, errors.taken())


def _encoded(encoding: Encoding, made: Tokenizer, given: _Rows) -> Chunk:
    errors = DataErrors(encoding.data.on_error)
    errors.extend(given.errors)
    found = documents(iter(given.rows), encoding.data, encoding.task, made, encoding.longest, errors)
    return Chunk(list(found), errors.dump())


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
    _encode = partial(_encoded, encoding, tokenizer(encoding.data.tokenizer, encoding.vocabulary))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _in_worker(given: _Rows) -> Chunk:
    chunk: Chunk = _encode(given)
    return chunk
