"""The result of npu_fusion_attention, differentiable; refuses what the contract forbids.

What the documentation leaves undefined comes out as NaN, so that nobody builds on it by accident: rows behind
the last packed sequence, and rows that see nothing unless inner_precise 2 asks for them (then zeros).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from tests.backends.ascend.contract import rules
from tests.backends.ascend.contract.rules import need
from tests.backends.ascend.contract.sizes import Sizes, as_given, heads_first, sizes

INVALID_ROWS = 2  # inner_precise
Result = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> Result:
    """Attention, the softmax's maxima and sums [b, n, s, 8] or [t, n, 8], and what belongs to dropout."""
    rules.tensors(query, key, value, head_num, input_layout)
    layout = input_layout.upper()
    of = sizes(query, key, value, head_num, layout)
    rules.dimensions(of, head_num)
    rules.mode(sparse_mode, layout)
    need(0 < keep_prob <= 1, "op", f"keep_prob is {keep_prob}: above 0, up to 1")
    need(padding_mask is None, "doc", "padding_mask is not supported")
    need(inner_precise in (0, 1, 2), "doc", f"inner_precise is {inner_precise}: 0, 1 or 2")
    need(softmax_layout in ("", "TND"), "op", f"softmax_layout is {softmax_layout!r}: TND or nothing")
    need(layout == "TND" or not softmax_layout, "op", f"softmax_layout TND with input_layout {layout}")
    need(
        keep_prob == 1 and dropout_mask is None, "emulation", "dropout has its own random numbers on a device"
    )
    need(pse is None and sink is None and prefix is None, "emulation", "no pse, sink or prefix")

    q, k, v = (
        heads_first(x, layout, n) for x, n in ((query, head_num), (key, of.groups), (value, of.groups))
    )
    blocks = _packed(q, k, v, of, actual_seq_qlen, actual_seq_kvlen) if layout == "TND" else [(q, k, v)]
    if layout != "TND":
        given = actual_seq_qlen is not None or actual_seq_kvlen is not None
        need(not given, "doc", f"actual_seq_qlen and actual_seq_kvlen are for TND, not for {layout}")
    if atten_mask is not None:
        longest = replace(of, queries=max(q.shape[2] for q, _, _ in blocks), keys=max(_keys(blocks)))
        rules.mask(atten_mask, sparse_mode, longest, packed=layout == "TND")
    parts = []
    for q_block, k_block, v_block in blocks:
        shape = q_block.shape[2], k_block.shape[2]
        hidden = _hidden(atten_mask, sparse_mode, pre_tockens, next_tockens, *shape)
        looked_after = inner_precise == INVALID_ROWS or (
            sparse_mode == rules.RIGHT_DOWN and shape[0] > shape[1]
        )
        parts.append(_attend(q_block, k_block, v_block, hidden, scale, 0.0 if looked_after else torch.nan))
    out, maxima, sums = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
    missing = q.shape[2] - out.shape[2]
    if missing:  # not computed by the kernel
        out = torch.cat((out, out.new_full((*out.shape[:2], missing, out.shape[3]), torch.nan)), 2)
    statistics = [as_given(x, "TND") if layout == "TND" else x for x in (maxima, sums)]
    return as_given(out, layout), *statistics, query.new_empty(0), seed, offset, 0


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Sizes,
    query_ends: Sequence[int] | None,
    key_ends: Sequence[int] | None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The sequences one by one; those without queries are left out."""
    qs = rules.ends(query_ends, "actual_seq_qlen", of.queries)
    ks = rules.ends(key_ends, "actual_seq_kvlen", of.keys)
    need(len(qs) == len(ks), "op", f"actual_seq_qlen has {len(qs)} ends and actual_seq_kvlen {len(ks)}")
    blocks = []
    for (a, b), (c, d) in zip(pairwise((0, *qs)), pairwise((0, *ks)), strict=True):
        need(a == b or c < d, "doc", f"a sequence of {b - a} queries has no keys")
        if a < b:
            blocks.append((q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]))
    need(blocks, "doc", "no sequence has a query")
    return blocks


def _keys(blocks: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[int]:
    return (k.shape[2] for _, k, _ in blocks)


def _hidden(
    mask: Tensor | None, sparse_mode: int, pre: int, following: int, queries: int, keys: int
) -> Tensor | None:
    """Bool that broadcasts to [b, n, queries, keys], True = hidden; None: everything is seen."""
    if mask is None:  # then the mode, pre_tockens and next_tockens are not looked at
        return None
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    below = column - row  # 0 on the diagonal that begins at the upper left
    corner = keys - queries  # and this on the one that ends at the lower right
    if sparse_mode == rules.LEFT_UP:
        return below > 0
    if sparse_mode == rules.RIGHT_DOWN:
        return below > corner
    if sparse_mode == rules.BAND:
        rules.band(pre, following, queries, keys)
        return (below > corner + following) | (below < corner - pre)
    shown = mask.bool()[..., :queries, :keys]
    if sparse_mode == rules.FULL:
        rules.band(pre, following, queries, keys)
        outside = (below > following) | (below < -pre)
        need(
            not (outside & ~shown).any(),
            "doc",
            f"sparse_mode 0: atten_mask shows keys outside the band of pre_tockens {pre} and next_tockens"
            f" {following}, which are skipped without a word",
        )
    return shown


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, blind: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, computed in float32; the maxima and the sums of its softmax, eight times each."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(heads, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    nothing = None
    if hidden is not None:
        nothing = hidden.expand(*scores.shape).all(-1, keepdim=True)
        scores = scores.masked_fill(hidden & ~nothing, -torch.inf)
    highest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights / total @ v
    if nothing is not None:
        out = out.masked_fill(nothing, blind)
    eight = (*highest.shape[:-1], 8)
    return out.to(q.dtype), highest.expand(eight), total.detach().expand(eight)
