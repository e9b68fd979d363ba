"""A tensor of the table as the published ones that it is made of, and the files that these come into."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from bundle.architectures import tensors
from bundle.architectures.tensors import Piece
from bundle.errors import JobFailed
from bundle.pretrained.directory import FP8, SCALE_SUFFIX, count_blocks
from bundle.pretrained.writing import (
    FP8_BLOCK_SHAPE,
    OutputTensorHeader,
    SafetensorsFileWriter,
    WeightFormat,
    build_file_names,
    is_exported_in_fp8,
    split_into_files,
)

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_blocks(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 (e4m3) and the scale of each of its blocks, fp32, as DeepSeek-V3 has them.

    A block's numbers are multiplied by its scale. The largest value of a block becomes the largest of FP8. A
    value is off by at most 1/16 of itself, or by 2^-10 of its block's scale where it is smaller than FP8's
    normal numbers.
    """
    rows, columns = matrix.shape
    down, across = block
    padded = functional.pad(matrix.float(), (0, -columns % across, 0, -rows % down))
    tiles = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down))
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / _FP8_MAX, 1.0)
    stored = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.flatten(0, 1).flatten(1, 2)[:rows, :columns].contiguous(), scales


def dequantize_blocks(part: Tensor, scales: Tensor, block: tuple[int, int], start: tuple[int, int]) -> Tensor:
    """Return the numbers, fp32, of a part that begins at row and column `start` of a matrix with `scales`."""
    for dim, size in enumerate(block):
        numbers = torch.arange(start[dim], start[dim] + part.shape[dim]) // size
        scales = scales.index_select(dim, numbers)
    return part.float() * scales


