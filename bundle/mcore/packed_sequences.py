"""The PackedSeqParams that attention reads, from a Packing, and the way back to host integers."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bundle.packing.packing import Packing

# Boundaries whose numbers are known on the host, for as long as their tensor lives.
_HOST_BOUNDARIES_BY_TENSOR = WeakTensorKeyDictionary()
# Results computed from boundaries on their device, while their tensor lives and is not written to.
_RESULTS_BY_BOUNDARIES = WeakTensorKeyDictionary()


def build_packed_seq_params(packing: Packing) -> PackedSeqParams:
    """Return the boundaries of the real and of the padded sequences, tail included.

    The longest sequence counts its padding. The padded boundaries are always passed: megatron lays tokens out
    by them under context parallel. `pad_between_seqs` (a field from 0.19 on) says whether they differ before
    the last one; without it attention would ask the device.
    """
    padding, longest = packing.padding, packing.padding.longest_kernel_sequence_rows
    _HOST_BOUNDARIES_BY_TENSOR[packing.cu_seqlens_padded] = tuple(
        accumulate((0, *padding.padded_lengths_with_tail))
    )
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        cu_seqlens_q_padded=packing.cu_seqlens_padded,
        cu_seqlens_kv_padded=packing.cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    inner = slice(None if padding.tail_rows else -1)  # all but the last sequence; a tail is one more
    params.pad_between_seqs = padding.lengths[inner] != padding.padded_lengths[inner]
    return params


def to_host(boundaries: Tensor) -> tuple[int, ...]:
    """Return boundaries as integers, for kernels that need them.

    Our own padded ones are known and cost nothing. Others are read from the device once in the life of their
    tensor, not once in every layer.
    """
    if boundaries not in _HOST_BOUNDARIES_BY_TENSOR:
        _HOST_BOUNDARIES_BY_TENSOR[boundaries] = tuple(boundaries.tolist())
    known: tuple[int, ...] = _HOST_BOUNDARIES_BY_TENSOR[boundaries]
    return known


def roll_packed(tensor: Tensor, boundaries: Tensor, group: Any = None) -> Tensor:
    """Return for every row [..., t / cp] the value of the next token of its sequence, 0 where none follows.

    `boundaries` [sequences + 1] are those of the whole pack, padding included; `group` is its
    context-parallel ranks: rank r holds chunks r and 2 cp - 1 - r of every sequence. It takes one gather, and
    one exchange of the first tokens of all chunks. Nothing is read back from the device, whatever the number
    of sequences.
    """
    source, firsts = _compute_cached(_plan_next_token_exchange, boundaries, tensor.shape[-1], group)
    if len(firsts):
        mine = tensor.index_select(-1, firsts).contiguous()
        theirs = mine.new_empty(group.size() * len(mine), *mine.shape[1:])  # gloo takes no other shape
        torch.distributed.all_gather_into_tensor(theirs, mine, group=group)
        theirs = theirs.view(group.size(), *mine.shape)
        tensor = torch.cat([tensor, theirs.movedim(0, -2).flatten(-2)], -1)
    return F.pad(tensor, (0, 1)).index_select(-1, source)


def compute_positions_and_starts(boundaries: Tensor, rows: int, group: Any = None) -> tuple[Tensor, Tensor]:
    """Return the position of each row of this rank in its sequence, and that one's start; [t / cp].

    The start is the place in the pack where the sequence begins. Boundaries and ranks are those of
    `roll_packed`; nothing is read back from the device.
    """
    result: tuple[Tensor, Tensor] = _compute_cached(_compute_positions_and_starts, boundaries, rows, group)
    return result


def _compute_cached(compute: Callable[..., Any], boundaries: Tensor, rows: int, group: Any) -> Any:
    """Return the result of `compute` for these boundaries on this rank, cached until they are written to."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    key = (compute, rows, ranks, rank)
    if boundaries.is_inference():  # made in torch.inference_mode: nobody counts who writes to it
        return compute(boundaries, rows, ranks, rank)
    version, known = _RESULTS_BY_BOUNDARIES.get(boundaries, (None, {}))
    if version != boundaries._version:
        known = {}
        _RESULTS_BY_BOUNDARIES[boundaries] = boundaries._version, known
    if key not in known:
        known[key] = compute(boundaries, rows, ranks, rank)
    return known[key]


def _compute_positions_and_starts(
    boundaries: Tensor, rows: int, ranks: int, rank: int
) -> tuple[Tensor, Tensor]:
    starts, ends = (boundaries[:-1] // ranks).long(), (boundaries[1:] // ranks).long()
    row = torch.arange(rows, device=boundaries.device)
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    offset, half = row - starts[sequence], ((ends - starts) // 2)[sequence]
    first, second = offset + rank * half, offset + (2 * ranks - 2 - rank) * half
    return torch.where(offset < half, first, second), boundaries[:-1].long()[sequence]


def _plan_next_token_exchange(boundaries: Tensor, rows: int, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return where the next token of every row is [t / cp], and the rows to exchange: the chunks' first.

    Places are counted over this rank's rows, then the first tokens of the chunks of each rank (all first
    ones, then all second ones), then a zero. A single rank exchanges nothing.
    """
    starts, ends = (boundaries[:-1] // ranks).long(), (boundaries[1:] // ranks).long()
    middles = (starts + ends) // 2
    sequences, device = len(starts), boundaries.device
    first_rows = torch.arange(sequences, device=device) + rows
    zero = rows + (2 * sequences * ranks if ranks > 1 else 0)

    def find_first(other_rank: int, chunk: int) -> Tensor:
        return first_rows + (2 * other_rank + chunk) * sequences

    source = torch.arange(1, rows + 2, device=device)  # one row more, for sequences that have none
    if ranks > 1:
        after = find_first(rank + 1, 0) if rank + 1 < ranks else find_first(rank, 1)
        source.scatter_(0, torch.where(starts < middles, middles - 1, rows), after)
    after = find_first(rank - 1, 1) if rank > 0 else torch.full_like(first_rows, zero)
    source.scatter_(0, torch.where(starts < ends, ends - 1, rows), after)
    exchanged = torch.cat([starts, middles]).clamp(max=rows - 1)
    return source[:rows], exchanged if ranks > 1 else exchanged[:0]
