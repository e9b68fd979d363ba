"""The loss where tensor-parallel ranks share the vocabulary."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.tensor_parallel.cross_entropy"
_CROSS_ENTROPY = f"{_MODULE}:vocab_parallel_cross_entropy"
_FORWARD = f"{_MODULE}:_VocabParallelCrossEntropy.forward"
_LOSS = (
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
)


def _columns_of_one_rank(source: "Evidence") -> Presence:
    """Whether smoothing divides by the columns of `exp_logits`, which are those of one rank."""
    forward = source[_FORWARD]
    if forward is None or "label_smoothing" not in forward.parameters:
        return Presence.UNKNOWN
    sizes = forward.assigned("vocab_size")
    if sizes == {"exp_logits.size(-1)"}:
        return Presence.PRESENT
    return Presence.ABSENT if any("world_size" in size for size in sizes) else Presence.UNKNOWN


def _taken_for_a_share(source: "Evidence") -> Presence:
    """Whether logits go into a loss over shared columns as they come."""
    loss = source[_LOSS]
    if loss is None or "logits" not in loss.parameters:
        return Presence.UNKNOWN
    given = [ast.unparse(call.args[0]) for call in loss.calls("vocab_parallel_cross_entropy") if call.args]
    if given != ["logits"]:
        return Presence.UNKNOWN
    changed = loss.assigned("logits")
    if any("scatter_to_tensor_model_parallel_region(" in value for value in changed):
        return Presence.ABSENT
    return Presence.UNKNOWN if changed else Presence.PRESENT


PATCHES = (
    Patch(
        id="label-smoothing-over-ranks",
        replacements=(
            Replacement(
                _CROSS_ENTROPY, "bundle.wrappers.vocabulary:smoothed_over_all_columns", by_signature=True
            ),
        ),
        why=(
            "Label smoothing over tensor-parallel ranks gives each rank another loss, and a wrong gradient: "
            "the evenly shared part is the mean over the columns of one rank, as if it had all of them."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#737, #7464, #7452 (finding 1), #7466 (open)",
        range="",
        when=frozenset({"tp", "label-smoothing"}),
        assumes=NOTHING,
        evidence=(_FORWARD,),
        defect=_columns_of_one_rank,
    ),
    Patch(
        id="loss-of-gathered-logits",
        replacements=(Replacement(_LOSS, "bundle.wrappers.vocabulary:own_columns", by_signature=True),),
        why=(
            "A model that gathers its logits (parallel_output=False, runtime_gather_output) and is given "
            "labels returns another loss, by log(tp) and more, whose gradient lacks labels on some ranks: "
            "its whole rows are taken for the columns of one rank."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#7452 (finding 2)",
        range="",
        when=frozenset({"tp", "gathered-logits"}),
        assumes="labels are given to the model; logits that it returns without labels stay as they are",
        evidence=(_LOSS,),
        defect=_taken_for_a_share,
    ),
)
