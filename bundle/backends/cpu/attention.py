"""Core attention on a cpu: MLA and GQA heads, packed or not, padding, context parallelism.

A call is a list of blocks, which rows of a rank meet which keys, computed one by one by torch's fused kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bundle.backends import core_attention
from bundle.capabilities import AttentionKernel
from bundle.capabilities.cpu import CPU
from bundle.errors import JobFailed
from bundle.packing.packing import compute_runs, compute_starts, concatenate_ranges


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a rank: padding, or queries that attend to the first keys of their sequence."""

    rows: int
    sequence: int
    keys: int  # 0: padding


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """What a query sees: all keys, or those up to its own place, or of these the last `window` ones."""

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class AttentionLayout:
    """One attention call: `blocks` cover the rank's rows in order; `keys`: each sequence's rows on all ranks.

    `order` lists, for each row of the whole sequences, where the ranks' shards, one after the other, have it.
    """

    blocks: tuple[Block, ...]
    keys: tuple[int, ...]
    order: Tensor | None  # None: one rank, nothing to put in order


class CpuCoreAttention(core_attention.BaseCoreAttention):
    """`config.attention_backend` chooses the kernel whose refusals hold (capabilities.attention).

    Masks have Transformer Engine's meaning: with causal and no_mask a mask argument is not looked at, and
    packed input goes by its boundaries alone. Others are [b, 1, 1, keys] for padding, any shape that
    broadcasts to [b, n, rows, keys] for arbitrary; keys are those of this rank, or of the whole sequence.
    """

    name = "cpu"
    has_sinks_and_windows = True

    @staticmethod
    def select_kernel(config: Any) -> AttentionKernel:
        backend_name = getattr(getattr(config, "attention_backend", None), "name", "auto")
        return CPU.find_kernel(backend_name if backend_name in ("flash", "fused", "unfused") else "auto")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Any, kind: str
    ) -> Tensor:
        if packed is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        causal, group = kind in ("causal", "padding_causal"), self.find_context_group(packed)
        layout = build_call_layout(query, key, packed, group, causal=causal)
        hidden = None
        if packed is None and mask is not None and kind not in ("causal", "no_mask"):
            hidden = build_hidden_key_mask(mask, layout, group)
        if group is not None and layout.order is not None:
            width = key.shape[-1]
            both = gather_in_order(torch.cat((key, value), -1), layout.order, group)
            key, value = both[..., :width], both[..., width:]
        out = attend(
            query,
            key,
            value,
            layout,
            causal=causal,
            scale=self.scale,
            hidden=hidden,
            dropout=self.dropout_rate,
            window=self.window,
            sinks=self.softmax_offset,
        )
        return out if packed is None else out.squeeze(1)


