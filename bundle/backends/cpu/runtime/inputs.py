"""What the arguments of one core attention call say: which rows are whose, and which keys are hidden."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bundle.backends.cpu.runtime.gather import gather_in_order
from bundle.backends.cpu.runtime.layout import Block, Layout, layout_of
from bundle.errors import JobFailed


def call_layout(
    query: Tensor, key: Tensor, packed: Any, group: dist.ProcessGroup | None, *, causal: bool
) -> Layout:
    """The layout of a call with these rows; `packed`: megatron's PackedSeqParams of thd input, or None."""
    cp, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    rows, keys = query.shape[0], key.shape[0]
    if (
        packed is None and rows != keys and cp == 1
    ):  # the last queries of longer keys, as in generation with a cache
        return Layout((Block(rows, 0, keys),), (keys,), None)
    if packed is None:
        return layout_of((keys * cp,), (keys * cp,), rows=rows, cp=cp, rank=rank, causal=causal)
    lengths = padded = _lengths(packed.cu_seqlens_q, packed.cu_seqlens_kv)
    if packed.cu_seqlens_q_padded is not None:
        padded = _lengths(packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    return layout_of(lengths, padded, rows=rows, cp=cp, rank=rank, causal=causal)


def _lengths(queries: Tensor, keys: Tensor | None) -> tuple[int, ...]:
    """The sequences' lengths from their boundaries, which must be the same for queries and keys."""
    ends = queries.tolist()
    if keys is not None and keys is not queries and keys.tolist() != ends:
        raise JobFailed(
            f"packed queries end at {ends} and packed keys at {keys.tolist()}: the cpu's core attention takes"
            " self-attention only"
        )
    return tuple(end - start for start, end in pairwise(ends))


def hidden_keys(mask: Tensor, layout: Layout, group: dist.ProcessGroup | None) -> Tensor:
    """The mask [b or 1, n or 1, rows or 1, keys] over the keys of whole sequences; True = hidden.

    Under context parallelism a mask may come with the keys of this rank only: then the others' are fetched.
    """
    keys, rows = sum(layout.keys), sum(block.rows for block in layout.blocks)
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] not in (1, rows):
        raise JobFailed(
            f"an attention mask must be bool [b, n, rows, keys] with 1 or {rows} rows, True = hidden;"
            f" this one is {mask.dtype} {list(mask.shape)}"
        )
    if mask.shape[3] == keys:
        return mask
    if layout.order is None or group is None or (mask.shape[2], mask.shape[3]) != (1, rows):
        raise JobFailed(
            f"an attention mask {list(mask.shape)} does not fit {keys} keys: give one column for each, or"
            " under context parallelism one row with this rank's keys"
        )
    return gather_in_order(mask.movedim(-1, 0), layout.order, group).movedim(0, -1)
