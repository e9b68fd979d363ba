"""Context parallelism around one packed call: keys of all ranks, and a rank's chunks as sequences.

A rank holds chunks r and 2 cp - 1 - r of every sequence. A chunk's keys are the rows of its sequence up to
its end, so that its queries are the last of its keys, which is what the kernel's causal mode means. No ring,
no second call: a rank's keys are T (1 + 1 / 2 cp) rows, where T is the length of the whole pack.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from bundle.errors import JobFailed
from bundle.sequences.packing import Ints, ramp, runs_of, starts


@dataclass(frozen=True)
class Chunks:
    """The sequences of a rank's call: their boundaries, 0, ..., rows, and the row of each key.

    `places` [key rows] counts the rows of all ranks, one rank after the other.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    places: Tensor


@lru_cache(maxsize=8)  # made once for a micro-batch, and not once for every layer
def chunks_of(
    boundaries: tuple[int, ...], cp: int, rank: int, *, causal: bool, device: torch.device
) -> Chunks:
    """The chunks of `rank` of whole sequences with these (padded) boundaries.

    Raises JobFailed for sequences that do not divide into 2 cp chunks.
    """
    ends = np.asarray(boundaries, np.int64)
    sizes: Ints = ends[1:] - ends[:-1]
    if uneven := sizes[sizes % (2 * cp) != 0].tolist():
        raise JobFailed(
            f"padded sequences of {', '.join(map(str, uneven[:8]))} rows are no multiples of {2 * cp}, twice"
            " the context parallel size (see recipe.alignment)"
        )
    mine, first = runs_of(sizes, cp, rank), starts(sizes)
    shards = (runs_of(sizes, cp, each) for each in range(cp))
    held = np.concatenate([shard.ramp(first[shard.sequence] + shard.start) for shard in shards])
    seen = mine.start + mine.rows if causal else sizes[mine.sequence]
    places = np.argsort(held)[ramp(first[mine.sequence], seen)]
    return Chunks(_ends(mine.rows), _ends(seen), torch.from_numpy(places).to(device))


def gathered(shard: Tensor, chunks: Chunks, group: dist.ProcessGroup) -> Tensor:
    """[key rows, ...] of every chunk from every rank's [rows, ...]; gradients go back to the rows' ranks."""
    whole: Tensor = gather_from_sequence_parallel_region(shard, group=group)
    return whole.index_select(0, chunks.places)


def _ends(rows: Ints) -> tuple[int, ...]:
    return (0, *np.cumsum(rows).tolist())
