"""Weights as safetensors files, a new directory for each version, which a server on this machine loads.

The folder is in memory (/dev/shm) or on a disk. It needs room for two versions: the old one is removed when
all servers have taken the new one, so that a server that dies in between can be given the old one again.
"""

import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from bundle import files
from bundle.architectures.contents import INDEX_FILE
from bundle.errors import JobFailed, format_bytes
from bundle.pretrained.directory import limit_violations, read_tensor_headers
from bundle.pretrained.writing import OutputTensorHeader, SafetensorsFileWriter
from bundle.weight_sync.manifest import (
    ExpectedTensors,
    Manifest,
    SentTensor,
    compute_digest,
    describe_tensor,
    list_digest_differences,
)

_FOLDER_PREFIX = "mcore-bundle-weights-"
_FILE_BYTES = 2**29
_WRITER_THREADS = 4  # threads; each has the tensors of a file in memory


class WrittenWeights(NamedTuple):
    """A version that lies in a directory."""

    directory: Path
    manifest: Manifest

    def read_tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name, on that device."""
        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(path, "pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


class FilesTransport:
    """Writes versions below a folder of its own in `parent`; `close` removes it."""

    def __init__(
        self, parent: Path, table: ExpectedTensors, *, has_draft: bool, file_bytes: int = _FILE_BYTES
    ) -> None:
        """`has_draft`: the servers load the draft too. Raise JobFailed where `parent` cannot be written."""
        with files.convert_write_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
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
                    f" ({format_bytes(files.find_free_bytes(self._folder))} free). Two versions of the"
                    " model must fit. Name another folder."
                ) from error
            raise
        return WrittenWeights(directory, manifest)

    def remove_others(self, directory: Path | None) -> None:
        """Remove all versions but this one; None: all of them."""
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
        """Write all tensors in files; copying them from a device, digests and files run in parallel."""
        names: set[str] = set()
        left_out: dict[str, None] = {}
        repeated: list[str] = []
        pending: list[tuple[OutputTensorHeader, memoryview]] = []
        writes: list[Future[dict[str, str]]] = []
        stored: list[OutputTensorHeader] = []
        file_names: dict[str, str] = {}
        with ThreadPoolExecutor(_WRITER_THREADS) as pool:

            def write_pending() -> None:
                nonlocal pending
                name = f"model-{len(writes) + 1:05d}.safetensors"
                file_names.update((entry.name, name) for entry, _ in pending)
                writes.append(pool.submit(_write_file, directory / name, pending))
                pending = []
                if len(writes) > _WRITER_THREADS:  # no more tensors than that wait in memory
                    writes[-1 - _WRITER_THREADS].result()

            for name, tensor in stream:
                if name in names:
                    repeated.append(f"repeated: {name}")
                    continue
                names.add(name)
                if name in self._table.draft and not self._has_draft:
                    left_out[name] = None
                    continue
                stored.append(describe_tensor(name, tensor))
                pending.append((stored[-1], _copy_to_host(tensor)))
                if sum(entry.bytes for entry, _ in pending) >= self._file_bytes:
                    write_pending()
            if pending:
                write_pending()
            digests = {name: digest for write in writes for name, digest in write.result().items()}
        if repeated:
            raise JobFailed("rollout: a tensor was sent twice. Send each tensor once.", repeated)
        files.write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": file_names})
        sent = {
            entry.name: SentTensor(
                entry, "draft" if entry.name in self._table.draft else "target", digests[entry.name]
            )
            for entry in stored
        }
        return Manifest(version, sent, tuple(left_out), self._table.copies)


def _copy_to_host(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; from a GPU through pinned memory, which torch keeps for the next ones."""
    host = tensor.detach()
    if host.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(host)
    return memoryview(host.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


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
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):
            if (descriptor := _lock_folder(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _write_file(path: Path, tensors: Sequence[tuple[OutputTensorHeader, memoryview]]) -> dict[str, str]:
    """Write one file with these tensors; return the digest of each."""
    writer = SafetensorsFileWriter(path, [stored for stored, _ in tensors])
    try:
        for _, values in tensors:
            writer.append(values)
        writer.close()
    finally:
        writer.close_ignoring_errors()
    return {stored.name: compute_digest(values) for stored, values in tensors}


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Raise JobFailed where the files do not hold what the manifest says."""
    with ThreadPoolExecutor(_WRITER_THREADS) as pool:
        digests = list(pool.map(_compute_file_digests, sorted(directory.glob("*.safetensors"))))
    if changes := list_digest_differences(manifest, itertools.chain.from_iterable(digests)):
        raise JobFailed(
            f"{directory}: these files differ from the tensors that were written. Check the disk.",
            limit_violations(changes),
        )


def _compute_file_digests(path: Path) -> list[tuple[str, str]]:
    """Return the name and the digest of each tensor in a file."""
    digests = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name, entry in read_tensor_headers(path).items():
            with memoryview(content)[entry.start : entry.stop] as values:
                digests.append((name, compute_digest(values)))
    return digests
