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
from bundle.packing.packing import Ints, compute_runs, compute_starts, concatenate_ranges


@dataclass(frozen=True)
class SequenceChunks:
    """The sequences of a rank's call: their boundaries, 0, ..., rows, and the row of each key.

    `row_indices` [key rows] counts the rows of all ranks, one rank after the other.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    row_indices: Tensor


@lru_cache(maxsize=8)  # made once for a micro-batch, and not once for every layer
def build_query_key_chunks(
    boundaries: tuple[int, ...], cp: int, rank: int, *, causal: bool, device: torch.device
) -> SequenceChunks:
    """Return the chunks of `rank` of whole sequences with these (padded) boundaries.

    Raises JobFailed for sequences that do not divide into 2 cp chunks.
    """
    ends = np.asarray(boundaries, np.int64)
    sizes: Ints = ends[1:] - ends[:-1]
    if uneven := sizes[sizes % (2 * cp) != 0].tolist():
        raise JobFailed(
            f"padded sequences of {', '.join(map(str, uneven[:8]))} rows are not multiples of {2 * cp},"
            " twice the context parallel size (see recipe.alignment)"
        )
    rank_runs, sequence_starts = compute_runs(sizes, cp, rank), compute_starts(sizes)
    shards = (compute_runs(sizes, cp, cp_rank) for cp_rank in range(cp))
    stored_rows = np.concatenate(
        [shard.concatenate_ranges(sequence_starts[shard.sequence] + shard.start) for shard in shards]
    )
    visible_keys = rank_runs.start + rank_runs.rows if causal else sizes[rank_runs.sequence]
    row_indices = np.argsort(stored_rows)[
        concatenate_ranges(sequence_starts[rank_runs.sequence], visible_keys)
    ]
    return SequenceChunks(
        _accumulate_lengths(rank_runs.rows),
        _accumulate_lengths(visible_keys),
        torch.from_numpy(row_indices).to(device),
    )


def gather_attended_rows(shard: Tensor, chunks: SequenceChunks, group: dist.ProcessGroup) -> Tensor:
    """Return the key rows [key rows, ...] of every chunk, from the rows [rows, ...] of every rank.

    Gradients go back to the ranks of the rows.
    """
    all_rows: Tensor = gather_from_sequence_parallel_region(shard, group=group)
    return all_rows.index_select(0, chunks.row_indices)


def _accumulate_lengths(rows: Ints) -> tuple[int, ...]:
    return (0, *np.cumsum(rows).tolist())
