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
from bundle.data.processing import Processing
from bundle.data.sources import DataErrors
from bundle.data.store import Progress, Store, adopt, building, open_store, unwritable, write
from bundle.data.tokenization import Encoding
from bundle.data.tokenizers import Tokenizer
from bundle.errors import JobFailed
from bundle.files import json_digest
from bundle.planning.datafiles import MEGATRON, Source
from bundle.recipe import Recipe

_log = logging.getLogger(__name__)

FORMAT = 9  # of the files of a store, and of what their names are made from
NAME = ".tokens"
# What tokens do not depend on, or by what else stands in their name.
_APART = {"path", "weights", "tokenizer", "sequence_length", "packed"}
_APART |= {"validation", "validation_sets", "cache"}
_BLOCK = 2**24  # bytes
_SECONDS = 1.0  # between two looks at what another process has made


def place(recipe: Recipe, run: Path) -> Path:
    """The directory of tokens: the recipe's, one beside the run for its neighbours too, or the run's own."""
    if recipe.data.cache is not None:
        return Path(recipe.data.cache)
    beside = run.absolute().parent / NAME
    with suppress(OSError):
        beside.mkdir(parents=True, exist_ok=True)
    return beside if os.access(beside, os.W_OK | os.X_OK) else run / "data"


def stored(
    recipe: Recipe,
    directory: Path,
    sources: Sequence[Source],
    made: Tokenizer,
    longest: int,
    progress: Progress,
) -> Store:
    """The store of one data set under `directory`, made unless it is there. `longest` limits conversations.

    Where a long row stops the job, the tokens of the others are the same for any limit: one store serves all.
    While another process makes it, this one waits. Raises UsageError for corrupt data, JobFailed for
    a damaged store and for one of another user.
    """
    if recipe.task == "pretrain":
        return _make_store(recipe, directory, sources, made, longest, 0, progress)
    if recipe.data.truncation == "error" and recipe.data.on_error == "stop":
        store = _make_store(recipe, directory, sources, made, longest, 0, progress)
        if store.lengths.max(initial=0) <= longest:
            return store
    return _make_store(recipe, directory, sources, made, longest, longest, progress)


def _make_store(
    recipe: Recipe,
    directory: Path,
    sources: Sequence[Source],
    made: Tokenizer,
    longest: int,
    room: int,
    progress: Progress,
) -> Store:
    """The store whose name has this `room`: the limit that its rows were held against, 0 for any."""
    images = Processing.of(recipe)
    settings = {name: value for name, value in recipe.data.dump().items() if name not in _APART}
    settings["source"] = kind = sources[0].kind
    if kind == MEGATRON:
        (source,) = sources
        facts = [recipe.architecture.vocab_size, _stats([source.path, source.path.with_suffix(".bin")])]
    else:
        content = _content(directory, sources, progress)
        facts = [
            recipe.task,
            settings,
            made.identity,
            room,
            content,
            tokenization.ROWS,
            tokenization.CHARACTERS,
            # Which files a row names follows from where it lies.
            images and [asdict(images), sorted({str(source.path.parent.resolve()) for source in sources})],
        ]
    path = directory / f"tokens-{json_digest([FORMAT, facts])}"
    if store := open_store(path):
        return store
    with _only_one(path, progress):
        if open_store(path) is None:
            if kind == MEGATRON:
                adopt(path, source.path.with_suffix(""), recipe.architecture.vocab_size, progress)
            else:
                vocabulary = recipe.architecture.vocab_size
                encoding = Encoding(recipe.data, recipe.task, vocabulary, longest, images)
                write(
                    path,
                    made.vocab_size,
                    lambda first: encoding.chunks(sources, made, first),
                    DataErrors(recipe.data.on_error),
                    progress,
                )
    store = open_store(path)
    if store is None:
        raise JobFailed(f"{path}: the tokens just written are gone; is another job deleting them?")
    return store


@contextmanager
def _only_one(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the making of a store, which one process does at a time; its progress is ours while we wait."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(path.with_name(f".{path.name}.lock").open("a"))
            begun, seen = building(path) / "tokens.bin", -1
            while not _locked(lock):
                written = _size(begun)
                if seen < 0:
                    _log.info("%s: another process makes these tokens, this one waits", path)
                if written > seen:
                    progress(written // 2)
                seen = max(seen, written)
                time.sleep(_SECONDS)
        except OSError as error:
            raise unwritable(path, error) from error
        yield  # the lock goes with the file, and with the process, however it ends


def _size(path: Path) -> int:
    """Bytes of a file; 0 where there is none, which others may take away at any time."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stats(paths: Iterable[Path]) -> list[Any]:
    stats = ((path.resolve(), path.stat()) for path in paths)
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _content(directory: Path, sources: Sequence[Source], progress: Progress) -> str:
    """The digest of all files in their order; read once, then known by their paths, sizes and times."""
    noted = directory / f"files-{json_digest(_stats(source.path for source in sources))}"
    if noted.exists() and noted.stat().st_uid in (os.geteuid(), 0) and len(known := noted.read_text()) == 64:
        return known
    digest = hashlib.sha256()
    for source in sources:
        digest.update(b"\0%d\0" % source.path.stat().st_size)
        try:
            with source.path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    progress(0)
        except OSError as error:  # whether that stops the job is said where its rows are read
            digest.update(str(error.errno).encode())
    with suppress(OSError, JobFailed):  # it says where nothing can be written when tokens are
        directory.mkdir(parents=True, exist_ok=True)
        files.write_text(noted, digest.hexdigest())
    return digest.hexdigest()
