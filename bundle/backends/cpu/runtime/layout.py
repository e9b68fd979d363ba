"""Which rows of a rank meet which keys: attention over packed or whole sequences as a list of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bundle.errors import JobFailed
from bundle.recipe.alignment import Alignment
from bundle.sequences.rows import ramp, runs_of, starts


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a rank: padding, or queries that attend to the first keys of their sequence."""

    rows: int
    sequence: int
    keys: int  # 0: padding


@dataclass(frozen=True)
class Layout:
    """One attention call: `blocks` cover the rank's rows in order; `keys`: each sequence's rows on all ranks.

    `order` lists, for each row of the whole sequences, where the ranks' shards, one after the other, have it.
    """

    blocks: tuple[Block, ...]
    keys: tuple[int, ...]
    order: Tensor | None  # None: one rank, nothing to put in order


@lru_cache(maxsize=64)
def layout_of(
    lengths: tuple[int, ...], padded: tuple[int, ...], *, rows: int, cp: int, rank: int, causal: bool
) -> Layout:
    """The layout of sequences with these real and padded lengths for a rank that holds `rows` rows.

    Kept by its numbers, so that it is made once for a micro-batch and not once for every layer.
    Raises JobFailed for what the kernels of the accelerators do not take either.
    """
    _check(lengths, padded, rows=rows, cp=cp)
    sizes = np.asarray(padded)
    shards = [runs_of(sizes, Alignment(cp=cp), each) for each in range(cp)]
    blocks = []
    for sequence, start, size in zip(
        shards[rank].sequence, shards[rank].start, shards[rank].rows, strict=True
    ):
        real = int(np.clip(lengths[sequence] - start, 0, size))
        blocks.append(Block(real, int(sequence), int(start) + real if causal else lengths[sequence]))
        blocks.append(Block(int(size) - real, int(sequence), 0))
    order = None
    if cp > 1:
        places = [ramp(starts(sizes)[shard.sequence] + shard.start, shard.rows) for shard in shards]
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
    return Layout(tuple(block for block in blocks if block.rows), padded, order)


def _check(lengths: Sequence[int], padded: Sequence[int], *, rows: int, cp: int) -> None:
    wrong = []
    if len(lengths) != len(padded) or not all(0 <= n <= m for n, m in zip(lengths, padded, strict=False)):
        wrong.append(f"the lengths {list(lengths)} do not fit into the padded lengths {list(padded)}")
    uneven = [n for n in padded if cp > 1 and n % (2 * cp)]
    if uneven:
        wrong.append(
            f"the padded lengths {uneven} are not multiples of {2 * cp}, twice the context parallel size"
        )
    elif sum(padded) != rows * cp:
        wrong.append(
            f"the sequences have {sum(padded)} rows and the {cp} rank(s) hold {rows} each: padding at the end"
            " of a pack must be one more sequence in cu_seqlens"
        )
    if wrong:
        raise JobFailed("These packed sequences cannot be attended to (see recipe.alignment):", wrong)
