"""Matrices in FP8 (e4m3) with a scale for each block of rows and columns, as DeepSeek-V3 is published."""

import torch
from torch import Tensor
from torch.nn import functional

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and the number to multiply each block of it by, fp32.

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
