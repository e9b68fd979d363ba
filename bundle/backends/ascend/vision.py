"""Attention of a vision tower: packed, and without causality, so that every patch sees all of its image."""

import torch
from torch import Tensor

from bundle.backends.ascend.attention import (
    MOST_SEQUENCES,
    AttentionCallShape,
    build_mask_arguments,
    call_fused_attention,
)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, boundaries: tuple[int, ...], *, scale: float
) -> Tensor:
    """Return [t, n, d] of [t, n, d] each; `boundaries` of the sequences are host ints: 0, ..., t.

    It calls the kernel once for at most MOST_SEQUENCES sequences. Raises JobFailed for boundaries that it
    would not compute.
    """
    parts = []
    for first in range(0, len(boundaries) - 1, MOST_SEQUENCES):
        ends = boundaries[first : first + MOST_SEQUENCES + 1]
        last = first + MOST_SEQUENCES >= len(boundaries) - 1
        begin, end = ends[0] if first else 0, len(query) if last else ends[-1]
        part_boundaries = tuple(boundary - begin for boundary in ends)
        rows = AttentionCallShape(
            end - begin, end - begin, query.device, boundaries=(part_boundaries, part_boundaries)
        )
        inputs = build_mask_arguments(None, rows, causal=False)
        q, k, v = (x[begin:end] for x in (query, key, value))
        parts.append(call_fused_attention(q, k, v, inputs, heads=query.shape[1], scale=scale, dropout=0.0))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
