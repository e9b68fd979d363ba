"""The loss where tensor-parallel ranks share the vocabulary."""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import NOTHING, Patch, Presence, called, reads

_MODULE = "megatron.core.tensor_parallel.cross_entropy"
_CROSS_ENTROPY = f"{_MODULE}:vocab_parallel_cross_entropy"
_FORWARD = f"{_MODULE}:_VocabParallelCrossEntropy.forward"
_LOSS = (
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
)


@reads(_FORWARD)
def _columns_of_one_rank(forward: Definition) -> Presence:
    """Whether smoothing divides by the columns of `exp_logits`, which are those of one rank."""
    if "label_smoothing" not in forward.parameters:
        return Presence.UNKNOWN
    sizes = forward.assigned("vocab_size")
    of_all = any("world_size" in size for size in sizes)
    return Presence.told(sizes == {"exp_logits.size(-1)"}, absent=of_all)


@reads(_LOSS)
def _taken_for_a_share(loss: Definition) -> Presence:
    """Whether logits go into a loss over shared columns as they come."""
    given = [ast.unparse(call.args[0]) for call in loss.calls("vocab_parallel_cross_entropy") if call.args]
    if "logits" not in loss.parameters or given != ["logits"]:
        return Presence.UNKNOWN
    changed = loss.assigned("logits")
    shared_out = any("scatter_to_tensor_model_parallel_region(" in value for value in changed)
    return Presence.told(not changed, absent=shared_out)


PATCHES = (
    Patch(
        id="label-smoothing-over-ranks",
        replacements=(called(_CROSS_ENTROPY, "gradients:smoothed_over_all_columns"),),
        why=(
            "Label smoothing over tensor-parallel ranks gives each rank another loss, and a wrong gradient: "
            "the evenly shared part is the mean over the columns of one rank, as if it had all of them."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#737, #7464, #7452 (finding 1), #7466 (open)",
        range="",
        when=frozenset({"tp", "label-smoothing"}),
        assumes=NOTHING,
        defect=_columns_of_one_rank,
    ),
    Patch(
        id="loss-of-gathered-logits",
        replacements=(called(_LOSS, "gradients:own_columns"),),
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
        defect=_taken_for_a_share,
    ),
)
