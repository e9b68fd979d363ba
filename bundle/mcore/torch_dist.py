"""Directories in megatron's distributed checkpoint format (`torch_dist`), read and written tensor by tensor.

One process does it, without a model or process groups, and has one tensor at a time in memory.
"""

import argparse
import io
import itertools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from bundle import files
from bundle.errors import JobFailed, UsageError
from bundle.files import printable
from bundle.mcore import unpickling

INDEX = ".metadata"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# From 3.0 on queries, keys and values lie group by group, as the table has them.
_VERSION = 3.0


class Directory:
    """What a directory holds; `tensors` has the whole shape and the kind of numbers of each by its key."""

    def __init__(self, root: Path) -> None:
        """Reads the index, as data. Raises UsageError where there is none that can be used."""
        self.root = root
        self._reader = FileSystemReader(root)
        if not files.is_file(root / INDEX):
            raise UsageError(f"{root}: no torch_dist checkpoint: it has no {INDEX}")
        try:
            with unpickling.data_only():
                self._index = self._reader.read_metadata()
            self.tensors = dict(self._described())
            strange = sorted(
                {str(info.relative_path) for info in self._index.storage_data.values()}
                - {path.name for path in root.iterdir()}
            )
        except Exception as error:  # whatever somebody's pickle makes torch raise
            raise UsageError(f"{root / INDEX}: cannot be used: {error}") from error
        if strange:
            raise UsageError(f"{root}: files are missing", [printable(name)[:200] for name in strange])
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)

    @property
    def mtp_layers(self) -> int:
        """How many layers for MTP there are."""
        found = (re.match(r"mtp\.layers\.(\d+)\.", key) for key in self.tensors)
        return max((int(match[1]) + 1 for match in found if match), default=0)

    def _described(self) -> Iterable[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        """Raises ValueError or AttributeError where what is stored of a tensor is no such description."""
        for key, stored in self._index.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                shape, dtype = tuple(stored.size), stored.properties.dtype
                for of in (shape, *(of for chunk in stored.chunks for of in (chunk.offsets, chunk.sizes))):
                    if len(of) != len(shape) or any(type(number) is not int or number < 0 for number in of):
                        raise ValueError(f"{printable(str(key))}: {of!r:.60} is no part of its shape")
                if not (isinstance(key, str) and isinstance(dtype, torch.dtype)):
                    raise ValueError(f"{printable(str(key))} has {dtype!r:.60} for a kind of numbers")
                yield key, (shape, dtype)

    def read(self, key: str, entry: tuple[int, ...] = ()) -> Tensor:
        """An entry of a tensor, by its leading dimensions. Raises JobFailed where it cannot be read."""
        shape, dtype = self.tensors[key]
        rest = shape[len(entry) :]
        start, sizes = (*entry, *(0 for _ in rest)), (*(1 for _ in entry), *rest)
        items = [
            item
            for number, chunk in enumerate(self._index.state_dict_metadata[key].chunks)
            if (item := _overlap(key, number, chunk, start, sizes)) is not None
        ]
        held, size = sum(item.lengths.numel() for item in items), math.prod(rest)
        if held != size or any(_meet(*two) for two in itertools.combinations(items, 2)):
            raise JobFailed(f"{self.root}: {printable(key)}: its chunks are not the {size} values once each")
        try:
            with unpickling.data_only():
                if len(items) == 1 and (alone := self._chunk(key, items[0])) is not None:
                    return alone.reshape(rest)
                found = torch.empty(sizes, dtype=dtype)
                self._reader.read_data(LoadPlan(items), _Into(found)).wait()
        except Exception as error:  # whatever a damaged file makes torch raise
            raise JobFailed(f"{self.root}: {printable(key)} cannot be read: {error}") from error
        return found.reshape(rest)

    def _chunk(self, key: str, item: ReadItem) -> Tensor | None:
        """The chunk that an item is all of, as it is stored; None where it is a part, or stored otherwise.

        There need not be a second tensor, to put it into.
        """
        index = item.storage_index
        chunk, stored = (
            self._index.state_dict_metadata[key].chunks[index.index],
            self._index.storage_data[index],
        )
        if chunk.sizes != item.lengths or getattr(stored, "transform_descriptors", None):
            return None
        with (self.root / stored.relative_path).open("rb") as file:
            of_chunk = _Range(file, stored.offset, stored.length)
            loaded: Tensor = torch.load(of_chunk, map_location="cpu", weights_only=True)
        same = (loaded.shape, loaded.dtype) == (chunk.sizes, self.tensors[key][1])
        return loaded if same else None


def _overlap(
    key: str, number: int, chunk: ChunkStorageMetadata, start: tuple[int, ...], sizes: tuple[int, ...]
) -> ReadItem | None:
    """What of a stored chunk belongs to the range; None where nothing does."""
    first = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
    last = [min(a + n, b + m) for a, n, b, m in zip(start, sizes, chunk.offsets, chunk.sizes, strict=True)]
    lengths = [b - a for a, b in zip(first, last, strict=True)]
    if any(length <= 0 for length in lengths):
        return None
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key),
        dest_offsets=torch.Size([a - b for a, b in zip(first, start, strict=True)]),
        storage_index=MetadataIndex(key, chunk.offsets, number),
        storage_offsets=torch.Size([a - b for a, b in zip(first, chunk.offsets, strict=True)]),
        lengths=torch.Size(lengths),
    )


