"""Tokens on their way to experts and back, by functions with Transformer Engine's names and arguments.

Megatron calls them where `moe_permute_fusion` is on.
"""

from typing import Any

import torch
from torch import Tensor

from bundle.backends.ascend.operators import find_operator
from bundle.errors import JobFailed


def fused_permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    """Return tokens [out, h] sorted by expert and their places, from tokens [t, h] and bool [t, experts].

    Every token must have the same number of experts, out / t: the operator relies on it.
    """
    permuted, _, places = find_operator("npu_moe_token_permute_with_routing_map")(
        tokens, routing_map, num_out_tokens=num_out_tokens
    )
    return permuted, places


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `fused_permute` does, with the router's weights [out] of the chosen experts in between.

    The weights [t, experts] are in the tokens' type, or float32.
    """
    permuted, weights, places = find_operator("npu_moe_token_permute_with_routing_map")(
        tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens
    )
    return permuted, weights, places


def fused_unpermute(
    permuted: Tensor, places: Tensor, *, merging_probs: Tensor | None, restore_shape: Any, **unused: Any
) -> Tensor:
    """Return tokens [t, h], each the sum of its experts' rows, which are weighted already.

    Raises JobFailed where weights or padding are asked for.
    """
    if merging_probs is not None or any(value is not None for value in unused.values()):
        raise JobFailed(
            "On ascend npu_moe_token_unpermute_with_routing_map does not support weights or padding, which"
            " this megatron-core needs. Leave `permute` out of model.operators."
        )
    unpermute = find_operator("npu_moe_token_unpermute_with_routing_map")
    tokens: Tensor = unpermute(permuted, places, list(restore_shape))
    return tokens


def fused_sort_chunks_by_index(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Return rows [t, h] with their chunks, of `sizes` rows, in another order. Sizes stay on the device."""
    return rows.index_select(0, _compute_source_rows(rows, sizes, order))


def fused_sort_chunks_by_index_with_probs(
    rows: Tensor, probs: Tensor, sizes: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `fused_sort_chunks_by_index` does, with the weight [t] of each row."""
    source = _compute_source_rows(rows, sizes, order)
    return rows.index_select(0, source), probs.index_select(0, source)


def _compute_source_rows(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Return for each place [t] the row that comes to it."""
    sizes, order = (x.to(rows.device, torch.int64, non_blocking=True) for x in (sizes, order))
    moved = sizes[order]
    ends, row = moved.cumsum(0), torch.arange(len(rows), device=rows.device)
    shift = (sizes.cumsum(0) - sizes)[order] - (ends - moved)
    return row + shift[torch.searchsorted(ends, row, right=True)]
