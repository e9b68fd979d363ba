"""Attention written out: float64, one sequence and one head at a time, nothing shared with the product."""

from collections.abc import Sequence

import torch
from torch import Tensor


def one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """[s, n, dv] of [s, n, d]; `hidden` [rows, keys] bool or [n, rows, keys]; a blind row gives zeros."""
    heads, groups = q.shape[1], k.shape[1]
    hidden = hidden.expand(heads, *hidden.shape[-2:])
    out = []
    for head in range(heads):
        group = head * groups // heads
        scores = (q[:, head] @ k[:, group].T) * scale
        weights = torch.where(hidden[head], 0.0, (scores - scores.max()).exp())
        total = weights.sum(-1, keepdim=True)
        out.append(weights / torch.where(total == 0, 1.0, total) @ v[:, group])
    return torch.stack(out, 1)


def future(rows: int, keys: int) -> Tensor:
    """What a causal mask hides from the last `rows` of `keys` positions."""
    position = torch.arange(keys - rows, keys)
    return torch.arange(keys)[None] > position[:, None]


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    padded: Sequence[int],
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """[t, n, dv]: every sequence by itself, zeros in its padding."""
    out, start = [], 0
    for length, size in zip(lengths, padded, strict=True):
        real = slice(start, start + length)
        hidden = future(length, length) if causal else torch.zeros(length, length, dtype=torch.bool)
        if length:
            out.append(one_sequence(q[real], k[real], v[real], scale, hidden))
        out.append(q.new_zeros(size - length, q.shape[1], v.shape[2]))
        start += size
    return torch.cat(out) + 0.0 * (q.sum() + k.sum() + v.sum())  # all padding has a gradient too: zero


def zigzag_rows(padded: Sequence[int], cp: int, rank: int) -> list[int]:
    """The rows of the whole pack that a context-parallel rank holds, in its order."""
    if cp == 1:
        return list(range(sum(padded)))
    rows: list[int] = []
    start = 0
    for size in padded:
        chunk = size // (2 * cp)
        for part in (rank, 2 * cp - 1 - rank):
            rows += range(start + part * chunk, start + (part + 1) * chunk)
        start += size
    return rows
