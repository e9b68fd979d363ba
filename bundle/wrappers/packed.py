"""Packed input without a look at the device: rotary positions, and what attention is told."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from bundle.mcore import packed
from bundle.mcore.signatures import accepts


def packed_by_one_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `_apply_rotary_pos_emb_thd` that takes the angles of all rows from the table by one gather.

    Megatron's cuts the rows [t / cp, n, d] into sequences, by lengths that it reads back from the device in
    every layer, and slices the table for each. From 0.15 on a table may have a row for every token of the
    pack, and is then read from where the sequence begins.
    """
    signature = inspect.signature(original)
    rope_utils = sys.modules[original.__module__]  # which is being imported when the patch is applied
    knows_whole_packs = accepts(rope_utils._get_thd_freqs_on_this_cp_rank, "offset")

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(*args: Any, **kwargs: Any) -> torch.Tensor:
        how = dict(signature.bind(*args, **kwargs).arguments)
        t, boundaries, table = (how.pop(name) for name in ("t", "cu_seqlens", "freqs"))
        group = how.pop("cp_group", None) or parallel_state.get_context_parallel_group()
        position, begin = packed.positions(boundaries, t.shape[0], group)
        if knows_whole_packs and table.shape[0] == t.shape[0] * group.size():
            position = position + begin
        angles = table.index_select(0, position)
        rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **how)
        return rotated.squeeze(1)

    return _apply_rotary_pos_emb_thd


def say_whether_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns TEDotProductAttention's `__init__` for packs that say whether padding lies between sequences.

    As from 0.19 on: what is None, as in the packs of others, Transformer Engine finds out by itself.
    """
    if not hasattr(PackedSeqParams, "pad_between_seqs"):
        PackedSeqParams.pad_between_seqs = None

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.kept_packed_seq_params.add("pad_between_seqs")

    return __init__
