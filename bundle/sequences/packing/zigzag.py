"""The context-parallel shards of unpacked tensors: each rank holds the chunks r and 2·cp-1-r of 2·cp.

A causal mask makes late rows dearer than early ones; pairing them gives every rank the same work. It is the
order that Megatron's attention expects (megatron.core.utils.get_batch_on_this_cp_rank).
"""

import torch
from torch import Tensor

from bundle.errors import JobFailed


def shard(x: Tensor, cp: int, rank: int, *, dim: int = 1) -> Tensor:
    """What `rank` of `cp` holds of a tensor [b, s, ...]: [b, s/cp, ...]."""
    if cp == 1:
        return x
    chunks = _chunks(x, cp, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def join(x: Tensor, cp: int, *, dim: int = 1) -> Tensor:
    """The whole [b, s, ...] from the shards of ranks 0, 1, ... concatenated along `dim`."""
    if cp == 1:
        return x
    chunks = _chunks(x, cp, dim)
    return torch.cat((*chunks[0::2], *chunks[::-2]), dim)


def _chunks(x: Tensor, cp: int, dim: int) -> tuple[Tensor, ...]:
    if x.shape[dim] % (2 * cp):
        raise JobFailed(
            f"{x.shape[dim]} rows do not split over {cp} context-parallel ranks:"
            f" pad them to a multiple of {2 * cp} (sequences.alignment)."
        )
    chunks: tuple[Tensor, ...] = x.chunk(2 * cp, dim)
    return chunks
