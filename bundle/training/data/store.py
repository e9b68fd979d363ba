"""Tokens on disk: written once, whole or not at all, then mapped by every rank."""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bundle.digest import of_json
from bundle.errors import JobFailed
from bundle.training.data.conversations import Learned
from bundle.training.data.tokenizers import Tokens

FORMAT = 2  # of the files below
Ints = NDArray[np.int64]


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


Conclude = Callable[[], dict[str, Any]]


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