# The values of 4 bits, sign first (E2M1).
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., n * 32], bf16, of MXFP4 blocks [..., n, 16] and scales [..., n], both uint8.

    The lower half of a byte comes first; a scale is the exponent of a power of two, 127 more.
    """
    values = torch.tensor(_FP4_VALUES, dtype=torch.bfloat16)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = torch.ldexp(values[halves.int()], scales.int().unsqueeze(-1) - 127)
    return numbers.to(torch.bfloat16).flatten(-2)


# Of torch's kinds of numbers those that are read and written, as safetensors spells them.
TORCH_DTYPE_BY_SAFETENSORS_NAME = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    FP8: torch.float8_e4m3fn,
}


def list_stored_tensors(tensor: tensors.Tensor, numbers: WeightFormat) -> Iterator[OutputTensorHeader]:
    """Yield the tensors that are written of a tensor, in order.

    Biases that steer the choice of experts stay in fp32. The first entry of a stack writes the whole stack.
    """
    for name, shape in () if tensor.stack and tensor.stack.entry else tensor.list_published_shapes():
        if numbers == "fp8" and is_exported_in_fp8(tensor.name):
            yield OutputTensorHeader(name, FP8, shape)
            yield OutputTensorHeader(f"{name}{SCALE_SUFFIX}", "F32", count_blocks(shape, FP8_BLOCK_SHAPE))
        elif numbers == "fp32" or tensors.is_buffer(tensor.name):
            yield OutputTensorHeader(name, "F32", shape)
        else:
            yield OutputTensorHeader(name, "BF16", shape)


def build_stored_values(
    tensor: tensors.Tensor, full_tensor: Tensor, numbers: WeightFormat
) -> Iterator[Tensor]:
    """Yield the numbers of all `list_stored_tensors` of a tensor; an entry of a stack yields its own only."""
    in_fp8 = numbers == "fp8" and is_exported_in_fp8(tensor.name)
    for part in split_into_published(tensor, full_tensor):
        yield from quantize_blocks(part, FP8_BLOCK_SHAPE) if in_fp8 else (part,)


def split_into_published(tensor: tensors.Tensor, full_tensor: Tensor) -> Iterator[Tensor]:
    """Yield the numbers of each tensor that is written of a tensor: views where nothing is put together.

    An entry of a stack yields its own numbers only.
    """
    rule = tensor.rule
    pieces: list[list[tuple[Piece, Tensor]]] = [[] for _ in tensor.published_names]
    offset = 0
    for piece in rule.iterate_pieces():
        pieces[piece.source].append((piece, full_tensor.narrow(rule.dim, offset, piece.length)))
        offset += piece.length
    for tensor_pieces, width in zip(pieces, rule.widths, strict=True):
        part = (
            tensor_pieces[0][1]
            if len(tensor_pieces) == 1
            else _join_pieces(tensor_pieces, rule.dim, width * rule.repeats)
        )
        yield part.T if tensor.stack and part.ndim == 2 else part
    yield from (part for _ in tensor.copy_names)


def _join_pieces(pieces: Sequence[tuple[Piece, Tensor]], dim: int, size: int) -> Tensor:
    """Return a published tensor, of this size along `dim`, from all its pieces."""
    shape = list(pieces[0][1].shape)
    shape[dim] = size
    joined = pieces[0][1].new_empty(shape)
    for piece, part in pieces:
        joined[(slice(None),) * dim + (slice(piece.start, piece.stop, piece.step),)] = part
    return joined


def plan_files_by_writer(
    writers: Iterable[Iterable[OutputTensorHeader]],
) -> list[dict[str, list[OutputTensorHeader]]]:
    """Return the files of each writer by name, with the tensors in each, from the tensors of each writer."""
    planned = [list(split_into_files(everything)) for everything in writers]
    names = iter(build_file_names(sum(map(len, planned))))
    return [{next(names): share for share in writer_shares} for writer_shares in planned]


class PublishedWriter:
    """Files that are written one after the other, tensor by tensor; each is put on the disk meanwhile.

    An error waits until `close`, so that others who send tensors need not wait for ever.
    """

    def __init__(self, directory: Path, shares_by_file: Mapping[str, list[OutputTensorHeader]]) -> None:
        self._pending_files = [(directory / name, list(share)) for name, share in shares_by_file.items()]
        self._file: SafetensorsFileWriter | None = None
        self._remaining: list[OutputTensorHeader] = []
        self._dtype = torch.float32
        self._error: JobFailed | None = None
        self._sync_pool = ThreadPoolExecutor(1)
        self._sync_futures: list[Future[None]] = []

    def append(self, tensor: tensors.Tensor, full_tensor: Tensor, numbers: WeightFormat) -> None:
        """Write all `list_stored_tensors` of the next tensor."""
        entries = itertools.zip_longest(
            list_stored_tensors(tensor, numbers), build_stored_values(tensor, full_tensor, numbers)
        )
        with self._capture_error():
            for entry, part in () if self._error else entries:
                self._write_part(entry, part)

    def close_and_raise_error(self) -> None:
        """Finish all files; when they are on the disk, raise the first error of any write."""
        self._submit_file_close()
        for synced in self._sync_futures:
            with self._capture_error():
                synced.result()
        self._sync_pool.shutdown()
        if self._error is not None:
            raise self._error

    def _write_part(self, new_tensor: OutputTensorHeader | None, part: Tensor) -> None:
        """Write values: the first of `new_tensor`; None: more of the tensor before, a stack."""
        if new_tensor is not None:
            if not self._remaining:
                self._submit_file_close()
                path, self._remaining = self._pending_files.pop(0)
                self._file = SafetensorsFileWriter(path, self._remaining)
            assert self._remaining.pop(0) == new_tensor
            self._dtype = TORCH_DTYPE_BY_SAFETENSORS_NAME[new_tensor.dtype]
        assert self._file is not None
        flat = part.to("cpu", self._dtype).contiguous().flatten()
        self._file.append(memoryview(flat.view(torch.uint8).numpy()))

    def _submit_file_close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._sync_futures.append(self._sync_pool.submit(file.close))

    @contextmanager
    def _capture_error(self) -> Iterator[None]:
        try:
            yield
        except JobFailed as error:
            self._error = error
            if self._file is not None:
                self._file.close_ignoring_errors()
                self._file = None
