"""A tensor of the table as the published ones that it is made of, and the files that these come into."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from bundle.architectures import tensors
from bundle.errors import JobFailed
from bundle.pretrained.directory import FP8, SCALE, blocks
from bundle.pretrained.writing import BLOCK, File, Numbers, Stored, is_quantized, names_of_files, shares

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 (e4m3), and the number to multiply each block of it by, fp32, as DeepSeek-V3 has them.

    The largest value of a block becomes the largest of FP8. A value is off by at most 1/16 of itself, or by
    2^-10 of its block's scale where it is smaller than FP8's normal numbers.
    """
    rows, columns = matrix.shape
    down, across = block
    padded = functional.pad(matrix.float(), (0, -columns % across, 0, -rows % down))
    tiles = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down))
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    stored = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.flatten(0, 1).flatten(1, 2)[:rows, :columns].contiguous(), scales


def dequantized(part: Tensor, scales: Tensor, block: tuple[int, int], start: tuple[int, int]) -> Tensor:
    """The numbers, fp32, of a part that begins at row and column `start` of a matrix with these scales."""
    for dim, size in enumerate(block):
        numbers = torch.arange(start[dim], start[dim] + part.shape[dim]) // size
        scales = scales.index_select(dim, numbers)
    return part.float() * scales


# Of torch's kinds of numbers those that are read and written, as safetensors spells them.
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, FP8: torch.float8_e4m3fn}


def stored(tensor: tensors.Tensor, numbers: Numbers) -> Iterator[Stored]:
    """What is written of a tensor, in order. Biases that steer the choice of experts stay in fp32."""
    for name, shape in tensor.published_shapes():
        if numbers == "fp8" and is_quantized(tensor.name):
            yield Stored(name, FP8, shape)
            yield Stored(f"{name}{SCALE}", "F32", blocks(shape, BLOCK))
        elif numbers == "fp32" or tensors.is_buffer(tensor.name):
            yield Stored(name, "F32", shape)
        else:
            yield Stored(name, "BF16", shape)


def values(tensor: tensors.Tensor, whole: Tensor, numbers: Numbers) -> Iterator[Tensor]:
    """The numbers of all that is `stored` of a tensor."""
    in_fp8 = numbers == "fp8" and is_quantized(tensor.name)
    for part in parts(tensor, whole):
        yield from quantized(part, BLOCK) if in_fp8 else (part,)


def parts(tensor: tensors.Tensor, whole: Tensor) -> Iterator[Tensor]:
    """The published tensors that one of ours is made of, in their order."""
    rule = tensor.rule
    pieces, at = [], 0
    for piece in rule.pieces():
        length = piece.stop - piece.start
        pieces.append((piece, whole.narrow(rule.dim, at, length)))
        at += length
    for source in range(len(tensor.published)):
        of_it = {piece.start: part for piece, part in pieces if piece.source == source}
        yield torch.cat([of_it[start] for start in sorted(of_it)], rule.dim)


def files_of(writers: Iterable[Iterable[Stored]]) -> list[dict[str, list[Stored]]]:
    """The files of each writer by name, and what is in each, for what each of them writes."""
    planned = [list(shares(everything)) for everything in writers]
    names = iter(names_of_files(sum(map(len, planned))))
    return [{next(names): share for share in of_one} for of_one in planned]


class Output:
    """Files that are written one after the other, tensor by tensor.

    An error waits until `close`, so that others who send tensors need not wait for ever.
    """

    def __init__(self, directory: Path, of: Mapping[str, list[Stored]]) -> None:
        self._waiting = [(directory / name, list(share)) for name, share in of.items()]
        self._file: File | None = None
        self._left: list[Stored] = []
        self._error: JobFailed | None = None

    def append(self, tensor: tensors.Tensor, whole: Tensor, numbers: Numbers) -> None:
        """Writes all that is `stored` of the next tensor."""
        of = zip(stored(tensor, numbers), values(tensor, whole, numbers), strict=True)
        with self._remembering():
            for each, part in () if self._error else of:
                self._append(each, part)

    def close(self) -> None:
        """Raises what went wrong on the way."""
        with self._remembering():
            self._finish()
        if self._error is not None:
            raise self._error

    def _append(self, each: Stored, part: Tensor) -> None:
        if not self._left:
            self._finish()
            path, self._left = self._waiting.pop(0)
            self._file = File(path, self._left)
        assert self._file is not None and self._left.pop(0) == each
        flat = part.to("cpu", DTYPES[each.dtype]).contiguous().flatten()
        self._file.append(memoryview(flat.view(torch.uint8).numpy()))

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except JobFailed as error:
            self._error = error
            if self._file is not None:
                self._file.discard()
                self._file = None
