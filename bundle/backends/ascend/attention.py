"""Core attention on npu_fusion_attention: MLA and GQA heads, packed or not, square masks, shared sequences.

First what one call is told about which keys a query sees (mask, mode, boundaries), then the call.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bundle.backends import core_attention
from bundle.backends.ascend.context import build_query_key_chunks, gather_attended_rows
from bundle.backends.ascend.operators import find_operator
from bundle.capabilities import AttentionKernel
from bundle.capabilities.ascend import ASCEND
from bundle.errors import JobFailed, UsageError
from bundle.mcore.packed_sequences import to_host
from bundle.packing.packing import Ints

DEFAULT_MODE, ALL_MODE, CAUSAL_MODE = 0, 1, 3
"""sparse_mode: no mask; the whole [b, 1, s, s] counts; causal, where the queries are the last of the keys.

Mode 2 aligns the first query with the first key instead: the same for as many queries as keys.
"""
NO_BAND = 2**31 - 1  # the default of pre_tockens and next_tockens: no band
INNER_PRECISE_FULLY_MASKED_ROWS = (
    2  # inner_precise: rows that see nothing are looked after, at some cost; 0 leaves them undefined
)
COMPRESSED_MASK_SIZE = 2048  # rows and columns of the one mask that stands for every causal mask
MOST_SEQUENCES = ASCEND.find_kernel("flash").most_sequences or 0  # the most in one packed call


@dataclass(frozen=True)
class KernelMaskArguments:
    """The arguments that decide what a query sees: all of them, so that none is left from another call."""

    atten_mask: Tensor | None
    sparse_mode: int
    pre_tockens: int = NO_BAND
    next_tockens: int = NO_BAND
    inner_precise: int = 0
    actual_seq_qlen: tuple[int, ...] | None = None
    actual_seq_kvlen: tuple[int, ...] | None = None

    def to_keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of npu_fusion_attention."""
        return dict(vars(self))


@dataclass(frozen=True)
class AttentionCallShape:
    """What one call attends: `queries` to `keys` rows, of each of `batch` sequences (bshd) or in all (thd).

    `boundaries`: megatron's cu_seqlens of the packed queries and of the keys, as host ints: 0, ..., rows;
    None for bshd.
    """

    queries: int
    keys: int
    device: torch.device
    batch: int = 1
    boundaries: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def build_mask_arguments(
    mask: Tensor | None, rows: AttentionCallShape, *, causal: bool
) -> KernelMaskArguments:
    """Return the mask arguments of one call; `mask` is None, or for bshd bool [b or 1, 1, queries, keys].

    True means hidden. A causal model whose padding stands at the end needs no mask: no real query sees the
    padding. Raises JobFailed for every other mask, above all for [b, s]: the operator refuses such a mask
    with a text that names no caller, and takes it for [queries, keys] where the batch has as many rows as
    queries.
    """
    if rows.boundaries is None:
        _refuse(
            [
                *_find_mask_mistakes(mask, rows),
                *_find_blind_queries(causal, *np.array([[rows.queries], [rows.keys]])),
            ]
        )
        if mask is None:
            return _build_maskless_inputs(causal, rows.device)
        hidden = mask | _build_future_mask(rows) if causal else mask
        return KernelMaskArguments(hidden, ALL_MODE, inner_precise=INNER_PRECISE_FULLY_MASKED_ROWS)
    _refuse([*_find_forbidden_packed_mask(mask), *_find_boundary_mistakes(rows, causal)])
    return _build_packed_inputs(rows, causal)


@functools.lru_cache(maxsize=16)  # made once for a micro-batch, and not once for every layer
def _build_packed_inputs(rows: AttentionCallShape, causal: bool) -> KernelMaskArguments:
    """Return the inputs of a packed call. The operator counts ends, without megatron's 0 at the beginning."""
    queries, keys = rows.boundaries or ((), ())
    inputs = _build_maskless_inputs(causal, rows.device)
    return replace(inputs, actual_seq_qlen=queries[1:], actual_seq_kvlen=keys[1:])


