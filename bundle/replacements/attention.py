"""Attention: over tensor-parallel ranks, of packed input, and where rotary positions say its rows are.

Sinks, the output's gate and norm, whose ranks they are; packs without a look at the device, of text and more.
"""

import dataclasses
import functools
import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.spec_utils import ModuleSpec

from bundle.mcore import can_take_keyword, packed_sequences
from bundle.replacements import Function, bind_passed_arguments, make_wrapper
from bundle.replacements.mla import keeps_full_tables, sum_over_ranks


@make_wrapper
def mark_sinks_as_split(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `DotProductAttention.__init__` that marks learned sinks (one for a head) as one rank's share."""
    original(self, *args, **kwargs)
    sinks = getattr(self, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter) and not getattr(sinks, "tensor_model_parallel", False):
        layers.set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)


@make_wrapper
def select_gate_heads(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `SelfAttention.get_query_key_value_tensors` whose gate [s, b, n, d] has the query's heads.

    Ranks that share a group of heads get the whole group. The original cuts only the query to this rank's
    heads.
    """
    outputs = original(self, *args, **kwargs)
    if len(outputs) != 4:
        return outputs
    query, key, value, gate = outputs
    heads = query.shape[2]
    position = self.pg_collection.tp.rank() % (gate.shape[2] // heads)
    return query, key, value, gate[:, :, position * heads : (position + 1) * heads]


@make_wrapper
def pass_group_to_cross_attention(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `CrossAttention.__init__` whose projections are split over the passed group of ranks.

    The original splits them over the ranks of the layout. Nothing changes where no group is passed.
    """
    call = bind_passed_arguments(original, self, *args, **kwargs)
    arguments = call.arguments
    collection = arguments.get("pg_collection") or arguments.get("model_comm_pgs")  # the latter to 0.14
    if collection is not None:
        parts = arguments["submodules"]
        projections = {
            name: _bind_tp_group_to_spec(getattr(parts, name), collection.tp)
            for name in ("linear_q", "linear_kv")
        }
        arguments["submodules"] = dataclasses.replace(parts, **projections)
    original(*call.args, **call.kwargs)


def _bind_tp_group_to_spec(layer: Any, group: Any) -> Any:
    """Return the builder of the layer, with the group bound to it."""
    if isinstance(layer, type):
        layer = ModuleSpec(module=layer)
    if not isinstance(layer, ModuleSpec):  # a function, since 0.16
        return functools.partial(layer, tp_group=group)
    return dataclasses.replace(layer, params={**(layer.params or {}), "tp_group": group})


@make_wrapper
def hook_delta_net_norm_gradient(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Return `GatedDeltaNet.__init__` whose output norm gets its gradient from the heads of all ranks.

    Under sequence parallelism megatron sums this gradient at the end of a step.
    """
    original(self, *args, **kwargs)
    group = self.pg_collection.tp
    if not self.config.sequence_parallel and group.size() > 1:
        for parameter in self.out_norm.parameters():
            parameter.register_hook(functools.partial(sum_over_ranks, group=group))


@make_wrapper
def rotate_packed_by_gather(original: Function, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return `_apply_rotary_pos_emb_thd` that takes the angles of all rows from the table by one gather.

    Megatron's function cuts the rows [t / cp, n, d] into sequences, by lengths that it reads back from the
    device in every layer, and slices the table for each. From 0.15 on a table may have a row for every token
    of the pack, and is then read from the row where the sequence begins.
    """
    rope_utils = sys.modules[original.__module__]
    arguments = dict(bind_passed_arguments(original, *args, **kwargs).arguments)
    t, boundaries, table = (arguments.pop(name) for name in ("t", "cu_seqlens", "freqs"))
    group = arguments.pop("cp_group", None) or parallel_state.get_context_parallel_group()
    position, begin = packed_sequences.compute_positions_and_starts(boundaries, t.shape[0], group)
    knows_whole_packs = can_take_keyword(rope_utils._get_thd_freqs_on_this_cp_rank, "offset")
    if knows_whole_packs and table.shape[0] == t.shape[0] * group.size():
        position = position + begin
    angles = table.index_select(0, position)
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **arguments)
    return rotated.squeeze(1)


def keep_pad_between_seqs(original: Function) -> Function:
    """Return TEDotProductAttention's `__init__` for packs that say whether padding lies between sequences.

    It does so as 0.19 does. Transformer Engine finds the padding by itself where the pack says None.
    """
    if not hasattr(PackedSeqParams, "pad_between_seqs"):
        PackedSeqParams.pad_between_seqs = None

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.kept_packed_seq_params.add("pad_between_seqs")

    return __init__


@make_wrapper
def enter_mrope_full_table_context(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `GPTModel.forward` in which `keep_full_rotary_table` leaves tables of packed positions whole."""
    pack = bind_passed_arguments(original, self, *args, **kwargs).arguments.get("packed_seq_params")
    is_multimodal_pack = (
        pack is not None and pack.qkv_format == "thd" and self.position_embedding_type == "mrope"
    )
    with keeps_full_tables.set(is_multimodal_pack):
        return original(self, *args, **kwargs)


@make_wrapper
def apply_packed_mrope(
    original: Function, t: torch.Tensor, freqs: torch.Tensor, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return `apply_rotary_pos_emb`, as attention sees it, for packs of multimodal positions.

    The table [t of all ranks, 1, 1, d] has a row for each token of the pack, and not for each place in a
    sequence. This rank's rows are taken and applied to t [t of this rank, n, d] as those of one sequence.
    """
    boundaries = kwargs.pop("cu_seqlens", None)
    if boundaries is None or config.mrope_section is None:
        return original(t, freqs, config, *args, cu_seqlens=boundaries, **kwargs)
    group = kwargs.get("cp_group") or parallel_state.get_context_parallel_group()
    position, begin = packed_sequences.compute_positions_and_starts(boundaries, t.shape[0], group)
    angles = freqs.index_select(0, begin + position)
    return original(t.unsqueeze(1), angles, config, *args, cu_seqlens=None, **kwargs).squeeze(1)
