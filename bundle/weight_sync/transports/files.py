"""Weights as safetensors files, a new directory for each version, which a server on this machine loads.

The folder is in memory (/dev/shm) or on a disk. It needs room for two versions: the old one is removed when
all servers have taken the new one, so that a server that dies in between can be given the old one again.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bundle import files
from bundle.architectures.contents import INDEX_FILE
from bundle.errors import JobFailed, format_bytes
from bundle.pretrained.directory import FP8, limit_violations, read_tensor_headers
from bundle.pretrained.writing import OutputTensor, SafetensorsWriter
from bundle.weight_sync.manifest import Manifest, NameTable, SentTensor, compute_digest, find_changed_digests

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: FP8}
_PREFIX = "mcore-bundle-weights-"
_FILE_BYTES = 2**30  # tensors that are in this process's memory before they are written


class WrittenWeights(NamedTuple):
    """A version that lies in a directory."""

    directory: Path
    manifest: Manifest


class FilesTransport:
    """Writes versions below a folder of its own in `parent`; `close` removes it."""

    def __init__(
        self, parent: Path, table: NameTable, *, has_draft: bool, file_bytes: int = _FILE_BYTES
    ) -> None:
        """`has_draft`: the servers load the draft too. Raise JobFailed where `parent` cannot be written."""
        with files.convert_write_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _lock_folder(self._folder)
        self._table, self._has_draft, self._file_bytes = table, has_draft, file_bytes

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WrittenWeights:
        """Write a version and read it again; all tensors are taken, so that ranks that send need not wait.

        Raise JobFailed for tensors that repeat, a full disk, and files that do not hold what was written.
        """
        stream = iter(tensors)
        directory = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=self._folder))
        try:
            manifest = self._write_files(directory, version, stream)
            _check_files(directory, manifest)
        except BaseException as error:
            for _ in stream:
                pass
            shutil.rmtree(directory, ignore_errors=True)
            if files.is_disk_full(error.__cause__ or error):
                raise JobFailed(
                    f"rl.rollout.weights_folder: {self._folder.parent} has no room for version {version}"
                    f" ({format_bytes(files.find_free_bytes(self._folder))} free). Two versions of the model"
                    " need room; name another folder."
                ) from error
            raise
        return WrittenWeights(directory, manifest)

    def remove_others(self, directory: Path) -> None:
        """Remove all versions but this one."""
        for path in self._folder.iterdir():
            if path != directory:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove all versions."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_files(self, directory: Path, version: int, stream: Iterator[tuple[str, Tensor]]) -> Manifest:
        sent: dict[str, SentTensor] = {}
        left_out: dict[str, None] = {}
        repeated: list[str] = []
        contents: dict[str, list[OutputTensor]] = {}
        pending: list[tuple[OutputTensor, memoryview]] = []
        for name, tensor in stream:
            if name in sent or name in left_out:
                repeated.append(f"repeated: {name}")
                continue
            is_draft = name in self._table.draft
            if is_draft and not self._has_draft:
                left_out[name] = None
                continue
            host = tensor.detach().to("cpu").contiguous().reshape(-1)
            values = memoryview(host.view(torch.uint8).numpy())
            stored = OutputTensor(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            sent[name] = SentTensor(stored, "draft" if is_draft else "target", compute_digest(values))
            pending.append((stored, values))
            if sum(entry.bytes for entry, _ in pending) >= self._file_bytes:
                _write_file(directory, contents, pending)
        _write_file(directory, contents, pending)
        if repeated:
            raise JobFailed("rollout: tensors came more than once. Send each of them once.", repeated)
        files.write_json(
            directory / INDEX_FILE,
            {
                "metadata": {},
                "weight_map": {entry.name: file for file in contents for entry in contents[file]},
            },
        )
        return Manifest(version, sent, tuple(left_out), self._table.copies)


def _lock_folder(folder: Path) -> int | None:
    """Return a descriptor that holds a folder for as long as this process lives; None where another does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: memory stays full of them otherwise."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if (descriptor := _lock_folder(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _write_file(
    directory: Path,
    contents: dict[str, list[OutputTensor]],
    pending: list[tuple[OutputTensor, memoryview]],
) -> None:
    """Write one more file with these tensors, and forget their values."""
    if not pending:
        return
    name = f"model-{len(contents) + 1:05d}.safetensors"
    contents[name] = [stored for stored, _ in pending]
    writer = SafetensorsWriter(directory / name, contents[name])
    try:
        for _, values in pending:
            writer.append(values)
        writer.close()
    finally:
        writer.discard()
    pending.clear()


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Raise JobFailed where the files do not hold what the manifest says."""
    digests: list[tuple[str, str]] = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for name, entry in read_tensor_headers(path).items():
                with memoryview(content)[entry.start : entry.stop] as values:
                    digests.append((name, compute_digest(values)))
    if changes := find_changed_digests(manifest, digests):
        raise JobFailed(
            f"{directory}: these files do not hold the tensors that were written. Look at the disk.",
            limit_violations(changes),
        )
