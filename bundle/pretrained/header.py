"""What one safetensors file says that it holds: 8 bytes of length, a JSON object, then the data.

The format is that of https://github.com/huggingface/safetensors: offsets count from the end of the header,
and the tensors cover the data without holes.
"""

import json
import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.errors import shown
from bundle.files import printable

# Bytes of a header, as safetensors itself has it.
LARGEST_HEADER = 100_000_000
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4}
BYTES |= {"U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its bytes are [start, stop) of that file."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int
    stop: int


class Damaged(Exception):
    """The file is no whole safetensors file; `reasons` say why."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def entries(path: Path) -> dict[str, Entry]:
    """Every tensor of the file by its name. Raises Damaged; reads the header alone."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("no regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, size = 8 + length, status.st_size
            if size < 8 or length > LARGEST_HEADER or begin > size:
                raise Damaged(
                    f"truncated, or no safetensors: {size} bytes, of which {length} are to be a header"
                )
            header = _parsed(file.read(length))
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from error
    found, reasons = {}, []
    for name, value in header.items():
        if name == _METADATA:
            continue
        try:
            found[name] = _entry(path, value, begin)
        except ValueError as error:
            reasons.append(f"{quoted(name)}: {error}")
    if not reasons:
        reasons = list(_uncovered(found, begin, size))
    if reasons:
        raise Damaged(*reasons)
    return found


def quoted(name: str) -> str:
    """A tensor's name, or a file's, as a message may show it."""
    text = printable(name)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _parsed(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a name stands twice")
        return values

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the header is no JSON object of unique names: {error}") from error
    if not isinstance(header, dict):
        raise Damaged("the header is no JSON object")
    return header


def _entry(path: Path, value: Any, begin: int) -> Entry:
    """Raises ValueError for what describes no tensor."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BYTES:
        raise ValueError(f"dtype {shown(dtype)} is not known")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise ValueError(f"shape {shown(shape)} or data_offsets {shown(offsets)} are no lists of counts")
    start, stop = offsets
    if stop - start != math.prod(shape) * BYTES[dtype]:
        raise ValueError(f"{stop - start} bytes are not those of {dtype} {list(shape)}")
    return Entry(path, dtype, tuple(shape), begin + start, begin + stop)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _uncovered(found: dict[str, Entry], begin: int, size: int) -> Iterator[str]:
    """Where the tensors do not lie one behind the other up to the end of the file."""
    at = begin
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > size:
            yield f"{quoted(name)} is truncated: it ends at byte {entry.stop} of {size}"
        elif entry.start != at:
            yield f"{quoted(name)} begins at byte {entry.start}, and what is before it ends at {at}"
        at = max(at, entry.stop)
    if at < size:
        yield f"{size - at} bytes at the end belong to no tensor"
