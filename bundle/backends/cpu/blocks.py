"""Attention over packed or whole sequences as a list of blocks: which rows of a rank meet which keys.

Computed block by block by torch's fused cpu kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bundle.errors import JobFailed
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
    shards = [runs_of(sizes, cp, each) for each in range(cp)]
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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    causal: bool,
    scale: float,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention [rows, b, n, dv] of queries [rows, b, n, dk] to keys and values [keys, b, groups, d].

    `hidden`: bool [b or 1, n or 1, rows or 1, keys], True = not seen. Rows of padding, and rows that see
    nothing, give zeros (as Transformer Engine's packed kernels do). Computed in float32 at least.
    """
    heads, out_dim = query.shape[2], value.shape[-1]
    # The fused kernel takes one head dim for all three; zeros change no product and cost little.
    width = max(query.shape[-1], out_dim)
    q, k, v = (_heads_first(x, heads, width) for x in (query, key, value))
    pieces = q.split([block.rows for block in layout.blocks], 2)
    keys, values = k.split(layout.keys, 2), v.split(layout.keys, 2)
    outputs, first = [], 0
    for block, piece in zip(layout.blocks, pieces, strict=True):
        mask = None
        if hidden is not None:
            rows = slice(first, first + block.rows) if hidden.shape[2] > 1 else slice(None)
            mask = hidden[:, :, rows, : block.keys]
        if block.keys:
            k_block, v_block = (x[block.sequence][:, :, : block.keys] for x in (keys, values))
            outputs.append(_block(piece, k_block, v_block, mask, causal=causal, scale=scale, dropout=dropout))
        else:
            outputs.append(torch.zeros_like(piece))
        first += block.rows
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    if not any(block.keys for block in layout.blocks):
        # A rank that holds nothing but padding still takes its part in the collectives of the gradient.
        whole = whole + sum(x[:, :, :0].sum() for x in (q, k, v))
    return whole[..., :out_dim].permute(2, 0, 1, 3).to(query.dtype)


def _heads_first(x: Tensor, heads: int, width: int) -> Tensor:
    """[b, n, s, width], float32 or wider, from [s, b, groups, d]."""
    x = x.permute(1, 2, 0, 3)
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    if x.shape[1] < heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x


def _block(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, *, causal: bool, scale: float, dropout: float
) -> Tensor:
    rows, keys = q.shape[2], k.shape[2]
    square = causal and rows == keys and hidden is None
    if square or (hidden is None and not causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=square, scale=scale, dropout_p=dropout)
    if hidden is None:
        seen = _ends_together(rows, keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, dropout_p=dropout)
    seen = ~hidden & _ends_together(rows, keys) if causal else ~hidden
    blind = ~seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | blind, scale=scale, dropout_p=dropout)
    return out.masked_fill(blind, 0.0)


@lru_cache(maxsize=16)
def _ends_together(rows: int, keys: int) -> Tensor:
    """Bool [rows, keys], True = seen, of the last `rows` queries of `keys` positions."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
