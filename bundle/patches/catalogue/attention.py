"""Attention over ranks and of packs, rotary positions, and the embeddings of multimodal models.

The gated delta net, the linear attention of Qwen3-Next and Qwen3.5, is here too.
"""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import (
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    build_signature_replacement,
    detect_in_definitions,
)

_DOT_PRODUCT_ATTENTION_INIT = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
_QUERY_KEY_VALUE_TARGET = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
_CROSS_ATTENTION_INIT = "megatron.core.transformer.attention:CrossAttention.__init__"
_SELF_ATTENTION_INIT = "megatron.core.transformer.attention:SelfAttention.__init__"
_GATED_DELTA_NET_INIT = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__"
_GATED_DELTA_NET_FORWARD = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward"
_NON_TP_GRAD_ALLREDUCE_TARGET = (
    "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
)
_PACKED_ROTARY_TARGET = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
_TE_DOT_PRODUCT_ATTENTION_INIT = "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__"
_PACKED_SEQ_PARAMS = "megatron.core.packed_seq_params:PackedSeqParams"
_APPLY_ROTARY = "megatron.core.transformer.attention:apply_rotary_pos_emb"
_GPT_MODEL_FORWARD = "megatron.core.models.gpt.gpt_model:GPTModel.forward"
_ROTARY_EMBEDDING_MODULE = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_MULTIMODAL_ROTARY_FORWARD = f"{_ROTARY_EMBEDDING_MODULE}:MultimodalRotaryEmbedding.forward"
_LLAVA_MODEL_CLASS = "megatron.core.models.multimodal.llava_model:LLaVAModel"
_LLAVA_EMBEDDING_SHARDING_TARGET = f"{_LLAVA_MODEL_CLASS}._process_embedding_token_parallel"
_LLAVA_INIT = f"{_LLAVA_MODEL_CLASS}.__init__"
_PACKING_PARAMETER_NAMES = {"packed_seq", "packed_seq_params"}
_CP_CONDITION_EXPRESSIONS = {  # by whom, in each release
    "parallel_state.get_context_parallel_world_size() > 1",
    "self.cp_group is not None and self.cp_group.size() > 1",
    "cp_group is not None and cp_group.size() > 1",
}


@detect_in_definitions(_DOT_PRODUCT_ATTENTION_INIT)
def _leaves_sinks_unmarked(core: Definition) -> Presence:
    """Return whether the learned sinks are a parameter that nothing marks as split over ranks."""
    if not core.has_string("softmax_offset"):
        return Presence.from_matches(absent="softmax_offset" not in core.identifiers)
    marks = (*core.find_calls("set_tensor_model_parallel_attributes"), *core.find_calls("setattr"))
    if any("softmax_offset" in ast.unparse(call) for call in marks):
        return Presence.ABSENT
    values = core.find_assigned_values("self.softmax_offset")
    known = all(
        value == "None" or value.startswith(("torch.zeros(", "config.init_method(")) for value in values
    )
    return Presence.from_matches(known and "tensor_model_parallel" not in core.identifiers)


@detect_in_definitions(_QUERY_KEY_VALUE_TARGET)
def _detect_unsliced_output_gate(heads: Definition) -> Presence:
    """Return whether the query is cut to this rank's heads, and its output gate is not."""
    if "output_gate" not in heads.parameters:
        return Presence.ABSENT
    if not any("rank" in name for name in heads.identifiers):
        return Presence.ABSENT  # no group of heads can be shared yet
    cut = {name for name in ("query", "gate") if heads.has_pattern(f"{name} = {name}[:, :, _:_, :]")}
    if "query" not in cut or not heads.has_pattern("return (query, key, value, gate)"):
        return Presence.UNKNOWN
    return Presence.from_bool("gate" not in cut)


@detect_in_definitions(_CROSS_ATTENTION_INIT, _SELF_ATTENTION_INIT)
def _drops_process_group(cross: Definition, self_attention: Definition) -> Presence:
    """Return whether the layer gets a process group and does not pass it to its projections."""
    if not cross.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are none but the layout's
    if not any(keyword.arg == "tp_group" for keyword in self_attention.iter_nodes(ast.keyword)):
        return Presence.ABSENT  # nor does a projection take any yet
    built = [
        node.value
        for node in cross.iter_nodes(ast.Assign)
        if ast.unparse(node.targets[0]) in ("self.linear_q", "self.linear_kv")
        and isinstance(node.value, ast.Call)
    ]
    passes_group = [any(keyword.arg == "tp_group" for keyword in call.keywords) for call in built]
    if len(built) != 2 or any(passes_group) != all(passes_group):
        return Presence.UNKNOWN
    return Presence.from_bool(not all(passes_group))


