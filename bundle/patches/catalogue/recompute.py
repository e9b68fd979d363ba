"""Activation recomputation."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_LAYER = "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"
_FORWARD = f"{_LAYER}.forward"
_CHECKPOINTED = f"{_LAYER}._checkpointed_forward"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"


def _saves_objects(source: "Evidence") -> Presence:
    """Whether every argument goes to save_for_backward while packed sequences are let in."""
    forward, checkpointed = source[_FORWARD], source[_CHECKPOINTED]
    if forward is None:
        return Presence.UNKNOWN
    if forward.has("assert packed_seq_params is None, _"):
        return Presence.ABSENT
    if checkpointed is None:
        recomputes = any("checkpoint" in name for name in forward.names)
        return Presence.UNKNOWN if recomputes else Presence.ABSENT
    if checkpointed.has("tensor_parallel.checkpoint(forward_func, _, *args, *kwargs.values())"):
        return Presence.PRESENT
    calls = [call for call in checkpointed.calls("checkpoint") if call.args]
    passed = {ast.unparse(arg) for call in calls for arg in call.args[2:]}
    named = "packed_seq_params" in checkpointed.parameters - passed and not any("*" in arg for arg in passed)
    told_apart = "is_tensor" in checkpointed.names and not passed & {"*args", "*kwargs.values()"}
    return Presence.ABSENT if calls and (named or told_apart) else Presence.UNKNOWN


def _padding_mask_unknown(source: "Evidence") -> Presence:
    """Whether the layer passes a padding mask on to a function that has no parameter of that name."""
    forward, checkpointed = source[_FORWARD], source[_CHECKPOINTED]
    if forward is None:
        return Presence.UNKNOWN
    if checkpointed is None:
        return Presence.UNKNOWN if "_checkpointed_forward" in forward.names else Presence.ABSENT
    calls = forward.calls("_checkpointed_forward")
    passed = {keyword.arg for call in calls for keyword in call.keywords}
    if not calls or None in passed:
        return Presence.UNKNOWN
    takes_any = any(isinstance(node, ast.FunctionDef) and node.args.kwarg for node in checkpointed.nodes)
    return Presence.of("padding_mask" in passed - checkpointed.parameters and not takes_any)


def _keeps_probabilities(source: "Evidence") -> Presence:
    """Whether the dispatcher keeps the router's probabilities as they come, with their autograd graph."""
    dispatcher = source[_DISPATCHER]
    if dispatcher is None:
        return Presence.UNKNOWN
    if dispatcher.has("self.probs = probs"):
        return Presence.PRESENT
    return Presence.ABSENT if dispatcher.has("self.probs = probs.detach()") else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="mtp-packed-full-recompute",
        replacements=(Replacement(_CHECKPOINTED, "bundle.wrappers.recompute:keep_objects"),),
        why="Full recomputation of MTP layers fails on packed input: save_for_backward takes tensors only.",
        silent=False,
        upstream="fixed upstream in 0.18 by new code; measured in 0.16 and 0.17",
        range=">=0.16,<0.18",
        fixed_in="0.18.0",
        when=frozenset({"mtp", "packed", "recompute-full"}),
        assumes=NOTHING,
        evidence=(_FORWARD, _CHECKPOINTED),
        defect=_saves_objects,
    ),
    Patch(
        id="mtp-full-recompute",
        replacements=(Replacement(_CHECKPOINTED, "bundle.wrappers.recompute:bind_padding_mask"),),
        why="Full recomputation of MTP layers ends in a TypeError: unexpected keyword 'padding_mask'.",
        silent=False,
        upstream="NVIDIA/Megatron-LM#4933, fixed by #3457 in 0.19",
        range=">=0.18,<0.19",
        fixed_in="0.19.0",
        when=frozenset({"mtp", "recompute-full"}),
        assumes=NOTHING,
        evidence=(_FORWARD, _CHECKPOINTED),
        defect=_padding_mask_unknown,
    ),
    Patch(
        id="recompute-reclaim",
        replacements=(
            Replacement(
                "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
                "bundle.wrappers.recompute:release_graph",
                by_signature=True,
            ),
        ),
        why=(
            "After a recomputation the input of every MoE layer and its gradient stay in memory until the "
            "layer runs again: its token dispatcher keeps probabilities that hold the graph's leaves."
        ),
        silent=False,
        upstream=(
            "NVIDIA/Megatron-LM#3221, verl-project/verl#5251; still so after #5197, which frees locals "
            "(measured at d98e8a64)"
        ),
        range="",
        when=frozenset({"moe", "recompute-full"}),
        opt_in=True,
        assumes=NOTHING,
        evidence=(_DISPATCHER,),
        defect=_keeps_probabilities,
    ),
)
