"""Attention over ranks and of packs, its rotary positions, and what multimodal models put before it.

With the gated delta net, the linear attention of Qwen3-Next and Qwen3.5.
"""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import NOTHING, DefectKind, Patch, Presence, Replacement, Trap, called, reads

_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
_HEADS = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
_CROSS = "megatron.core.transformer.attention:CrossAttention.__init__"
_SELF = "megatron.core.transformer.attention:SelfAttention.__init__"
_DELTA = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__"
_DELTA_FORWARD = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward"
_SUMS = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"
_ROTARY_OF_PACKS = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
_TE_ATTENTION = "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__"
_PACKS = "megatron.core.packed_seq_params:PackedSeqParams"
_APPLY = "megatron.core.transformer.attention:apply_rotary_pos_emb"
_GPT = "megatron.core.models.gpt.gpt_model:GPTModel.forward"
_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding"
_POSITIONS = f"{_ROTARY}:MultimodalRotaryEmbedding.forward"
_LLAVA = "megatron.core.models.multimodal.llava_model:LLaVAModel"
_LLAVA_EMBEDDINGS = f"{_LLAVA}._process_embedding_token_parallel"
_LLAVA_INIT = f"{_LLAVA}.__init__"
_PACKED = {"packed_seq", "packed_seq_params"}
_SHARED_OUT = {  # by whom, in each release
    "parallel_state.get_context_parallel_world_size() > 1",
    "self.cp_group is not None and self.cp_group.size() > 1",
    "cp_group is not None and cp_group.size() > 1",
}


@reads(_CORE)
def _sinks_unmarked(core: Definition) -> Presence:
    """Whether the learned sinks are a parameter that nothing marks as one rank's share."""
    if not core.says("softmax_offset"):
        return Presence.told(absent="softmax_offset" not in core.names)
    marks = (*core.calls("set_tensor_model_parallel_attributes"), *core.calls("setattr"))
    if any("softmax_offset" in ast.unparse(call) for call in marks):
        return Presence.ABSENT
    made = core.assigned("self.softmax_offset")
    known = all(
        value == "None" or value.startswith(("torch.zeros(", "config.init_method(")) for value in made
    )
    return Presence.told(known and "tensor_model_parallel" not in core.names)


@reads(_HEADS)
def _gate_of_the_group(heads: Definition) -> Presence:
    """Whether the query is cut to this rank's heads and the gate beside it is not."""
    if "output_gate" not in heads.parameters:
        return Presence.ABSENT
    if not any("rank" in name for name in heads.names):
        return Presence.ABSENT  # no group of heads can be shared yet
    cut = {name for name in ("query", "gate") if heads.has(f"{name} = {name}[:, :, _:_, :]")}
    if "query" not in cut or not heads.has("return (query, key, value, gate)"):
        return Presence.UNKNOWN
    return Presence.of("gate" not in cut)


@reads(_CROSS, _SELF)
def _ranks_of_the_layout(cross: Definition, own: Definition) -> Presence:
    """Whether the layer is told its ranks and tells its projections none."""
    if not cross.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are none but the layout's
    if not any(keyword.arg == "tp_group" for keyword in own.each(ast.keyword)):
        return Presence.ABSENT  # nor does a projection take any yet
    built = [
        node.value
        for node in cross.each(ast.Assign)
        if ast.unparse(node.targets[0]) in ("self.linear_q", "self.linear_kv")
        and isinstance(node.value, ast.Call)
    ]
    told = [any(keyword.arg == "tp_group" for keyword in call.keywords) for call in built]
    if len(built) != 2 or any(told) != all(told):
        return Presence.UNKNOWN
    return Presence.of(not all(told))