@detect_in_definitions(
    _GATED_DELTA_NET_INIT, _NON_TP_GRAD_ALLREDUCE_TARGET, required_module=_GATED_DELTA_NET_INIT
)
def _detect_unsummed_delta_norm_gradient(init: Definition, sums: Definition) -> Presence:
    """Return whether ranks sum the output norm's gradient only under sequence parallelism."""
    mentions = [node for node in init.iter_nodes(ast.Attribute) if node.attr == "out_norm"]
    built = init.has_pattern(
        "self.out_norm = build_module(submodules.out_norm, config=_, hidden_size=_, eps=_)"
    )
    by_sequence = sums.has_pattern("config.sequence_parallel and getattr(param, 'sequence_parallel', False)")
    by_name = any("out_norm" in str(constant.value) for constant in sums.iter_nodes(ast.Constant))
    # two mentions: the attribute, and the spec's
    return Presence.from_matches(built and len(mentions) == 2 and by_sequence and not by_name)


@detect_in_definitions(_GATED_DELTA_NET_FORWARD, required_module=_GATED_DELTA_NET_FORWARD)
def _detect_delta_net_pack_refusal(forward: Definition) -> Presence:
    refused = forward.has_pattern("if packed_seq_params is not None:\n    raise NotImplementedError(...)")
    return Presence.from_matches(refused, "cu_seqlens_q" in forward.identifiers)


@detect_in_definitions(_PACKED_ROTARY_TARGET)
def _reads_lengths_back(packed: Definition) -> Presence:
    """Return whether the sequence lengths become Python numbers, by which the rows are cut."""
    lengths = {"tolist", "split"} & packed.identifiers
    return Presence.from_matches(
        packed.find_calls("tolist") and packed.find_calls("split"),
        absent=packed.find_calls("searchsorted") and not lengths,
    )


@detect_in_definitions(_TE_DOT_PRODUCT_ATTENTION_INIT, _PACKED_SEQ_PARAMS)
def _lacks_padding_flag(init: Definition, packed: Definition) -> Presence:
    """Return whether all fields of a pack are passed on, and no field says whether the pack has padding."""
    fields = {ast.unparse(node.target) for node in packed.iter_nodes(ast.AnnAssign)}
    if "kept_packed_seq_params" not in init.identifiers or "cu_seqlens_q_padded" not in fields:
        return Presence.UNKNOWN
    return Presence.from_bool("pad_between_seqs" not in fields)


@detect_in_definitions(_MULTIMODAL_ROTARY_FORWARD)
def _detect_mrope_pack_cp_sharding(positions: Definition) -> Presence:
    """Return whether a table is cut for context parallelism without a check whether it is a pack's."""
    if not positions.find_calls("get_pos_emb_on_this_cp_rank"):
        return Presence.UNKNOWN
    branches = (
        node for node in positions.iter_nodes(ast.If) if "get_pos_emb_on_this_cp_rank(" in ast.unparse(node)
    )
    tests = {ast.unparse(branch.test) for branch in branches}
    is_checked = any(
        f"not {name}" in test for name in positions.parameters & _PACKING_PARAMETER_NAMES for test in tests
    )
    return Presence.from_matches(tests and tests <= _CP_CONDITION_EXPRESSIONS, absent=is_checked)


@detect_in_definitions(
    _LLAVA_EMBEDDING_SHARDING_TARGET, _LLAVA_INIT, required_module=_LLAVA_EMBEDDING_SHARDING_TARGET
)
def _detect_llava_global_group_scatter(shared: Definition, init: Definition) -> Presence:
    """Return whether the embeddings are scattered over the layout's ranks, whatever groups the model has."""
    if not init.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are no ranks but the layout's
    calls = shared.find_calls("scatter_to_sequence_parallel_region")
    if not calls:
        return Presence.UNKNOWN
    return Presence.from_bool(any(len(call.args) + len(call.keywords) == 1 for call in calls))


