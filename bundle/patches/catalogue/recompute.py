"""Activation recomputation."""

import ast

from bundle.patches.catalogue import mtp, router
from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    build_signature_replacement,
    detect_in_definitions,
    detect_in_source,
)

_MTP_LAYER_CHECKPOINTED_FORWARD = f"{mtp.LAYER}._checkpointed_forward"
_MTP_BLOCK_CHECKPOINTED_FORWARD = (
    f"{mtp.MODULE}:MultiTokenPredictionBlock._checkpointed_forward"  # a time in 2025
)
_MTP_CHECKPOINT_TARGETS = (
    _MTP_LAYER_CHECKPOINTED_FORWARD,
    _MTP_BLOCK_CHECKPOINTED_FORWARD,
    mtp.LAYER,
    mtp.MODEL_FORWARD,
    mtp.ROLL_TENSOR,
)
_GLOBAL_TP_GROUP_EXPRESSION = "parallel_state.get_tensor_model_parallel_group()"


@detect_in_definitions(mtp.LAYER_FORWARD, optional=(_MTP_LAYER_CHECKPOINTED_FORWARD,))
def _saves_objects_for_backward(forward: Definition, checkpointed: Definition | None) -> Presence:
    """Return whether every argument goes to save_for_backward although packed sequences are accepted."""
    if forward.has_pattern("assert packed_seq_params is None, _"):
        return Presence.ABSENT
    if checkpointed is None:
        return Presence.from_matches(absent=not any("checkpoint" in name for name in forward.identifiers))
    saves = checkpointed.has_pattern("tensor_parallel.checkpoint(forward_func, _, *args, *kwargs.values())")
    calls = [call for call in checkpointed.find_calls("checkpoint") if call.args]
    passed = {ast.unparse(arg) for call in calls for arg in call.args[2:]}
    named = "packed_seq_params" in checkpointed.parameters - passed and not any("*" in arg for arg in passed)
    told_apart = "is_tensor" in checkpointed.identifiers and not passed & {"*args", "*kwargs.values()"}
    return Presence.from_matches(saves, absent=calls and (named or told_apart))


@detect_in_definitions(mtp.LAYER_FORWARD, optional=(_MTP_LAYER_CHECKPOINTED_FORWARD,))
def _passes_unaccepted_padding_mask(forward: Definition, checkpointed: Definition | None) -> Presence:
    """Return whether the layer passes a padding mask to a function without a parameter of that name."""
    if checkpointed is None:
        return Presence.from_matches(absent="_checkpointed_forward" not in forward.identifiers)
    calls = forward.find_calls("_checkpointed_forward")
    passed = {keyword.arg for call in calls for keyword in call.keywords}
    if not calls or None in passed:
        return Presence.UNKNOWN
    takes_any = any(isinstance(node, ast.FunctionDef) and node.args.kwarg for node in checkpointed.nodes)
    return Presence.from_bool("padding_mask" in passed - checkpointed.parameters and not takes_any)


@detect_in_definitions(router.ALLTOALL_DISPATCHER_CLASS)
def _detect_attached_probabilities(dispatcher: Definition) -> Presence:
    """Return whether the dispatcher keeps the router's probabilities with their autograd graph."""
    assignment = "self.probs = probs"
    return Presence.from_matches(
        dispatcher.has_pattern(assignment), absent=dispatcher.has_pattern(f"{assignment}.detach()")
    )


def _find_mtp_te_checkpoint_calls(source: EvidenceDefinitions) -> list[ast.Call] | None:
    """Return a prediction layer's calls of Transformer Engine's checkpoint; None where code is unfamiliar."""
    recomputed = source[_MTP_LAYER_CHECKPOINTED_FORWARD] or source[_MTP_BLOCK_CHECKPOINTED_FORWARD]
    if recomputed is None:
        layer = source[mtp.LAYER]
        known = mtp.has_no_mtp_support(source) or (layer and "_checkpointed_forward" not in layer.identifiers)
        return [] if known else None
    calls = list(recomputed.find_calls("te_checkpoint"))
    return calls if calls or "fp8" not in recomputed.identifiers else None


