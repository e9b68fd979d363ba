"""Core attention on a cpu: MLA and GQA heads, packed or not, padding, context parallelism."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from bundle.backends import core_attention
from bundle.backends.cpu.blocks import Block, Layout, attend, layout_of
from bundle.capabilities import CPU, AttentionKernel
from bundle.errors import JobFailed


class CoreAttention(core_attention.CoreAttention):
    """`config.attention_backend` chooses the kernel whose refusals hold (capabilities.attention).

    Masks have Transformer Engine's meaning: with causal and no_mask a mask argument is not looked at, and
    packed input goes by its boundaries alone. Others are [b, 1, 1, keys] for padding, any shape that
    broadcasts to [b, n, rows, keys] for arbitrary; keys are those of this rank, or of the whole sequence.
    """

    name = "cpu"

    @staticmethod
    def kernel_of(config: Any) -> AttentionKernel:
        asked = getattr(getattr(config, "attention_backend", None), "name", "auto")
        return CPU.kernel(asked if asked in ("flash", "fused", "unfused") else "auto")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Any, kind: str
    ) -> Tensor:
        if packed is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        causal, group = kind in ("causal", "padding_causal"), self._group(packed)
        layout = call_layout(query, key, packed, group, causal=causal)
        hidden = None
        if packed is None and mask is not None and kind not in ("causal", "no_mask"):
            hidden = hidden_keys(mask, layout, group)
        if group is not None and layout.order is not None:
            width = key.shape[-1]
            both = gather_in_order(torch.cat((key, value), -1), layout.order, group)
            key, value = both[..., :width], both[..., width:]
        out = attend(
            query, key, value, layout, causal=causal, scale=self.scale, hidden=hidden, dropout=self.dropped
        )
        return out if packed is None else out.squeeze(1)

    def _group(self, packed_seq_params: Any) -> dist.ProcessGroup | None:
        """The ranks that share these sequences; None for one rank. Dynamic CP brings its own in the batch."""
        if getattr(packed_seq_params, "cp_group", None) is not None:
            group = packed_seq_params.cp_group
        elif getattr(packed_seq_params, "local_cp_size", None) == 1 or self.config.context_parallel_size == 1:
            return None
        else:
            group = getattr(self.groups, "cp", None) or parallel_state.get_context_parallel_group()
        return group if group.size() > 1 else None


def call_layout(
    query: Tensor, key: Tensor, packed: Any, group: dist.ProcessGroup | None, *, causal: bool
) -> Layout:
    """The layout of a call with these rows; `packed`: megatron's PackedSeqParams of thd input, or None."""
    cp, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    rows, keys = query.shape[0], key.shape[0]
    if packed is None:
        if rows != keys and cp == 1:  # the last queries of longer keys, as in generation with a cache
            return Layout((Block(rows, 0, keys),), (keys,), None)
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
    """[cp * rows, ...] in the order of the whole sequences from every rank's [rows, ...].

    `order` is `Layout.order`. The gradient is summed over the ranks and each gets back its own rows'.
    """
    whole: Tensor = _GatherInOrder.apply(shard, order, group)
    return whole
