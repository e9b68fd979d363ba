"""The keys and values of all context-parallel ranks, in the order of their sequences."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