@detect_in_source(*_MTP_CHECKPOINT_TARGETS)
def _passes_tensors_by_keyword(source: EvidenceDefinitions) -> Presence:
    """Return whether tensors are passed by keyword, which a reentrant checkpoint does not see."""
    calls = _find_mtp_te_checkpoint_calls(source)
    if calls is None:
        return Presence.UNKNOWN
    keywords = [keyword.arg for call in calls for keyword in call.keywords]
    return Presence.from_matches(None in keywords, absent=not keywords)


@detect_in_source(*_MTP_CHECKPOINT_TARGETS)
def _uses_global_group(source: EvidenceDefinitions) -> Presence:
    """Return whether random states are those of the layout's group, whatever group the layer has."""
    calls = _find_mtp_te_checkpoint_calls(source)
    if calls is None:
        return Presence.UNKNOWN
    groups = [ast.unparse(call.args[3]) for call in calls if len(call.args) > 3]
    if len(groups) < len(calls):
        return Presence.UNKNOWN
    uses_layer_groups = all(group.startswith(("self.tp_group", "self.pg_collection")) for group in groups)
    return Presence.from_matches(_GLOBAL_TP_GROUP_EXPRESSION in groups, absent=uses_layer_groups)


PATCHES = (
    Patch(
        id="mtp-packed-full-recompute",
        replacements=(Replacement(_MTP_LAYER_CHECKPOINTED_FORWARD, "mtp:bind_non_tensor_arguments"),),
        why="Full recomputation of MTP layers fails on packed input: save_for_backward takes tensors only.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.18 by new code; measured in 0.16 and 0.17",
        range=">=0.16,<0.18",
        when=frozenset({"mtp", "packed", "recompute-full"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_saves_objects_for_backward,
    ),
    Patch(
        id="mtp-full-recompute",
        replacements=(Replacement(_MTP_LAYER_CHECKPOINTED_FORWARD, "mtp:bind_padding_mask"),),
        why="Full recomputation of MTP layers ends in a TypeError: unexpected keyword 'padding_mask'.",
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#4933, fixed by #3457 in 0.19",
        range=">=0.18,<0.19",
        when=frozenset({"mtp", "recompute-full"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_passes_unaccepted_padding_mask,
    ),
    Patch(
        id="recompute-reclaim",
        replacements=(
            build_signature_replacement(
                "megatron.core.transformer.moe.moe_layer:MoELayer.forward", "moe:detach_dispatcher_tensors"
            ),
        ),
        why=(
            "After a recomputation the input of every MoE layer and its gradient stay in memory until the"
            " layer runs again. The layer's token dispatcher keeps probabilities that refer to leaves of"
            " the graph."
        ),
        kind=DefectKind.SLOW,
        upstream=(
            "NVIDIA/Megatron-LM#3221, verl-project/verl#5251; still present after #5197, which frees"
            " locals (measured at d98e8a64)"
        ),
        range="",
        when=frozenset({"moe", "recompute-full"}),
        opt_in=True,
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_attached_probabilities,
    ),
)
TRAPS = (
    Trap(
        id="mtp-recompute-fp8",
        range=">=0.14,<0.18",
        backends=("cuda",),  # elsewhere layers have FP8 of their own, and megatron's checkpoint
        defect=_passes_tensors_by_keyword,
        when=frozenset({"mtp", "recompute-full", "fp8"}),
        why="Prediction layers that are recomputed under FP8 lose gradients.",
        cause=(
            "_checkpointed_forward passes tensors to te_checkpoint by keyword, which te_checkpoint does"
            " not see; #4593, #4765; NVIDIA-NeMo/Megatron-Bridge#3801"
        ),
        kind=DefectKind.SILENT,
        instead="Leave out full recomputation or FP8, or use megatron-core 0.18 or later.",
        unshown="needs Transformer Engine's checkpoint and a device with FP8",
    ),
    Trap(
        id="mtp-recompute-groups",
        range=">=0.14",
        backends=("cuda",),  # elsewhere layers have FP8 of their own, and megatron's checkpoint
        defect=_uses_global_group,
        when=frozenset({"mtp", "recompute-full", "fp8", "explicit-groups", "tp"}),
        why="Prediction layers that are recomputed under FP8 use the layout's ranks, not the given groups.",
        cause="te_checkpoint is given the global group; #7452 (finding 4), #6760, #7403 (open)",
        kind=DefectKind.SILENT,
        instead="Use the groups of the layout, or leave out full recomputation or FP8.",
        unshown="needs Transformer Engine's checkpoint and a device with FP8",
    ),
)
