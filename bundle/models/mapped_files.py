"""Published tensors where they lie: views of mapped files, in which nothing is copied."""

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from bundle.errors import JobFailed, UsageError
from bundle.models.publishing import TORCH_DTYPE_BY_SAFETENSORS_NAME
from bundle.pretrained import StoredTensor
from bundle.pretrained.directory import read_tensor_headers

_MAX_MAPPED_FILES = 4


class MappedFiles:
    """The files that a pass reads, the last few of them mapped. What is read of them is the file's memory."""

    def __init__(self) -> None:
        self._mapped: dict[Path, tuple[mmap.mmap, dict[str, StoredTensor]]] = {}  # the oldest first

    def read_bytes(self, name: str, entry: StoredTensor) -> Tensor:
        """Return the stored bytes of a tensor, uint8 [n]; must not be written to.

        Raises JobFailed for a file that cannot be read, or that is not the file whose header had the entry.
        """
        mapped, entries = self._open_file(entry.file)
        if entries.get(name) != entry.untransposed_entry:
            raise JobFailed(f"{entry.file}: the file was replaced after its header was checked ({name})")
        size = entry.stop - entry.start
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=entry.start)

    def read_tensor(self, name: str, entry: StoredTensor) -> Tensor:
        """Return the numbers of a tensor as they are stored, in its shape; must not be written to."""
        stored = (
            self.read_bytes(name, entry)
            .view(TORCH_DTYPE_BY_SAFETENSORS_NAME[entry.dtype])
            .view(entry.untransposed_entry.shape)
        )
        return stored.mT if entry.is_transposed else stored

    def _open_file(self, path: Path) -> tuple[mmap.mmap, dict[str, StoredTensor]]:
        if path not in self._mapped:
            try:
                entries = read_tensor_headers(path)
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, UsageError) as error:
                reason = "; ".join(error.violations) if isinstance(error, UsageError) else error
                raise JobFailed(
                    f"{path}: changed or removed after its header was checked ({reason})"
                ) from error
            mapped.madvise(mmap.MADV_SEQUENTIAL)
            if len(self._mapped) == _MAX_MAPPED_FILES:  # tensors that somebody still looks at keep theirs
                del self._mapped[next(iter(self._mapped))]
            self._mapped[path] = mapped, entries
        return self._mapped[path]
