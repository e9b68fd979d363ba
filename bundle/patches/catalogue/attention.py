"""Attention over tensor-parallel ranks, and the gated delta net, the linear one of Qwen3-Next and Qwen3.5."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import NOTHING, Patch, Presence, Trap, asks, called, reads

_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
_HEADS = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
_CROSS = "megatron.core.transformer.attention:CrossAttention.__init__"
_SELF = "megatron.core.transformer.attention:SelfAttention.__init__"
_DELTA = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__"
_DELTA_FORWARD = "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward"
_SUMS = "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"


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


@asks(_DELTA, _SUMS)
def _summed_by_sequence_alone(source: Evidence) -> Presence:
    """Whether the norm behind the heads is summed over the ranks only if they share out the sequence."""
    if not source.has_module(_DELTA):
        return Presence.ABSENT  # there is no such layer
    init, sums = source[_DELTA], source[_SUMS]
    if init is None or sums is None:
        return Presence.UNKNOWN
    mentions = [node for node in init.each(ast.Attribute) if node.attr == "out_norm"]
    built = init.has("self.out_norm = build_module(submodules.out_norm, config=_, hidden_size=_, eps=_)")
    by_sequence = sums.has("config.sequence_parallel and getattr(param, 'sequence_parallel', False)")
    by_name = any("out_norm" in str(constant.value) for constant in sums.each(ast.Constant))
    # two mentions: the attribute, and the spec's
    return Presence.told(built and len(mentions) == 2 and by_sequence and not by_name)


@asks(_DELTA_FORWARD)
def _packs_refused_by_gated_delta(source: Evidence) -> Presence:
    if not source.has_module(_DELTA_FORWARD):
        return Presence.ABSENT  # there is no such layer
    forward = source[_DELTA_FORWARD]
    if forward is None:
        return Presence.UNKNOWN
    refused = forward.has("if packed_seq_params is not None:\n    raise NotImplementedError(...)")
    return Presence.told(refused, "cu_seqlens_q" in forward.names)


PATCHES = (
    Patch(
        id="attention-sinks-norm",
        replacements=(called(_CORE, "attention:count_every_sink"),),
        why=(
            "The gradient norm is too small, clipping too weak: learned attention sinks, one for each head, "
            "are not marked as split, and only those of the first tensor-parallel rank are counted."
        ),
        silent=True,
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
        silent=False,
        upstream="NVIDIA/Megatron-LM#3528, fixed by #3575 in 0.17; slime#2221, radixark/miles#972",
        range=">=0.16,<0.17",
        fixed_in="0.17.0",
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
        silent=True,
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
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 11)",
        range=">=0.16",
        when=frozenset({"gated-delta-net", "tp"}),
        assumes=NOTHING,
        defect=_summed_by_sequence_alone,
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
        silent=False,
        instead="Set data.packed to false, or use megatron-core 0.18 or later.",
    ),
)
