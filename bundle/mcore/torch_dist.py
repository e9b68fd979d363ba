"""Directories in megatron's distributed checkpoint format (`torch_dist`), read and written tensor by tensor.

One process does it, without a model or process groups, with one tensor at a time in memory.
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
from bundle.files import to_printable
from bundle.mcore import unpickling

INDEX_FILE = ".metadata"
_FORMAT_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# From 3.0 on queries, keys and values lie group by group, as the table has them.
_CHECKPOINT_VERSION = 3.0


class TorchDistCheckpoint:
    """The contents of a directory; `tensors` has the whole shape and the type of each tensor by its key."""

    def __init__(self, root: Path) -> None:
        """Read the index, as data. Raise UsageError where there is none that can be used."""
        self.root = root
        self._reader = FileSystemReader(root)
        if not files.is_file(root / INDEX_FILE):
            raise UsageError(f"{root}: not a torch_dist checkpoint: it has no {INDEX_FILE}")
        try:
            with unpickling.restrict_to_data():
                self._index = self._reader.read_metadata()
            self.tensors = dict(self._read_descriptions())
            missing = sorted(
                {str(info.relative_path) for info in self._index.storage_data.values()}
                - {path.name for path in root.iterdir()}
            )
        except Exception as error:  # whatever somebody's pickle makes torch raise
            raise UsageError(f"{root / INDEX_FILE}: cannot be used: {error}") from error
        if missing:
            raise UsageError(
                f"{root}: {INDEX_FILE} names files that are not in this directory. Use a complete checkpoint",
                [to_printable(name)[:200] for name in missing],
            )
        self._reader.set_up_storage_reader(self._index, is_coordinator=True)

    @property
    def mtp_layers(self) -> int:
        """The number of layers for MTP."""
        matches = (re.match(r"mtp\.layers\.(\d+)\.", key) for key in self.tensors)
        return max((int(match[1]) + 1 for match in matches if match), default=0)

    def _read_descriptions(self) -> Iterable[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        """Yield (key, (shape, dtype)) of each tensor. Raise ValueError or AttributeError if one is wrong."""
        for key, stored in self._index.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                shape, dtype = tuple(stored.size), stored.properties.dtype
                for extents in (
                    shape,
                    *(extents for chunk in stored.chunks for extents in (chunk.offsets, chunk.sizes)),
                ):
                    if len(extents) != len(shape) or any(
                        type(number) is not int or number < 0 for number in extents
                    ):
                        raise ValueError(f"{to_printable(str(key))}: {extents!r:.60} is not in its shape")
                if not (isinstance(key, str) and isinstance(dtype, torch.dtype)):
                    raise ValueError(f"{to_printable(str(key))} has {dtype!r:.60}, not a torch dtype")
                yield key, (shape, dtype)

    def read(self, key: str, entry: tuple[int, ...] = ()) -> Tensor:
        """Return an entry of a tensor, by its leading dimensions. Raise JobFailed where it cannot be read."""
        shape, dtype = self.tensors[key]
        rest = shape[len(entry) :]
        start, sizes = (*entry, *(0 for _ in rest)), (*(1 for _ in entry), *rest)
        items = [
            item
            for number, chunk in enumerate(self._index.state_dict_metadata[key].chunks)
            if (item := _find_overlap(key, number, chunk, start, sizes)) is not None
        ]
        num_values, size = sum(item.lengths.numel() for item in items), math.prod(rest)
        if num_values != size or any(_has_overlap(*two) for two in itertools.combinations(items, 2)):
            raise JobFailed(
                f"{self.root}: the shards of {to_printable(key)} do not cover its {size} values exactly once"
            )
        try:
            with unpickling.restrict_to_data():
                if (
                    len(items) == 1
                    and (stored := self._read_exactly_matching_chunk(key, items[0])) is not None
                ):
                    return stored.reshape(rest)
                target = torch.empty(sizes, dtype=dtype)
                self._reader.read_data(LoadPlan(items), _SingleTensorLoadPlanner(target)).wait()
        except Exception as error:  # whatever a damaged file makes torch raise
            raise JobFailed(f"{self.root}: {to_printable(key)} cannot be read: {error}") from error
        return target.reshape(rest)

    def _read_exactly_matching_chunk(self, key: str, item: ReadItem) -> Tensor | None:
        """Return the stored chunk that an item covers completely; None for a part or another form.

        This avoids a second tensor into which the chunk would be copied.
        """
        index = item.storage_index
        chunk, stored = (
            self._index.state_dict_metadata[key].chunks[index.index],
            self._index.storage_data[index],
        )
        if chunk.sizes != item.lengths or getattr(stored, "transform_descriptors", None):
            return None
        with (self.root / stored.relative_path).open("rb") as file:
            chunk_file = _FileRange(file, stored.offset, stored.length)
            loaded: Tensor = torch.load(chunk_file, map_location="cpu", weights_only=True)
        is_same = (loaded.shape, loaded.dtype) == (chunk.sizes, self.tensors[key][1])
        return loaded if is_same else None


def _find_overlap(
    key: str, number: int, chunk: ChunkStorageMetadata, start: tuple[int, ...], sizes: tuple[int, ...]
) -> ReadItem | None:
    """Return the part of a stored chunk that belongs to the range; None where no part does."""
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


def _has_overlap(first: ReadItem, second: ReadItem) -> bool:
    """Return whether two chunks both hold a value of the range."""
    pairs = zip(first.dest_offsets, first.lengths, second.dest_offsets, second.lengths, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in pairs)


class _FileRange(io.RawIOBase):
    """A number of bytes of a file from an offset on, as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill as much as possible of the buffer from the position on, and return the number of bytes."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[: max(0, min(len(view), self._size - self._position))])
        self._position += count
        return count