@functools.cache
def build_causal_mask(device: torch.device) -> Tensor:
    """Return the mask of causal calls of any length: bool [2048, 2048], True above the diagonal."""
    return torch.ones(COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _build_maskless_inputs(causal: bool, device: torch.device) -> KernelMaskArguments:
    """Return the inputs of a call without a mask of its own.

    Without any mask the operator attends to everything in every mode, so causal calls pass the compressed
    mask.
    """
    return (
        KernelMaskArguments(build_causal_mask(device), CAUSAL_MODE)
        if causal
        else KernelMaskArguments(None, DEFAULT_MODE)
    )


def _build_future_mask(rows: AttentionCallShape) -> Tensor:
    square = torch.ones(rows.queries, rows.keys, dtype=torch.bool, device=rows.device)
    return square.triu(rows.keys - rows.queries + 1)


def _find_mask_mistakes(mask: Tensor | None, rows: AttentionCallShape) -> list[str]:
    if mask is None:
        return []
    expected = f"bool [{rows.batch} or 1, 1, {rows.queries}, {rows.keys}], True = hidden"
    if mask.dim() == 2:
        return [
            f"{_format_mask(mask)}: the kernel does not support a mask of valid tokens. If all padding is at"
            " the end, use this mask only in post-processing (sequences.masks.Masks) and pass none here."
            f" Otherwise pass {expected}"
        ]
    fits = mask.dim() == 4 and mask.shape[0] in (1, rows.batch)
    if mask.dtype != torch.bool or not fits or tuple(mask.shape[1:]) != (1, rows.queries, rows.keys):
        return [f"{_format_mask(mask)} does not fit. Pass {expected}. Only the batch can be broadcast"]
    return []


def _find_forbidden_packed_mask(mask: Tensor | None) -> list[str]:
    if mask is None:
        return []
    return [
        f"{_format_mask(mask)}: packed attention takes cu_seqlens (the boundaries of sequences), not a mask."
        " Pass no mask here. A mask of valid tokens is only for sequences.masks.Masks, and for models that"
        " pack their input themselves"
    ]


@functools.lru_cache(maxsize=16)
def _find_boundary_mistakes(rows: AttentionCallShape, causal: bool) -> list[str]:
    wrong: list[str] = []
    lengths: list[Ints] = []
    for name, ends, total in zip(
        ("query", "key"), rows.boundaries or (), (rows.queries, rows.keys), strict=True
    ):
        bounds = np.asarray(ends, np.int64)
        lengths.append(bounds[1:] - bounds[:-1])
        argument = "cu_seqlens_q" if name == "query" else "cu_seqlens_kv"
        label = (
            f"the {name} boundaries ({argument}) [{', '.join(map(str, ends[:8]))}{', ...' * (len(ends) > 8)}]"
        )
        form = "Give cumulative lengths from 0 on: [0, 3, 8] for sequences of 3 and 5 rows"
        if len(ends) < 2:
            wrong.append(f"{label} contain no sequence. {form}")
        elif ends[0] != 0:
            wrong.append(f"{label} begin with {ends[0]}, not with 0. {form}")
        elif lengths[-1].min() < 0:
            place = int(lengths[-1].argmin())
            wrong.append(f"{label} decrease from {ends[place]} to {ends[place + 1]}. {form}")
        elif ends[-1] != total:
            wrong.append(f"{label} do not end at row {total}. Add padding rows as one more sequence")
        if len(ends) - 1 > MOST_SEQUENCES:
            wrong.append(
                f"a pack of {len(ends) - 1} sequences exceeds the operator's limit of {MOST_SEQUENCES}"
            )
    if len(lengths[0]) != len(lengths[1]):
        return [*wrong, f"the pack has {len(lengths[0])} sequences of queries, but {len(lengths[1])} of keys"]
    return wrong or _find_blind_queries(causal, *lengths)


def _find_blind_queries(causal: bool, queries: Ints, keys: Ints) -> list[str]:
    blind = (queries > keys) if causal else (keys == 0)
    first = np.flatnonzero(blind & (queries > 0))[:1]
    return [f"a sequence has {queries[i]} queries and {keys[i]} keys: some queries see no key" for i in first]


def _format_mask(mask: Tensor) -> str:
    return f"a mask {str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise JobFailed("npu_fusion_attention does not support this call:", wrong)


class AscendCoreAttention(core_attention.BaseCoreAttention):
    """A mask is None or bool [b or 1, 1, rows, keys], True = hidden.

    It is never left out in silence, as Transformer Engine does with causal attention: a square one is used,
    any other refused (`build_mask_arguments`: JobFailed), as are boundaries that the kernel would not
    compute. Nothing is kept from one call for the next.
    """

    name = "ascend"

    @staticmethod
    def select_kernel(config: Any) -> AttentionKernel:
        return ASCEND.find_kernel("flash")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Any, kind: str
    ) -> Tensor:
        causal, heads = kind in ("causal", "padding_causal"), query.shape[-2]
        group = self.find_context_group(packed)
        if group is not None:
            return self._attend_with_gathered_rows(query, key, value, mask, packed, group, causal=causal)
        boundaries = None if packed is None else _read_padded_boundaries(packed, causal=causal)
        rows = AttentionCallShape(query.shape[0], key.shape[0], query.device, query.shape[1], boundaries)
        if packed is None:
            query, key, value = (x.flatten(2) for x in (query, key, value))
        out = self._run_kernel(query, key, value, build_mask_arguments(mask, rows, causal=causal), heads)
        return out.unflatten(-1, (heads, -1)) if packed is None else out

    def _attend_with_gathered_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        packed: Any,
        group: dist.ProcessGroup,
        *,
        causal: bool,
    ) -> Tensor:
        """Return what `attend` does where the ranks of `group` share the sequences; packs in any layout."""
        shape = query.shape
        if packed is None:  # rows of one length, one after the other
            full_length = shape[0] * group.size()
            boundaries = tuple(range(0, full_length * shape[1] + 1, full_length))
            query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        else:
            boundaries = _read_padded_boundaries(packed, causal=causal)[1]
        chunks = build_query_key_chunks(
            boundaries, group.size(), group.rank(), causal=causal, device=query.device
        )
        key, value = (gather_attended_rows(x, chunks, group) for x in (key, value))
        rows = AttentionCallShape(
            query.shape[0], key.shape[0], query.device, boundaries=(chunks.queries, chunks.keys)
        )
        out = self._run_kernel(
            query, key, value, build_mask_arguments(mask, rows, causal=causal), query.shape[-2]
        )
        return out.unflatten(0, (shape[1], shape[0])).transpose(0, 1) if packed is None else out

    def _run_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, inputs: KernelMaskArguments, heads: int
    ) -> Tensor:
        return call_fused_attention(
            query, key, value, inputs, heads=heads, scale=self.scale, dropout=self.dropout_rate
        )


