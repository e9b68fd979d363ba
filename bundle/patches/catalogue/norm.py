"""Which weights a rank counts in the gradient norm."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_TE = "megatron.core.extensions.transformer_engine"
_LINEAR = f"{_TE}:TELinear.__init__"
_GROUPED_LINEAR = f"{_TE}:TEGroupedLinear.__init__"
_EXPERT_ATTRIBUTES = f"{_TE}:_set_expert_parameter_attributes"


def _whole_weights_stay_marked(source: "Evidence") -> Presence:
    """Whether duplicated weights keep the mark that Transformer Engine gives to every weight."""
    linear = source[_LINEAR]
    if linear is None or "sequence_parallel" not in _set_by_name(linear):
        return Presence.UNKNOWN
    if linear.has('setattr(param, "tensor_model_parallel", False)'):
        return Presence.ABSENT
    return Presence.UNKNOWN if _mentions_mark(linear) else Presence.PRESENT


def _expert_weights_unmarked(source: "Evidence") -> Presence:
    """Whether the grouped layer says where its weights are reduced, but not that they are split."""
    grouped, attributes = source[_GROUPED_LINEAR], source[_EXPERT_ATTRIBUTES]
    if grouped is None:
        return Presence.UNKNOWN
    if attributes is not None and grouped.calls("_set_expert_parameter_attributes"):
        marks = attributes.has("param.tensor_model_parallel = is_partitioned")
        return Presence.ABSENT if marks else Presence.UNKNOWN
    if "allreduce" not in _set_by_name(grouped) or _mentions_mark(grouped):
        return Presence.UNKNOWN
    return Presence.PRESENT


def _mentions_mark(code: "Definition") -> bool:
    return "tensor_model_parallel" in code.names | _set_by_name(code)


def _set_by_name(code: "Definition") -> set[object]:
    """The attributes that the code gives to something by `setattr`."""
    names = (call.args[1] for call in code.calls("setattr") if len(call.args) == 3)
    return {name.value for name in names if isinstance(name, ast.Constant)}


PATCHES = (
    Patch(
        id="cuda-norm-of-whole-weights",
        replacements=(
            Replacement(_LINEAR, "bundle.wrappers.gradients:count_whole_weights_once", by_signature=True),
        ),
        why=(
            "The gradient norm is too large, clipping too strong: the down projections of latent attention, "
            "whole on every tensor-parallel rank, keep Transformer Engine's mark of a split weight and are "
            "counted on each."
        ),
        silent=True,
        upstream="fixed upstream in 0.17; found by comparing TP2 with one H200 (norm off by 2e-2)",
        range="<0.17",
        fixed_in="0.17.0",
        backends=("cuda",),
        when=frozenset({"mla", "tp"}),
        assumes=NOTHING,
        evidence=(_LINEAR,),
        defect=_whole_weights_stay_marked,
    ),
    Patch(
        id="cuda-norm-of-expert-weights",
        replacements=(
            Replacement(_GROUPED_LINEAR, "bundle.wrappers.gradients:count_expert_weights", by_signature=True),
        ),
        why=(
            "The gradient norm is too small, clipping too weak: from Transformer Engine 2.13 on the weights "
            "of grouped experts are not marked as split, and only those of the first tensor-parallel rank "
            "are counted."
        ),
        silent=True,
        upstream="fixed upstream in 0.19; found by comparing TP2 ETP1 EP2 with one H200 (norm off by 3e-2)",
        range="<0.19",
        fixed_in="0.19.0",
        backends=("cuda",),
        when=frozenset({"moe", "tp"}),
        assumes=NOTHING,
        requires=(("transformer-engine", ">=2.13"),),
        evidence=(_GROUPED_LINEAR, _EXPERT_ATTRIBUTES),
        defect=_expert_weights_unmarked,
    ),
)
