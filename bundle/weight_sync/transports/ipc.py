"""Weights in buckets of memory that other processes on this machine open where it lies; on a GPU by CUDA IPC.

The server copies a bucket into its own tensors before it answers. Two buckets exist at most: one is filled
while the other is loaded.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing  # registers with ForkingPickler how tensors are shared
from torch import Tensor

from bundle.errors import JobFailed

_BUCKET_BYTES = 2**28
_OFFSET_ALIGNMENT = 16


class Bucket:
    """Tensors one after the other in one piece of memory, each from a multiple of 16 bytes on."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy these tensors, at least one, which lie on one device."""
        self._places = []
        stop = 0
        for name, tensor in tensors:
            start = -(-stop // _OFFSET_ALIGNMENT) * _OFFSET_ALIGNMENT
            stop = start + tensor.nbytes
            # The attributes are those of SGLang's FlattenedTensorMetadata, which is not installed here.
            self._places.append(
                SimpleNamespace(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=stop,
                    numel=tensor.nbytes,
                )
            )
        self._values = torch.empty(stop, dtype=torch.uint8, device=tensors[0][1].device)
        for place, (_, tensor) in zip(self._places, tensors, strict=True):
            part = self._values[place.start_idx : place.end_idx]
            part.view(place.dtype).copy_(tensor.detach().reshape(-1))

    def share(self) -> str:
        """Return what one process opens the bucket with, once, as base64.

        The memory stays in use until that process has given it back. Raise JobFailed for memory that no other
        process can open.
        """
        content = {"flattened_tensor": self._values, "metadata": self._places}
        try:
            return base64.b64encode(ForkingPickler.dumps(content)).decode()
        except RuntimeError as error:
            raise JobFailed(f"the memory of a bucket cannot be shared ({error}).") from error


def build_module_aligned_buckets(
    tensors: Iterable[tuple[str, Tensor]], size: int = _BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield buckets of about `size` bytes; tensors of one module share one, for servers that join them."""
    pending: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        is_full = sum(value.nbytes for _, value in pending) >= size
        if is_full and _parse_grandparent_module_name(name) != _parse_grandparent_module_name(pending[-1][0]):
            yield Bucket(pending)
            pending = []
        pending.append((name, tensor))
    if pending:
        yield Bucket(pending)


def send_buckets_in_background(buckets: Iterable[Bucket], load: Callable[[Bucket], None]) -> None:
    """Call `load` in another thread with each bucket, in their order, while the next one is filled."""
    with ThreadPoolExecutor(1) as pool:
        loading: Future[None] | None = None
        for bucket in buckets:
            if loading is not None:
                loading.result()
            loading = pool.submit(load, bucket)
            _free_unused_ipc_memory()
        if loading is not None:
            loading.result()
    _free_unused_ipc_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the server takes its cache of keys and values next


def _free_unused_ipc_memory() -> None:
    """Free the memory of buckets that no process uses any more."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _parse_grandparent_module_name(name: str) -> str:
    """Return the module of the layer whose weight or bias this is, such as `model.layers.3.self_attn`."""
    return name.rsplit(".", 2)[0]
