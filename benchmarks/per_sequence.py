"""Packing one sequence at a time, as the training loops of other projects do: what `sequences` compares with.

thd, zigzag; ids, labels and masks are one tensor for each sequence. `cu`: padded boundaries, on the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(sequences: Sequence[Tensor], cu: list[int], cp: int, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's rows [1, t/cp] of the sequences, and their positions."""
    packed = sequences[0].new_zeros(cu[-1] // cp)
    positions = torch.zeros(cu[-1] // cp, dtype=torch.int64)
    for i, sequence in enumerate(sequences):
        rows = cu[i + 1] - cu[i]
        padded = sequence.new_zeros(rows)
        padded[: len(sequence)] = sequence
        numbers = torch.arange(rows)
        chunk, begin = rows // (2 * cp), cu[i] // cp
        for part, piece in enumerate((rank, 2 * cp - 1 - rank)):
            here = slice(begin + part * chunk, begin + (part + 1) * chunk)
            there = slice(piece * chunk, (piece + 1) * chunk)
            packed[here] = padded[there]
            positions[here] = numbers[there]
    return packed[None], positions[None]


def roll(sequences: Sequence[Tensor], cu: list[int], cp: int, rank: int) -> Tensor:
    """This rank's rows [1, t/cp] of the sequences, each rolled by one token; its last one becomes 0."""
    packed = sequences[0].new_zeros(cu[-1] // cp)
    for i, sequence in enumerate(sequences):
        rows = cu[i + 1] - cu[i]
        padded = sequence.new_zeros(rows)
        rest = sequence[1:]
        padded[: len(rest)] = rest
        chunk, begin = rows // (2 * cp), cu[i] // cp
        for part, piece in enumerate((rank, 2 * cp - 1 - rank)):
            packed[begin + part * chunk : begin + (part + 1) * chunk] = padded[
                piece * chunk : (piece + 1) * chunk
            ]
    return packed[None]


def unpack(shards: list[Tensor], lengths: list[int], cu: list[int], cp: int) -> Tensor:
    """The concatenated sequences [tokens, ...] from every rank's rows [t/cp, ...]."""
    sequences = []
    for i, length in enumerate(lengths):
        rows = cu[i + 1] - cu[i]
        chunk, begin = rows // (2 * cp), cu[i] // cp
        whole = shards[0].new_empty(rows, *shards[0].shape[1:])
        for rank, shard in enumerate(shards):
            for part, piece in enumerate((rank, 2 * cp - 1 - rank)):
                rows_here = shard[begin + part * chunk : begin + (part + 1) * chunk]
                whole[piece * chunk : (piece + 1) * chunk] = rows_here
        sequences.append(whole[:length])
    return torch.cat(sequences)