def _meet(one: ReadItem, other: ReadItem) -> bool:
    """Whether two chunks hold a value of the range both."""
    pairs = zip(one.dest_offsets, one.lengths, other.dest_offsets, other.lengths, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in pairs)


class _Range(io.RawIOBase):
    """So many bytes of a file from an offset on, as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills what it can of the buffer from here on."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[: max(0, min(len(view), self._size - self._at))])
        self._at += count
        return count


class _Into(LoadPlanner):
    """Has what is read copied into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._target
        for dim, (at, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, at, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "this planner only says where what `read_data` reads goes: there is no plan"
        )

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]


@dataclass(frozen=True)
class Part:
    """An `entry`, of so many `entries`, of what is written under `key`; `values` makes its numbers."""

    key: str
    entry: tuple[int, ...]
    entries: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Callable[[], Tensor]

    @property
    def whole(self) -> torch.Size:
        """The shape of all that is under the key."""
        return torch.Size((*self.entries, *self.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where in the whole it is."""
        return ChunkStorageMetadata(
            torch.Size((*self.entry, *(0 for _ in self.shape))),
            torch.Size((*(1 for _ in self.entries), *self.shape)),
        )


def write(
    directory: Path,
    parts: Iterable[Part],
    empty: Iterable[str],
    *,
    arguments: Mapping[str, Any],
    content: Mapping[str, Any],
) -> None:
    """Writes the parts into an empty directory, in their order, and nothing under the keys `empty`.

    `arguments` are what Megatron-LM compares with its own, `content` is what it asks for keys by. Raises
    JobFailed where it cannot be written, and what making a part raises.
    """
    planner = _Streamed(list(parts), list(empty))
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    writer.fs = _Files()
    common = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": _VERSION,
        "iteration": 0,
        "content_metadata": dict(content),
    }
    try:
        with warnings.catch_warnings(), _without_checksums():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
            checkpoint.save({}, storage_writer=writer, planner=planner, no_dist=True)
        torch.save(common, directory / "common.pt")
    except (OSError, RuntimeError, CheckpointException) as error:
        if planner.failure is not None:
            raise planner.failure from error
        raise files.failed(directory, error) from error
    files.write_json(directory / "metadata.json", _FORMAT)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Inside, torch.save adds up no bytes: a third of the time for sums that torch.load never compares."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Files(FileSystem):
    """Files to which much is written at once."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """The file, empty."""
        with files.opened(Path(path)) as stream:
            yield stream


class _Streamed(SavePlanner):
    """Has each part made when its turn comes to be written."""

    def __init__(self, parts: list[Part], empty: list[str]) -> None:
        self._parts = {MetadataIndex(part.key, part.chunk.offsets): part for part in parts}
        self._empty = empty
        self.failure: Exception | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index,
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(part.chunk, TensorProperties(dtype=part.dtype), part.whole),
            )
            for index, part in self._parts.items()
        ]
        return SavePlan(
            [*items, *(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._empty)]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        described: dict[str, Any] = {key: BytesStorageMetadata() for key in self._empty}
        for part in self._parts.values():
            whole = TensorStorageMetadata(TensorProperties(dtype=part.dtype), part.whole, [])
            described.setdefault(part.key, whole).chunks.append(part.chunk)
        return all_plans, Metadata(described)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)  # of each shard that the key has on a rank
            return nothing
        part = self._parts[write_item.index]
        try:
            return part.values().reshape(part.chunk.sizes)
        except Exception as error:
            self.failure = error
            raise
