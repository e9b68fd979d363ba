"""Attention over the blocks of a layout, by torch's fused cpu kernel."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bundle.backends.cpu.runtime.layout import Layout


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
