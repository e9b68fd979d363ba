"""Attention of a vision tower: packed, and without causality, so that every patch sees all of its image."""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from bundle.transfers import copy_to_device


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, boundaries: tuple[int, ...], *, scale: float
) -> Tensor:
    """Return [t, n, d] of [t, n, d] each; `boundaries` of the sequences are host ints: 0, ..., t.

    It calls the kernel that Transformer Engine chooses once, with the length of the longest sequence: the
    call does not read from the device.
    """
    ends, longest = _to_device_boundaries(boundaries, query.device)
    attend = _build_attention(*query.shape[1:], scale)
    boundary_options = {
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    inputs = (x.contiguous() for x in (query, key, value))
    out: Tensor = attend(*inputs, qkv_format="thd", attn_mask_type="padding", **boundary_options)
    return out.view_as(query)


@cache
def _build_attention(heads: int, head_width: int, scale: float) -> Any:
    """Return Transformer Engine's attention of this shape; it has no weights."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads, head_width, softmax_scale=scale, qkv_format="thd", attn_mask_type="padding"
    )


@lru_cache(maxsize=4)  # of images and of windows, for all layers of a step and of what is recomputed of it
def _to_device_boundaries(boundaries: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return the boundaries as the kernel reads them, and the length of the longest sequence."""
    ends = torch.tensor(boundaries, dtype=torch.int32)
    return copy_to_device(ends, device), int(ends.diff().max())
