"""Documents of token ids as megatron-core keeps them: all ids in PREFIX.bin, where each begins in PREFIX.idx.

The index, as `IndexedDataset` of every release reads it, little endian: a mark, the version (uint64), the
type of the ids (uint8), the number of sequences S and of document bounds D (uint64 each), then the lengths of
the sequences (int32 [S]), the bytes before each (int64 [S]), the sequences before each document (int64 [D]).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MARK, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
# What the type of the ids is called; 6 and 7 are floats, of which no model takes any.
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class Indexed:
    """What PREFIX.bin holds: all documents in one row, mapped read only."""

    values: NDArray[Any]  # [tokens]
    lengths: Ints  # [documents]

    @property
    def starts(self) -> Ints:
        """Where each document begins: [documents]."""
        starts: Ints = np.cumsum(self.lengths) - self.lengths
        return starts


class Writer:
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

    def add(self, values: NDArray[Any]) -> bytes:
        """What was appended: one document, of one sequence."""
        content = values.astype(self._dtype).tobytes()
        self._file.write(content)
        self.lengths.append(len(values))
        return content

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


def read(prefix: Path) -> Indexed:
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