@reads(_DELTA, _SUMS, where=_DELTA)
def _summed_by_sequence_alone(init: Definition, sums: Definition) -> Presence:
    """Whether the norm behind the heads is summed over the ranks only if they share out the sequence."""
    mentions = [node for node in init.each(ast.Attribute) if node.attr == "out_norm"]
    built = init.has("self.out_norm = build_module(submodules.out_norm, config=_, hidden_size=_, eps=_)")
    by_sequence = sums.has("config.sequence_parallel and getattr(param, 'sequence_parallel', False)")
    by_name = any("out_norm" in str(constant.value) for constant in sums.each(ast.Constant))
    # two mentions: the attribute, and the spec's
    return Presence.told(built and len(mentions) == 2 and by_sequence and not by_name)


@reads(_DELTA_FORWARD, where=_DELTA_FORWARD)
def _packs_refused_by_gated_delta(forward: Definition) -> Presence:
    refused = forward.has("if packed_seq_params is not None:\n    raise NotImplementedError(...)")
    return Presence.told(refused, "cu_seqlens_q" in forward.names)


@reads(_ROTARY_OF_PACKS)
def _reads_lengths_back(packed: Definition) -> Presence:
    """Whether the lengths of the sequences are made plain numbers, to cut the rows by them."""
    lengths = {"tolist", "split"} & packed.names
    return Presence.told(
        packed.calls("tolist") and packed.calls("split"),
        absent=packed.calls("searchsorted") and not lengths,
    )


@reads(_TE_ATTENTION, _PACKS)
def _packs_cannot_say(init: Definition, packed: Definition) -> Presence:
    """Whether all fields of a pack are handed on, of which none says whether it is padded."""
    fields = {ast.unparse(node.target) for node in packed.each(ast.AnnAssign)}
    if "kept_packed_seq_params" not in init.names or "cu_seqlens_q_padded" not in fields:
        return Presence.UNKNOWN
    return Presence.of("pad_between_seqs" not in fields)


@reads(_POSITIONS)
def _packs_are_cut(positions: Definition) -> Presence:
    """Whether a table is cut for context parallel without a question whether it is of a pack."""
    if not positions.calls("get_pos_emb_on_this_cp_rank"):
        return Presence.UNKNOWN
    branches = (
        node for node in positions.each(ast.If) if "get_pos_emb_on_this_cp_rank(" in ast.unparse(node)
    )
    tests = {ast.unparse(branch.test) for branch in branches}
    asked = any(f"not {name}" in test for name in positions.parameters & _PACKED for test in tests)
    return Presence.told(tests and tests <= _SHARED_OUT, absent=asked)


@reads(_LLAVA_EMBEDDINGS, _LLAVA_INIT, where=_LLAVA_EMBEDDINGS)
def _images_over_the_layout(shared: Definition, init: Definition) -> Presence:
    """Whether the embeddings of text and images are shared out over the ranks of the layout."""
    if not init.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are no ranks but the layout's
    calls = shared.calls("scatter_to_sequence_parallel_region")
    if not calls:
        return Presence.UNKNOWN
    return Presence.of(any(len(call.args) + len(call.keywords) == 1 for call in calls))


