"""The safetensors files of a directory, found as transformers finds them, and the tensors in their headers.

A file is 8 bytes of length, a JSON object (the header), then the data (github.com/huggingface/safetensors).
Offsets count from the end of the header, and the tensors cover the data without holes. An FP8 tensor, as
DeepSeek-V3 is published, has a second one with a suffix: for each block the number to multiply it by.
"""

import json
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bundle import files
from bundle.architectures.contents import INDEX_FILE, SINGLE_FILE
from bundle.errors import UsageError, format_value

MAX_INDEX_BYTES = 2**28
# Bytes of a header, as safetensors itself has it.
MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
}
DTYPE_BYTES |= {"U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_SAFETENSORS_METADATA_KEY = "__metadata__"
FP8, SCALE_SUFFIX = "F8_E4M3", "_scale_inv"
# gpt-oss' experts: two 4-bit numbers a byte, one exponent for 32 in a row (OCP's MX formats, v1.0). A stack
# [n, columns, rows] is in files as [n, rows, columns / 32, 16] bytes, with a scale for every 16 bytes.
MXFP4, MX_BLOCKS_SUFFIX, MX_SCALES_SUFFIX, MX_SIZE = "MXFP4", "_blocks", "_scales", 32
_TIKTOKEN_PATTERNS = ("tiktoken.model", "*.tiktoken")
_WEIGHT_FILE_PATTERNS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.gguf",
)


class StoredTensor(NamedTuple):
    """One tensor of a file: its bytes are [start, stop) of that file."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int
    stop: int
    is_transposed: bool = False  # each matrix of a stack [n, a, b] lies there as [b, a]

    @property
    def untransposed_entry(self) -> "StoredTensor":
        """The tensor as the file's header describes it."""
        if not self.is_transposed:
            return self
        count, rows, columns = self.shape
        return self._replace(shape=(count, columns, rows), is_transposed=False)