PATCHES = (
    Patch(
        id="attention-sinks-norm",
        replacements=(
            build_signature_replacement(_DOT_PRODUCT_ATTENTION_INIT, "attention:mark_sinks_as_split"),
        ),
        why=(
            "The gradient norm is too small, so clipping is too weak. Learned attention sinks, one for each "
            "head, are not marked as split. Only those of the first tensor-parallel rank are counted."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 8), #7530 (open)",
        range=">=0.15",
        when=frozenset({"attention-sinks", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_leaves_sinks_unmarked,
    ),
    Patch(
        id="output-gate-of-shared-groups",
        replacements=(build_signature_replacement(_QUERY_KEY_VALUE_TARGET, "attention:select_gate_heads"),),
        why=(
            "Attention with an output gate (Qwen3-Next, Qwen3.5) fails if tensor-parallel ranks share a "
            "group of heads. The query is cut to the heads of the rank, but the gate keeps the heads of "
            "the whole group."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#3528, fixed by #3575 in 0.17; slime#2221, radixark/miles#972",
        range=">=0.16,<0.17",
        when=frozenset({"output-gate", "gqa", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_unsliced_output_gate,
    ),
    Patch(
        id="cross-attention-groups",
        replacements=(
            build_signature_replacement(_CROSS_ATTENTION_INIT, "attention:pass_group_to_cross_attention"),
        ),
        why=(
            "Cross attention with explicit process groups divides its heads between these groups, but its"
            " projections between the groups of the layout."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 6), #7190 (open)",
        range=">=0.13",
        when=frozenset({"cross-attention", "explicit-groups", "tp"}),
        assumes="the builder of the projections takes a tp_group, as megatron's layers do",
        defect=_drops_process_group,
    ),
    Patch(
        id="gated-delta-norm-gradient",
        replacements=(
            build_signature_replacement(_GATED_DELTA_NET_INIT, "attention:hook_delta_net_norm_gradient"),
        ),
        why=(
            "Tensor-parallel ranks get different copies of one weight: the output norm of a gated delta "
            "net, which all heads share. Without sequence parallelism, each rank updates its copy with the "
            "gradient of its own heads only."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 11)",
        range=">=0.16",
        when=frozenset({"gated-delta-net", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_unsummed_delta_norm_gradient,
    ),
    Patch(
        id="packed-rotary-host-reads",
        replacements=(Replacement(_PACKED_ROTARY_TARGET, "attention:rotate_packed_by_gather"),),
        why=(
            "If no fused kernel computes rotary positions (some latent attention), every layer "
            "copies the lengths of packed sequences to the host, twice. The layer then computes one "
            "sequence after the other. With many short sequences the GPU waits for the host."
        ),
        kind=DefectKind.SLOW,
        upstream="not reported; seen in a profile of one H200 (40 waits in a step of ten attention layers)",
        range="",
        when=frozenset({"packed"}),
        assumes="the boundaries cover every row of the pack",
        defect=_reads_lengths_back,
    ),
    Patch(
        id="cuda-attention-host-reads",
        replacements=(
            build_signature_replacement(_TE_DOT_PRODUCT_ATTENTION_INIT, "attention:keep_pad_between_seqs"),
        ),
        why=(
            "In every layer, Transformer Engine compares the boundaries of packed sequences with the "
            "padded ones on the GPU. The host waits for the result, although it knows it already."
        ),
        kind=DefectKind.SLOW,
        upstream="fixed upstream in 0.19; seen in a profile of one H200 (20 waits in a step of ten layers)",
        range="<0.19",
        backends=("cuda",),
        when=frozenset({"packed"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_lacks_padding_flag,
    ),
    Patch(
        id="mrope-packed",
        replacements=(
            build_signature_replacement(_GPT_MODEL_FORWARD, "attention:enter_mrope_full_table_context"),
            build_signature_replacement(
                f"{_ROTARY_EMBEDDING_MODULE}:get_pos_emb_on_this_cp_rank", "mla:keep_full_rotary_table"
            ),
            build_signature_replacement(_APPLY_ROTARY, "attention:apply_packed_mrope"),
        ),
        why=(
            "Packed sequences get wrong multimodal rotary positions (mrope). With context parallelism, the "
            "table of rotary angles is split over the ranks as if the pack were one sequence. Before 0.15, "
            "even without context parallelism, each sequence gets the first rows of the table instead of "
            "its own rows."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#1612, NVIDIA-NeMo/Megatron-Bridge#1776; slime and miles carry a change",
        range="",
        when=frozenset({"mrope", "packed"}),
        assumes=(
            "on every rank, position ids [3, 1, t] are those of the whole padded pack. The model has"
            " megatron's own attention, which selects each rank's rows of their table"
        ),
        defect=_detect_mrope_pack_cp_sharding,
    ),
)
TRAPS = (
    Trap(
        id="gated-delta-net-packed",
        range=">=0.16,<0.18",
        defect=_detect_delta_net_pack_refusal,
        when=frozenset({"gated-delta-net", "packed"}),
        why="The gated delta net (Qwen3-Next, Qwen3.5) refuses packed sequences.",
        cause="GatedDeltaNet.forward raises NotImplementedError for any packed_seq_params; #2645 in 0.18.0",
        kind=DefectKind.ERROR,
        instead="Set data.packed to false, or use megatron-core 0.18 or later.",
    ),
    Trap(
        id="llava-groups",
        range=">=0.14",
        defect=_detect_llava_global_group_scatter,
        when=frozenset({"llava", "explicit-groups", "tp", "sp"}),
        why="LLaVA gives ranks the embeddings of others: it divides them between the layout's ranks.",
        cause="scatter_to_sequence_parallel_region is given no group; #7452 (finding 7)",
        kind=DefectKind.SILENT,
        instead="Use the groups of the layout.",
        unshown="read only: needs megatron's LLaVAModel with a vision model",
    ),
)