PATCHES = (
    Patch(
        id="attention-sinks-norm",
        replacements=(called(_CORE, "attention:count_every_sink"),),
        why=(
            "The gradient norm is too small, clipping too weak: learned attention sinks, one for each head, "
            "are not marked as split, and only those of the first tensor-parallel rank are counted."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 8), #7530 (open)",
        range=">=0.15",
        when=frozenset({"attention-sinks", "tp"}),
        assumes=NOTHING,
        defect=_sinks_unmarked,
    ),
    Patch(
        id="output-gate-of-shared-groups",
        replacements=(called(_HEADS, "attention:gate_of_own_heads"),),
        why=(
            "Attention with an output gate (Qwen3-Next, Qwen3.5) fails where tensor-parallel ranks share a "
            "group of heads: the query is cut to a rank's heads, the gate is not."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#3528, fixed by #3575 in 0.17; slime#2221, radixark/miles#972",
        range=">=0.16,<0.17",
        when=frozenset({"output-gate", "gqa", "tp"}),
        assumes=NOTHING,
        defect=_gate_of_the_group,
    ),
    Patch(
        id="cross-attention-groups",
        replacements=(called(_CROSS, "attention:over_given_ranks"),),
        why=(
            "Cross attention that is given its process groups shares out its heads over them, but its "
            "projections over those of the layout."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 6), #7190 (open)",
        range=">=0.13",
        when=frozenset({"cross-attention", "explicit-groups", "tp"}),
        assumes="what builds the projections takes a tp_group, as megatron's layers do",
        defect=_ranks_of_the_layout,
    ),
    Patch(
        id="gated-delta-norm-gradient",
        replacements=(called(_DELTA, "attention:sum_output_norm"),),
        why=(
            "Copies of one weight drift apart: under tensor without sequence parallelism the gradient of the "
            "gated delta net's output norm, which all heads share, is that of each rank's own heads."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 11)",
        range=">=0.16",
        when=frozenset({"gated-delta-net", "tp"}),
        assumes=NOTHING,
        defect=_summed_by_sequence_alone,
    ),
    Patch(
        id="packed-rotary-host-reads",
        replacements=(Replacement(_ROTARY_OF_PACKS, "attention:packed_by_one_gather"),),
        why=(
            "Where rotary positions are not one kernel (latent attention without YaRN), every layer reads "
            "the lengths of packed sequences back from the device, twice, and handles them one by one: the "
            "host waits, and falls behind with many short sequences."
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
        replacements=(called(_TE_ATTENTION, "attention:say_whether_padded"),),
        why=(
            "In every layer Transformer Engine compares the boundaries of packed sequences with the padded "
            "ones on the device, and the host waits for the answer, which it knows."
        ),
        kind=DefectKind.SLOW,
        upstream="fixed upstream in 0.19; seen in a profile of one H200 (20 waits in a step of ten layers)",
        range="<0.19",
        backends=("cuda",),
        when=frozenset({"packed"}),
        assumes=NOTHING,
        defect=_packs_cannot_say,
    ),
    Patch(
        id="mrope-packed",
        replacements=(
            called(_GPT, "attention:packed_positions"),
            called(f"{_ROTARY}:get_pos_emb_on_this_cp_rank", "mla:whole_table"),
            called(_APPLY, "attention:rows_of_the_pack"),
        ),
        why=(
            "Packs with multimodal positions (mrope) get wrong ones: under context parallel their table is "
            "cut as if the pack were one sequence, and to 0.15 each sequence takes the first rows of it."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#1612, NVIDIA-NeMo/Megatron-Bridge#1776; slime and miles carry a change",
        range="",
        when=frozenset({"mrope", "packed"}),
        assumes=(
            "position ids [3, 1, t] are those of the whole pack, padding included, on every rank; and the "
            "model's attention is megatron's own, which takes each rank's rows of their table"
        ),
        defect=_packs_are_cut,
    ),
)
TRAPS = (
    Trap(
        id="gated-delta-net-packed",
        range=">=0.16,<0.18",
        defect=_packs_refused_by_gated_delta,
        when=frozenset({"gated-delta-net", "packed"}),
        why="The gated delta net (Qwen3-Next, Qwen3.5) refuses packed sequences.",
        cause="GatedDeltaNet.forward raises NotImplementedError for any packed_seq_params; #2645 in 0.18.0",
        kind=DefectKind.ERROR,
        instead="Set data.packed to false, or use megatron-core 0.18 or later.",
    ),
    Trap(
        id="llava-groups",
        range=">=0.14",
        defect=_images_over_the_layout,
        when=frozenset({"llava", "explicit-groups", "tp", "sp"}),
        why="LLaVA gives ranks the embeddings of others: they are shared out over the layout's ranks.",
        cause="scatter_to_sequence_parallel_region is given no group; #7452 (finding 7)",
        kind=DefectKind.SILENT,
        instead="Take the groups of the layout.",
        unshown="read only: needs megatron's LLaVAModel with a vision model",
    ),
)