def build_call_layout(
    query: Tensor, key: Tensor, packed: Any, group: dist.ProcessGroup | None, *, causal: bool
) -> AttentionLayout:
    """Return the layout of a call with these rows.

    `packed` is megatron's PackedSeqParams of thd input, or None.
    """
    cp, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    rows, keys = query.shape[0], key.shape[0]
    if packed is None:
        if rows != keys and cp == 1:  # the last queries of longer keys, as in generation with a cache
            return AttentionLayout((Block(rows, 0, keys),), (keys,), None)
        return build_layout((keys * cp,), (keys * cp,), rows=rows, cp=cp, rank=rank, causal=causal)
    lengths = padded = _read_lengths(packed.cu_seqlens_q, packed.cu_seqlens_kv)
    if packed.cu_seqlens_q_padded is not None:
        padded = _read_lengths(packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    return build_layout(lengths, padded, rows=rows, cp=cp, rank=rank, causal=causal)


def _read_lengths(queries: Tensor, keys: Tensor | None) -> tuple[int, ...]:
    """Return the sequences' lengths from their boundaries, which must be the same for queries and keys."""
    ends = queries.tolist()
    if keys is not None and keys is not queries and keys.tolist() != ends:
        raise JobFailed(
            f"cu_seqlens of the queries {ends} differ from those of the keys {keys.tolist()}, but the cpu's"
            " core attention supports only self-attention"
        )
    return tuple(np.diff(ends).tolist())


def build_hidden_key_mask(mask: Tensor, layout: AttentionLayout, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mask [b or 1, n or 1, rows or 1, keys] over the keys of whole sequences; True = hidden.

    Under context parallelism a mask may have the keys of this rank only: those of other ranks are gathered.
    """
    keys, rows = sum(layout.keys), sum(block.rows for block in layout.blocks)
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] not in (1, rows):
        raise JobFailed(
            f"an attention mask must be bool [b, n, rows, keys] with 1 or {rows} rows, True = hidden, but"
            f" is {mask.dtype} {list(mask.shape)}"
        )
    if mask.shape[3] == keys:
        return mask
    if layout.order is None or group is None or (mask.shape[2], mask.shape[3]) != (1, rows):
        raise JobFailed(
            f"an attention mask {list(mask.shape)} does not fit {keys} keys. Give one column for each key."
            " With context parallelism, one row for the keys of this rank is also allowed"
        )
    return gather_in_order(mask.movedim(-1, 0), layout.order, group).movedim(0, -1)


class _GatherInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.order, ctx.group = order, group
        shards = shard.new_empty((group.size() * shard.shape[0], *shard.shape[1:]))
        dist.all_gather_into_tensor(shards, shard.contiguous(), group=group)
        return shards.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        shards = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        shards.index_copy_(0, ctx.order, gradient)
        shard = shards.new_empty((shards.shape[0] // ctx.group.size(), *shards.shape[1:]))
        dist.reduce_scatter_tensor(shard, shards, group=ctx.group)
        return shard, None, None


def gather_in_order(shard: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [cp * rows, ...] in the order of the whole sequences from every rank's [rows, ...].

    `order` is `Layout.order`. The gradient is summed over the ranks, and each rank gets that of its own rows.
    """
    gathered: Tensor = _GatherInOrder.apply(shard, order, group)
    return gathered


@lru_cache(maxsize=64)
def build_layout(
    lengths: tuple[int, ...], padded: tuple[int, ...], *, rows: int, cp: int, rank: int, causal: bool
) -> AttentionLayout:
    """Return the layout of sequences with these real and padded lengths for a rank that holds `rows` rows.

    The layout is cached by these numbers, and so is made once for a micro-batch instead of once for every
    layer. Raises JobFailed for sequences that the kernels of the accelerators do not take either.
    """
    _check_lengths(lengths, padded, rows=rows, cp=cp)
    sizes = np.asarray(padded)
    shards = [compute_runs(sizes, cp, cp_rank) for cp_rank in range(cp)]
    blocks = []
    for sequence, start, size in zip(
        shards[rank].sequence, shards[rank].start, shards[rank].rows, strict=True
    ):
        real = int(np.clip(lengths[sequence] - start, 0, size))
        blocks.append(Block(real, int(sequence), int(start) + real if causal else lengths[sequence]))
        blocks.append(Block(int(size) - real, int(sequence), 0))
    order = None
    if cp > 1:
        positions = [
            concatenate_ranges(compute_starts(sizes)[shard.sequence] + shard.start, shard.rows)
            for shard in shards
        ]
        order = torch.from_numpy(np.argsort(np.concatenate(positions)))
    return AttentionLayout(tuple(block for block in blocks if block.rows), padded, order)


def _check_lengths(lengths: Sequence[int], padded: Sequence[int], *, rows: int, cp: int) -> None:
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
            f"cu_seqlens end at token {sum(padded)}, but the pack has {rows * cp} tokens (context parallel"
            f" size {cp})."
            " If the pack ends with padding, add the padding to cu_seqlens as one more sequence"
        )
    if wrong:
        raise JobFailed("Attention does not support these packed sequences (see recipe.alignment):", wrong)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    *,
    causal: bool,
    scale: float,
    hidden: Tensor | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax attention [rows, b, n, dv] of queries [rows, b, n, dk] to keys and values.

    Keys and values are [keys, b, groups, d]. `hidden`: bool [b or 1, n or 1, rows or 1, keys], True = not
    seen. Rows of padding, and rows that see nothing, give zeros (as Transformer Engine's packed kernels do).
    The computation is in float32 at least. `window` is the number of keys that a causal query sees. `sinks`
    [n] are logits of one more key, whose value is zero: an extra channel of that key multiplies ones of the
    queries, so the kernels need no support for sinks.
    """
    heads, out_dim = query.shape[2], value.shape[-1]
    # The fused kernel takes one head dim for all three; zeros change no product and cost little.
    width = max(query.shape[-1], out_dim)
    q, k, v = (_prepare_attention_operand(x, heads, width) for x in (query, key, value))
    sink = None
    if sinks is not None:
        q, k, v = F.pad(q, (0, 1), value=1.0), F.pad(k, (0, 1)), F.pad(v, (0, 1))
        sink = F.pad(sinks.to(q.dtype)[:, None, None] / scale, (width, 0))
    pattern = MaskPattern(causal, window)
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
            outputs.append(
                _attend_block(piece, k_block, v_block, mask, pattern, sink, scale=scale, dropout=dropout)
            )
        else:
            outputs.append(torch.zeros_like(piece))
        first += block.rows
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    if not any(block.keys for block in layout.blocks):
        # A rank that holds nothing but padding still takes its part in the collectives of the gradient.
        output = output + sum(x[:, :, :0].sum() for x in (q, k, v))
    return output[..., :out_dim].permute(2, 0, 1, 3).to(query.dtype)


def _prepare_attention_operand(x: Tensor, heads: int, width: int) -> Tensor:
    """Return [b, n, s, width], float32 or wider, from [s, b, groups, d]."""
    x = x.permute(1, 2, 0, 3)
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    if x.shape[1] < heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    pattern: MaskPattern,
    sink: Tensor | None,
    *,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return the attention of one block. `sink` is the key [n, 1, d] in front of all others, or None."""
    rows, keys = q.shape[2], k.shape[2]
    square = pattern == MaskPattern(causal=True) and rows == keys
    if hidden is None and sink is None and (square or not pattern.causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=square, scale=scale, dropout_p=dropout)
    visible, empty_rows = _build_visible_mask(rows, keys, pattern), None
    if hidden is not None:
        visible = ~hidden & visible
        empty_rows = ~visible.any(-1, keepdim=True)
        visible = visible | empty_rows
    if sink is not None:
        k, v = torch.cat((sink.expand(k.shape[0], -1, -1, -1), k), 2), F.pad(v, (0, 0, 1, 0))
        visible = F.pad(visible, (1, 0), value=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, dropout_p=dropout)
    return out if empty_rows is None else out.masked_fill(empty_rows, 0.0)


@lru_cache(maxsize=16)
def _build_visible_mask(rows: int, keys: int, pattern: MaskPattern) -> Tensor:
    """Return bool [rows, keys], True = seen, of the last `rows` queries of `keys` positions."""
    all_visible = torch.ones(rows, keys, dtype=torch.bool)
    if not pattern.causal:
        return all_visible
    diagonal = keys - rows
    visible = all_visible.tril(diagonal)
    return visible if pattern.window is None else visible.triu(diagonal - pattern.window + 1)
