"""Collectives over tensors of different lengths, as NCCL has them and gloo does not.

Tensor-parallel experts exchange them: each rank has other tokens, so the parts differ in rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Fill `tensor_list` with the `tensor` of every rank; the ranks' parts may differ in shape."""
    if _have_equal_shapes(tensor_list):
        return _all_gather(tensor_list, tensor, group, *args, **kwargs)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, part in enumerate(tensor_list):
        dist.broadcast(part, group_src=rank, group=group)
    return None


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Write the reduction of this rank's part into `output`; the parts may differ in their number of rows."""
    if _have_equal_shapes(input_list):
        return _reduce_scatter(output, input_list, op, group, *args, **kwargs)
    parts = torch.cat(list(input_list))
    dist.all_reduce(parts, op, group)
    output.copy_(parts.split([len(part) for part in input_list])[dist.get_rank(group)])
    return None


def _have_equal_shapes(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
