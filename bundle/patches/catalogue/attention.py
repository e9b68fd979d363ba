"""Attention over tensor-parallel ranks."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_CORE = "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__"
_HEADS = "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
_CROSS = "megatron.core.transformer.attention:CrossAttention.__init__"
_SELF = "megatron.core.transformer.attention:SelfAttention.__init__"


def _sinks_unmarked(source: "Evidence") -> Presence:
    """Whether the learned sinks are a parameter that nothing marks as one rank's share."""
    core = source[_CORE]
    if core is None:
        return Presence.UNKNOWN
    if not any(isinstance(n, ast.Constant) and n.value == "softmax_offset" for n in core.walk()):
        return Presence.UNKNOWN if "softmax_offset" in core.names else Presence.ABSENT
    marks = (*core.calls("set_tensor_model_parallel_attributes"), *core.calls("setattr"))
    if any("softmax_offset" in ast.unparse(call) for call in marks):
        return Presence.ABSENT
    made = core.assigned("self.softmax_offset")
    known = all(
        value == "None" or value.startswith(("torch.zeros(", "config.init_method(")) for value in made
    )
    return Presence.PRESENT if known and "tensor_model_parallel" not in core.names else Presence.UNKNOWN


def _gate_of_the_group(source: "Evidence") -> Presence:
    """Whether the query is cut to this rank's heads and the gate beside it is not."""
    heads = source[_HEADS]
    if heads is None:
        return Presence.UNKNOWN
    if "output_gate" not in heads.parameters:
        return Presence.ABSENT
    if not any("rank" in name for name in heads.names):
        return Presence.ABSENT  # no group of heads can be shared yet
    cut = {name for name in ("query", "gate") if heads.has(f"{name} = {name}[:, :, _:_, :]")}
    if "query" not in cut or not heads.has("return (query, key, value, gate)"):
        return Presence.UNKNOWN
    return Presence.of("gate" not in cut)


def _ranks_of_the_layout(source: "Evidence") -> Presence:
    """Whether the layer is told its ranks and tells its projections none."""
    cross, own = source[_CROSS], source[_SELF]
    if cross is None or own is None:
        return Presence.UNKNOWN
    if not cross.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are none but the layout's
    if not any(keyword.arg == "tp_group" for keyword in own.walk() if isinstance(keyword, ast.keyword)):
        return Presence.ABSENT  # nor does a projection take any yet
    built = [
        node.value
        for node in cross.walk()
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) in ("self.linear_q", "self.linear_kv")
        and isinstance(node.value, ast.Call)
    ]
    told = [any(keyword.arg == "tp_group" for keyword in call.keywords) for call in built]
    if len(built) != 2 or any(told) != all(told):
        return Presence.UNKNOWN
    return Presence.of(not all(told))


PATCHES = (
    Patch(
        id="attention-sinks-norm",
        replacements=(Replacement(_CORE, "bundle.wrappers.attention:count_every_sink", by_signature=True),),
        why=(
            "The gradient norm is too small, clipping too weak: learned attention sinks, one for each head, "
            "are not marked as split, and only those of the first tensor-parallel rank are counted."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 8), #7530 (open)",
        range=">=0.15",
        when=frozenset({"attention-sinks", "tp"}),
        assumes=NOTHING,
        evidence=(_CORE,),
        defect=_sinks_unmarked,
    ),
    Patch(
        id="output-gate-of-shared-groups",
        replacements=(Replacement(_HEADS, "bundle.wrappers.attention:gate_of_own_heads", by_signature=True),),
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
        evidence=(_HEADS,),
        defect=_gate_of_the_group,
    ),
    Patch(
        id="cross-attention-groups",
        replacements=(Replacement(_CROSS, "bundle.wrappers.attention:over_given_ranks", by_signature=True),),
        why=(
            "Cross attention that is given its process groups shares out its heads over them, but its "
            "projections over those of the layout."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 6), #7190 (open)",
        range=">=0.13",
        when=frozenset({"cross-attention", "explicit-groups", "tp"}),
        assumes="what builds the projections takes a tp_group, as megatron's layers do",
        evidence=(_CROSS, _SELF),
        defect=_ranks_of_the_layout,
    ),
)
