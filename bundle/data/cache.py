"""Where the tokens of data lie: made once, by one process, kept for every run that asks for the same.

Their name is what they are made from: the digest of the files, the tokenizer, what the recipe says of them.
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
from bundle.files import digest_json
from bundle.recipe import Recipe
from bundle.recipe.datafiles import MEGATRON, DataFile

_log = logging.getLogger(__name__)

FORMAT = 9  # of the files of a store, and of what their names are made from
CACHE_NAME = ".tokens"
# What tokens do not depend on, or by what else stands in their name.
_EXCLUDED_KEYS = {"path", "weights", "tokenizer", "sequence_length", "packed"}
_EXCLUDED_KEYS |= {"validation", "validation_sets", "cache"}
_BLOCK_BYTES = 2**24  # bytes
_POLL_SECONDS = 1.0  # between two looks at what another process has made


def choose_cache_directory(recipe: Recipe, run: Path) -> Path:
    """The directory of tokens: the recipe's, one beside the run for its neighbours too, or the run's own."""
    if recipe.data.cache is not None:
        return Path(recipe.data.cache)
    shared_directory = run.absolute().parent / CACHE_NAME
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
    """The store of one data set under `directory`, made unless it is there.

    `max_length` limits conversations.

    Where a long row stops the job, the tokens of the others are the same for any limit: one store serves all.
    While another process makes it, this one waits. Raises UsageError for corrupt data, JobFailed for
    a damaged store and for one of another user.
    """
    if recipe.task_traits.reads_text:
        return _make_store(recipe, directory, sources, tokenizer, max_length, 0, progress)
    if recipe.data.truncation == "error" and recipe.data.on_error == "stop":
        store = _make_store(recipe, directory, sources, tokenizer, max_length, 0, progress)
        if store.lengths.max(initial=0) <= max_length:
            return store
    return _make_store(recipe, directory, sources, tokenizer, max_length, max_length, progress)


def _make_store(
    recipe: Recipe,
    directory: Path,
    sources: Sequence[DataFile],
    tokenizer: Tokenizer,
    max_length: int,
    row_limit: int,
    progress: Progress,
) -> Store:
    """The store whose name has this `row_limit`: the limit that its rows were held against, 0 for any."""
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
    path = directory / f"tokens-{digest_json([FORMAT, facts])}"
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
                    lambda first: encoding.encode_chunks(sources, tokenizer, first),
                    DataErrors(recipe.data.on_error),
                    progress,
                )
    store = open_store(path)
    if store is None:
        raise JobFailed(f"{path}: the tokens just written are gone; is another job deleting them?")
    return store


@contextmanager
def _hold_store_lock(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the making of a store, which one process does at a time; its progress is ours while we wait."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            tokens_path, seen_bytes = build_partial_path(path) / "tokens.bin", -1
            while not _try_lock(lock):
                written = _read_size(tokens_path)
                if seen_bytes < 0:
                    _log.info("%s: another process makes these tokens, this one waits", path)
                if written > seen_bytes:
                    progress(written // 2)
                seen_bytes = max(seen_bytes, written)
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise build_write_error(path, error) from error
        yield  # the lock goes with the file, and with the process, however it ends


def _read_size(path: Path) -> int:
    """Bytes of a file; 0 where there is none, which others may take away at any time."""
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
    """The digest of all files in their order; read once, then known by their paths, sizes and times."""
    digest_path = directory / f"files-{digest_json(_list_stats(source.path for source in sources))}"
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