class PretrainedWeights(NamedTuple):
    """The tensors of a directory by their published names; `scale_block`: rows and columns of one FP8 scale.

    A stack in MXFP4 is an additional entry under its own name, with the bytes of its blocks. Its blocks and
    its scales have entries too.
    """

    directory: Path
    entries: Mapping[str, StoredTensor]
    scale_block: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """The size of all tensors in the files [bytes]."""
        return sum(entry.stop - entry.start for entry in self._physical_tensors)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors, in order."""
        return sorted({entry.file for entry in self.entries.values()})

    @property
    def _physical_tensors(self) -> list[StoredTensor]:
        return [entry for entry in self.entries.values() if entry.dtype != MXFP4]

    def __str__(self) -> str:
        return f"{self.directory}: {len(self._physical_tensors)} tensors, {self.bytes / 2**30:.2f} GiB"


def find_weights(directory: Path) -> PretrainedWeights | None:
    """Return the weights of a directory; None where it holds none in any form.

    Raise UsageError with every error in the index and the files' headers, and for weights that are not
    safetensors.
    """
    if not files.is_directory(directory):
        raise UsageError(f"{directory}: not a directory")
    if files.is_file(directory / SINGLE_FILE):
        indexed = {}
        paths = [directory / SINGLE_FILE]
    elif files.is_file(directory / INDEX_FILE):
        indexed = _read_index(directory / INDEX_FILE)
        paths = [directory / name for name in sorted(set(indexed.values()))]
    else:
        _refuse_other_formats(directory)
        return None
    tensors: dict[str, StoredTensor] = {}
    violations = []
    for path in paths:
        try:
            file_tensors = read_tensor_headers(path)
        except UsageError as error:
            violations += [f"{to_printable(path.name)}: {reason}" for reason in error.violations]
            indexed = {name: file for name, file in indexed.items() if file != path.name}  # said once
            continue
        violations += [
            f"{to_printable(name)} is in both {to_printable(path.name)} and"
            f" {to_printable(tensors[name].file.name)}"
            for name in file_tensors
            if name in tensors
        ]
        tensors |= file_tensors
    violations += _find_misplaced(indexed, tensors)
    if violations:
        raise UsageError(f"{directory}: the weights cannot be read", limit_violations(violations))
    return PretrainedWeights(directory, tensors)


def explain_tiktoken_tokenizer(directory: Path) -> str | None:
    """Return why a directory's tokenizer cannot be read, where its files are tiktoken's; else None."""
    paths = sorted(path for pattern in _TIKTOKEN_PATTERNS for path in directory.glob(pattern))
    if not paths or files.is_file(directory / "tokenizer.json"):
        return None
    return (
        f"{paths[0]} is a tiktoken tokenizer. Its splitting rules are in the model's Python code, which"
        " mcore-bundle never runs. Convert it to a tokenizer.json, as docs/pretrained.md shows under"
        ' "A tokenizer of tiktoken\'s", and name the directory of that file.'
    )


def limit_violations(violations: list[str], most: int = 100) -> list[str]:
    """Return at most `most` violations and the number of the others.

    There may be one for each tensor of a large model.
    """
    more = len(violations) - most
    return violations if more <= 0 else [*violations[:most], f"and {more} more"]


def _refuse_other_formats(directory: Path) -> None:
    try:
        file_names = sorted(
            {path.name for pattern in _WEIGHT_FILE_PATTERNS for path in directory.glob(pattern)}
        )
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from error
    if file_names:
        raise UsageError(
            f"{directory}: has {to_printable(file_names[0])}, but neither {SINGLE_FILE} nor {INDEX_FILE}."
            " Only safetensors are read, because a pickle can run code. Save the model with transformers'"
            " save_pretrained."
        )


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, by the index."""
    weight_map = files.read_json_object(path, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{path}: weight_map is missing, empty or not a JSON object")
    violations = [
        f"{to_printable(name)}: must be in a safetensors file of this directory, but weight_map has"
        f" {format_value(file)}"
        for name, file in weight_map.items()
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors")
    ]
    if violations:
        raise UsageError(f"{path} cannot be used", limit_violations(violations))
    return weight_map


def _find_misplaced(indexed: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    for name, file in indexed.items():
        if name not in tensors:
            yield f"{to_printable(name)} is not in {to_printable(file)}, although {INDEX_FILE} lists it there"
        elif tensors[name].file.name != file:
            actual_file = to_printable(tensors[name].file.name)
            listed_file = to_printable(file)
            yield f"{to_printable(name)} is in {actual_file}, but {INDEX_FILE} lists it in {listed_file}"


def read_tensor_headers(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a file by its name; only the header is read.

    Raise UsageError with every reason why the file is not a complete safetensors file.
    """
    tensors, reasons = {}, []
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, size = 8 + length, status.st_size
            if size < 8 or length > MAX_HEADER_BYTES or begin > size:
                raise ValueError(
                    f"truncated, or not safetensors: the file has {size} bytes, but its header needs {length}"
                )
            header = _parse_header(file.read(length))
    except OSError as error:
        reasons = [error.strerror or str(error)]
    except ValueError as error:
        reasons = [str(error)]
    else:
        for name, value in header.items():
            try:
                if name != _SAFETENSORS_METADATA_KEY:
                    tensors[name] = _parse_tensor(path, value, begin)
            except ValueError as error:
                reasons.append(f"{to_printable(name)}: {error}")
        reasons = reasons or list(_find_gaps(tensors, begin, size))
    if reasons:
        raise UsageError(f"{path}: cannot be read. Copy or download this file again", reasons)
    return tensors


def to_printable(name: str) -> str:
    """Return the name of a tensor or a file as a message may show it."""
    text = files.to_printable(name)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _parse_header(text: bytes) -> dict[str, Any]:
    """Return the header. Raise ValueError where it is not a JSON object of unique names."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a name occurs twice")
        return values

    try:
        header = json.loads(text, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not a JSON object with unique names: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def _parse_tensor(path: Path, value: Any, begin: int) -> StoredTensor:
    """Return the tensor that a header describes. Raise ValueError where it describes none."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {format_value(dtype)} is not known")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise ValueError(
            f"shape {format_value(shape)} or data_offsets {format_value(offsets)} is not a list of counts"
        )
    start, stop = offsets
    if stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"data_offsets span {stop - start} bytes, which do not fit {dtype} {list(shape)}")
    return StoredTensor(path, dtype, tuple(shape), begin + start, begin + stop)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _find_gaps(tensors: dict[str, StoredTensor], begin: int, size: int) -> Iterator[str]:
    """Yield where the tensors do not follow each other without a gap up to the end of the file."""
    position = begin
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > size:
            yield (
                f"{to_printable(name)} is truncated: it ends at byte {entry.stop},"
                f" but the file has {size} bytes"
            )
        elif entry.start != position:
            yield (
                f"{to_printable(name)} begins at byte {entry.start}, but the tensor before it ends at"
                f" byte {position}"
            )
        position = max(position, entry.stop)
    if position < size:
        yield f"{size - position} bytes at the end belong to no tensor"


def count_blocks(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks of a matrix, down and across; the last ones may be smaller."""
    rows, columns = (-(-size // block_size) for size, block_size in zip(shape, block, strict=True))
    return rows, columns
