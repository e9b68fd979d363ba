"""Find or make the tokens of data: one process makes them once, and every run with the same data uses them.

The name of a store is a digest of what the tokens are made from: the files, the tokenizer and the keys of the
recipe.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from bundle import files
from bundle.data import tokenization
from bundle.data.processing import MediaProcessor
from bundle.data.sources import DataErrors
from bundle.data.store import (
    Progress,
    Store,
    build_partial_path,
    build_write_error,
    open_store,
    register_megatron_files,
    write_store,
)
from bundle.data.tokenization import Encoding
from bundle.data.tokenizers import Tokenizer
from bundle.errors import JobFailed
from bundle.files import compute_short_json_digest
from bundle.recipe import Recipe
from bundle.recipe.datafiles import MEGATRON, DataFile

_log = logging.getLogger(__name__)

STORE_FORMAT = 9  # of the files of a store, and of what their names are made from
SHARED_TOKENS_DIRECTORY_NAME = ".tokens"
# Keys that tokens do not depend on, or that other facts in the store's name already cover.
_EXCLUDED_KEYS = {"path", "weights", "tokenizer", "sequence_length", "packed"}
_EXCLUDED_KEYS |= {"validation", "validation_sets", "cache"}
_BLOCK_BYTES = 2**24  # bytes
_POLL_SECONDS = 1.0  # between two checks of another process's progress


def choose_cross_run_cache_directory(recipe: Recipe, run: Path) -> Path:
    """Return the directory for tokens.

    It is `data.cache` where that key is set; else a directory beside the run, which neighbouring runs share.
    Where that directory is not writable, it is `data` in the run directory.
    """
    if recipe.data.cache is not None:
        return Path(recipe.data.cache)
    shared_directory = run.absolute().parent / SHARED_TOKENS_DIRECTORY_NAME
    with suppress(OSError):
        shared_directory.mkdir(parents=True, exist_ok=True)
    return shared_directory if os.access(shared_directory, os.W_OK | os.X_OK) else run / "data"


def ensure_store(
    recipe: Recipe,
    directory: Path,
    sources: Sequence[DataFile],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Progress,
) -> Store:
    """Return the store of one data set under `directory`; make the store where it is missing.

    `max_length` limits conversations. Where a row that is too long stops the job, the other rows have the
    same tokens for any limit. One store then serves all limits. While another process makes the store, this
    one waits.

    Raise UsageError for corrupt data; raise JobFailed for a damaged store and for a store of another user.
    """
    if recipe.task_traits.has_plain_text_rows:
        return _open_or_write_store(recipe, directory, sources, tokenizer, max_length, 0, progress)
    if recipe.data.truncation == "error" and recipe.data.on_error == "stop":
        store = _open_or_write_store(recipe, directory, sources, tokenizer, max_length, 0, progress)
        if store.lengths.max(initial=0) <= max_length:
            return store
    return _open_or_write_store(recipe, directory, sources, tokenizer, max_length, max_length, progress)


def _open_or_write_store(
    recipe: Recipe,
    directory: Path,
    sources: Sequence[DataFile],
    tokenizer: Tokenizer,
    max_length: int,
    row_limit: int,
    progress: Progress,
) -> Store:
    """Return the store whose name contains `row_limit`; make it where it is missing.

    `row_limit` is the limit that the rows were checked against; 0 stands for every limit.
    """
    processor = MediaProcessor.from_recipe(recipe)
    settings = {name: value for name, value in recipe.data.dump().items() if name not in _EXCLUDED_KEYS}
    settings["source"] = kind = sources[0].kind
    if kind == MEGATRON:
        (source,) = sources
        facts = [recipe.architecture.vocab_size, _list_stats([source.path, source.path.with_suffix(".bin")])]
    else:
        content = _digest_files(directory, sources, progress)
        facts = [
            recipe.task,
            settings,
            tokenizer.identity,
            row_limit,
            content,
            tokenization.CHUNK_ROWS,
            tokenization.CHUNK_CHARACTERS,
            # Which files a row names follows from where it lies.
            processor
            and [asdict(processor), sorted({str(source.path.parent.resolve()) for source in sources})],
        ]
    path = directory / f"tokens-{compute_short_json_digest([STORE_FORMAT, facts])}"
    if store := open_store(path):
        return store
    with _hold_store_lock(path, progress):
        if open_store(path) is None:
            if kind == MEGATRON:
                register_megatron_files(
                    path, source.path.with_suffix(""), recipe.architecture.vocab_size, progress
                )
            else:
                vocabulary = recipe.architecture.vocab_size
                encoding = Encoding(recipe.data, recipe.task_traits, vocabulary, max_length, processor)
                write_store(
                    path,
                    tokenizer.vocab_size,
                    lambda first: encoding.encode_remaining_chunks(sources, tokenizer, first),
                    DataErrors(recipe.data.on_error),
                    progress,
                )
    store = open_store(path)
    if store is None:
        raise JobFailed(
            f"{path}: the tokens just written are missing. Check whether another job deletes them."
        )
    return store


@contextmanager
def _hold_store_lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock on making a store, which one process at a time has.

    While this process waits, the progress of the other process counts as its own.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            tokens_path, seen_bytes = build_partial_path(path) / "tokens.bin", -1
            while not _try_lock(lock):
                written = _get_size_or_zero(tokens_path)
                if seen_bytes < 0:
                    _log.info("%s: waiting for another process, which writes the same tokens", path)
                if written > seen_bytes:
                    progress(written // 2)
                seen_bytes = max(seen_bytes, written)
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise build_write_error(path, error) from error
        yield  # the lock goes with the file, and with the process, however it ends


def _get_size_or_zero(path: Path) -> int:
    """Return the size of a file [bytes]; 0 where there is none.

    Another process may remove the file at any time.
    """
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _list_stats(paths: Iterable[Path]) -> list[Any]:
    stats = ((path.resolve(), path.stat()) for path in paths)
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _digest_files(directory: Path, sources: Sequence[DataFile], progress: Progress) -> str:
    """Return the digest of the contents of all files in their order.

    The files are read once; later calls find the digest by the files' paths, sizes and times.
    """
    digest_path = (
        directory / f"files-{compute_short_json_digest(_list_stats(source.path for source in sources))}"
    )
    if (
        digest_path.exists()
        and digest_path.stat().st_uid in (os.geteuid(), 0)
        and len(known := digest_path.read_text()) == 64
    ):
        return known
    digest = hashlib.sha256()
    for source in sources:
        digest.update(b"\0%d\0" % source.path.stat().st_size)
        try:
            with source.path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    progress(0)
        except OSError as error:  # whether that stops the job is said where its rows are read
            digest.update(str(error.errno).encode())
    with suppress(OSError, JobFailed):  # it says where nothing can be written when tokens are
        directory.mkdir(parents=True, exist_ok=True)
        files.write_text(digest_path, digest.hexdigest())
    return digest.hexdigest()