class _SingleTensorLoadPlanner(LoadPlanner):
    """A load planner that copies what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "this planner only says where what `read_data` reads goes: there is no plan"
        )

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]


@dataclass(frozen=True)
class StackedTensorSlice:
    """An `entry`, of `entries` in all, of the tensor under `key`; `make_values` makes its values."""

    key: str
    entry: tuple[int, ...]
    entries: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    make_values: Callable[[], Tensor]

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the whole tensor under the key."""
        return torch.Size((*self.entries, *self.shape))

    @property
    def chunk_metadata(self) -> ChunkStorageMetadata:
        """The place of the entry in the whole tensor."""
        return ChunkStorageMetadata(
            torch.Size((*self.entry, *(0 for _ in self.shape))),
            torch.Size((*(1 for _ in self.entries), *self.shape)),
        )


def write(
    directory: Path,
    parts: Iterable[StackedTensorSlice],
    empty_keys: Iterable[str],
    *,
    arguments: Mapping[str, Any],
    content_metadata: Mapping[str, Any],
) -> None:
    """Write the parts into an empty directory, in their order, and nothing under the keys `empty_keys`.

    Megatron-LM compares `arguments` with its own, and asks for keys by `content_metadata`. Raise JobFailed
    where the directory cannot be written, and what making a part raises.
    """
    planner = _StreamingSavePlanner(list(parts), list(empty_keys))
    writer = FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    writer.fs = _BufferedWriteFileSystem()
    common = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": dict(content_metadata),
    }
    try:
        with warnings.catch_warnings(), _disable_checksums():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
            checkpoint.save({}, storage_writer=writer, planner=planner, no_dist=True)
        torch.save(common, directory / "common.pt")
    except (OSError, RuntimeError, CheckpointException) as error:
        if planner.failure is not None:
            raise planner.failure from error
        raise files.build_write_error(directory, error) from error
    files.write_json(directory / "metadata.json", _FORMAT_METADATA)


@contextmanager
def _disable_checksums() -> Iterator[None]:
    """Disable the checksums of torch.save inside the block.

    They take a third of the time, and torch.load never compares them.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _BufferedWriteFileSystem(FileSystem):
    """A file system whose files are written in large pieces."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Yield the file, empty."""
        with files.open_large_file_writer(Path(path)) as stream:
            yield stream


class _StreamingSavePlanner(SavePlanner):
    """A save planner that makes each part when it is written."""

    def __init__(self, parts: list[StackedTensorSlice], empty_keys: list[str]) -> None:
        self._parts = {MetadataIndex(part.key, part.chunk_metadata.offsets): part for part in parts}
        self._empty_keys = empty_keys
        self.failure: Exception | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index,
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    part.chunk_metadata, TensorProperties(dtype=part.dtype), part.full_shape
                ),
            )
            for index, part in self._parts.items()
        ]
        return SavePlan(
            [*items, *(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._empty_keys)]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        metadata: dict[str, Any] = {key: BytesStorageMetadata() for key in self._empty_keys}
        for part in self._parts.values():
            tensor_metadata = TensorStorageMetadata(TensorProperties(dtype=part.dtype), part.full_shape, [])
            metadata.setdefault(part.key, tensor_metadata).chunks.append(part.chunk_metadata)
        return all_plans, Metadata(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([None], buffer)  # of each shard that the key has on a rank
            return buffer
        part = self._parts[write_item.index]
        try:
            return part.make_values().reshape(part.chunk_metadata.sizes)
        except Exception as error:
            self.failure = error
            raise