def _read_padded_boundaries(packed: Any, *, causal: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the boundaries of packed queries and keys.

    The kernel knows no gaps between sequences. Their padding is rows like others, behind every real row,
    where a causal mask hides them. Without a causal mask real rows would see the padding: raises UsageError.
    """
    boundaries = []
    for name in ("q", "kv"):
        real, padded = (getattr(packed, f"cu_seqlens_{name}{suffix}") for suffix in ("", "_padded"))
        boundaries.append(to_host(real if padded is None else padded))
        if not causal and boundaries[-1] != to_host(real):
            raise UsageError(
                "packed sequences with padding between them need a causal mask on ascend, because the"
                " kernel treats padding as keys. Pack without padding (context parallel size 1)"
            )
    return boundaries[0], boundaries[1]


def call_fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: KernelMaskArguments,
    *,
    heads: int,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return npu_fusion_attention's result for `heads` query heads, laid out like `query`.

    It is as wide as the values: [t, n, d] where `inputs` has ends of sequences (TND), else [s, b, n * d]
    (SBH). That is megatron's own order of dimensions, so nothing is copied. Raises EnvironmentUnfit where
    torch-npu is not loaded.
    """
    layout = "SBH" if inputs.actual_seq_qlen is None else "TND"
    result = find_operator("npu_fusion_attention")(
        query, key, value, heads, layout, scale=scale, keep_prob=1.0 - dropout, **inputs.to_keywords()
    )
    out: Tensor = result[0]
    return out
