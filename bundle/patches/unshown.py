"""Traps that were read in the source and that no test shows: each says what showing it would take."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.catalogue import mtp
from bundle.patches.entry import Presence, Trap

if TYPE_CHECKING:
    from bundle.patches.definitions import Evidence

_MODULE = "megatron.core.transformer.multi_token_prediction"
_PREDICTION = f"{_MODULE}:MultiTokenPredictionLayer"
_RECOMPUTED = f"{_PREDICTION}._checkpointed_forward"
_RECOMPUTED_BY_BLOCK = f"{_MODULE}:MultiTokenPredictionBlock._checkpointed_forward"  # for a time in 2025
_PREPARED = "megatron.core.models.gpt.gpt_model:GPTModel._preprocess"
_LLAVA = "megatron.core.models.multimodal.llava_model:LLaVAModel"
_SHARED_OUT = f"{_LLAVA}._process_embedding_token_parallel"
_LLAVA_INIT = f"{_LLAVA}.__init__"
_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STEP = f"{_OPTIMIZER}.step_with_ready_grads"
_FILL = f"{_OPTIMIZER}._copy_main_params_to_param_buffer"
_GLOBAL_GROUP = "parallel_state.get_tensor_model_parallel_group()"


def _checkpoints(source: "Evidence") -> list[ast.Call] | None:
    """The calls of Transformer Engine's checkpoint by a prediction layer; None where that is another one."""
    recomputed = source[_RECOMPUTED] or source[_RECOMPUTED_BY_BLOCK]
    if recomputed is None:
        layer = source[_PREDICTION]
        known = mtp.without_prediction(source) or (layer and "_checkpointed_forward" not in layer.names)
        return [] if known else None
    calls = list(recomputed.calls("te_checkpoint"))
    return calls if calls or "fp8" not in recomputed.names else None


def _tensors_by_keyword(source: "Evidence") -> Presence:
    """Whether tensors are given by keyword, which a reentrant checkpoint does not see."""
    calls = _checkpoints(source)
    if calls is None:
        return Presence.UNKNOWN
    if any(keyword.arg is None for call in calls for keyword in call.keywords):
        return Presence.PRESENT
    return Presence.UNKNOWN if any(call.keywords for call in calls) else Presence.ABSENT


def _group_of_the_layout(source: "Evidence") -> Presence:
    """Whether random states are those of the layout's group, whatever group the layer has."""
    calls = _checkpoints(source)
    if calls is None:
        return Presence.UNKNOWN
    groups = [ast.unparse(call.args[3]) for call in calls if len(call.args) > 3]
    if len(groups) < len(calls):
        return Presence.UNKNOWN
    if _GLOBAL_GROUP in groups:
        return Presence.PRESENT
    own = all(group.startswith(("self.tp_group", "self.pg_collection")) for group in groups)
    return Presence.ABSENT if own else Presence.UNKNOWN


def _mask_of_the_first_stage(source: "Evidence") -> Presence:
    """Whether a mask of padding is shared out by the stage that has the embedding, and by no other."""
    prepared = source[_PREPARED]
    if prepared is None or "padding_mask" not in prepared.parameters:
        older = source[mtp.FORWARD]
        return Presence.ABSENT if older and "padding_mask" not in older.names else Presence.UNKNOWN
    sharing = [
        node
        for node in prepared.walk()
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "padding_mask"
        and "scatter_to_sequence_parallel_region" in ast.unparse(node.value)
    ]
    first = [
        n for n in prepared.walk() if isinstance(n, ast.If) and ast.unparse(n.test) == "self.pre_process"
    ]
    inside = {id(node) for branch in first for statement in branch.body for node in ast.walk(statement)}
    only_there = bool(sharing) and all(id(node) in inside for node in sharing)
    return Presence.PRESENT if only_there else Presence.UNKNOWN


def _images_over_the_layout(source: "Evidence") -> Presence:
    """Whether the embeddings of text and images are shared out over the ranks of the layout."""
    if not source.has_module(_SHARED_OUT):
        return Presence.ABSENT
    shared, init = source[_SHARED_OUT], source[_LLAVA_INIT]
    if shared is None or init is None:
        return Presence.UNKNOWN
    if not init.parameters & {"pg_collection", "model_comm_pgs"}:
        return Presence.ABSENT  # there are no ranks but the layout's
    calls = shared.calls("scatter_to_sequence_parallel_region")
    if not calls:
        return Presence.UNKNOWN
    return Presence.of(any(len(call.args) + len(call.keywords) == 1 for call in calls))


def _names_of_a_stage(source: "Evidence") -> Presence:
    """Whether layers are saved under the numbers that they have in their stage."""
    if not source.has_module(_FSDP):
        return Presence.ABSENT
    init = source[_FSDP]
    if init is None:
        return Presence.UNKNOWN
    saved = init.assigned("self.module.state_dict_for_save_checkpoint")
    return Presence.PRESENT if saved == {"self.module.state_dict"} else Presence.UNKNOWN


def _gathered_by_each(source: "Evidence") -> Presence:
    """Whether each optimizer gathers weights from buffers that others have not filled yet."""
    step, fill = source[_STEP], source[_FILL]
    if step is None:
        return Presence.UNKNOWN
    if fill is None:
        return Presence.ABSENT  # weights do not go through the gradients' buffers yet
    if "_defer_param_sync" in step.names or step.has("getattr(self, '_defer_param_sync', False)"):
        return Presence.ABSENT
    alone = step.has("not self.ddp_config.overlap_param_gather") and step.calls("start_param_sync")
    return Presence.PRESENT if alone else Presence.UNKNOWN


UNSHOWN = (
    Trap(
        id="mtp-recompute-fp8",
        range=">=0.14,<0.18",
        backends=("cuda",),  # elsewhere layers have FP8 of their own, and megatron's checkpoint
        evidence=(_RECOMPUTED, _RECOMPUTED_BY_BLOCK, _PREDICTION, mtp.FORWARD, mtp.ROLL),
        defect=_tensors_by_keyword,
        when=frozenset({"mtp", "recompute-full", "fp8"}),
        why="Prediction layers that are recomputed under FP8 lose gradients.",
        silent=True,
        cause=(
            "_checkpointed_forward gives te_checkpoint tensors by keyword, which it does not see; #4593, "
            "#4765; NVIDIA-NeMo/Megatron-Bridge#3801"
        ),
        instead="Leave out full recomputation or FP8, or use megatron-core 0.18 or later.",
        unshown="needs Transformer Engine's checkpoint and a device with FP8",
    ),
    Trap(
        id="mtp-recompute-groups",
        range=">=0.14",
        backends=("cuda",),  # elsewhere layers have FP8 of their own, and megatron's checkpoint
        evidence=(_RECOMPUTED, _RECOMPUTED_BY_BLOCK, _PREDICTION, mtp.FORWARD, mtp.ROLL),
        defect=_group_of_the_layout,
        when=frozenset({"mtp", "recompute-full", "fp8", "explicit-groups", "tp"}),
        why="Prediction layers that are recomputed under FP8 use the layout's ranks, not the given ones.",
        silent=True,
        cause="te_checkpoint is given the global group; #7452 (finding 4), #6760, #7403 (open)",
        instead="Take the groups of the layout, or leave out full recomputation or FP8.",
        unshown="needs Transformer Engine's checkpoint and a device with FP8",
    ),
    Trap(
        id="padding-mask-stages",
        range=">=0.16",
        evidence=(_PREPARED, mtp.FORWARD),
        defect=_mask_of_the_first_stage,
        when=frozenset({"moe", "padding-mask", "sp", "pp"}),
        why="From the second stage on routers get the mask of the whole sequence, not of their share.",
        silent=True,
        cause=(
            "GPTModel._preprocess shares the mask out where the embedding is, over the layout's ranks; #7452 "
            "(finding 5), #5563, #5088"
        ),
        instead="Share the mask out before the model is called, or set parallel.pp to 1.",
        unshown="read only: no engine of ours gives a model this mask",
    ),
    Trap(
        id="llava-groups",
        range=">=0.14",
        evidence=(_SHARED_OUT, _LLAVA_INIT),
        defect=_images_over_the_layout,
        when=frozenset({"llava", "explicit-groups", "tp", "sp"}),
        why="LLaVA gives ranks the embeddings of others: they are shared out over the layout's ranks.",
        silent=True,
        cause="scatter_to_sequence_parallel_region is given no group; #7452 (finding 7)",
        instead="Take the groups of the layout.",
        unshown="read only: needs megatron's LLaVAModel with a vision model",
    ),
    Trap(
        id="fsdp-checkpoint-stages",
        range=">=0.14",
        evidence=(_FSDP,),
        defect=_names_of_a_stage,
        when=frozenset({"megatron-fsdp", "pp", "resume-other-layout"}),
        why="Megatron-FSDP's checkpoints give later stages the layers of the first if stages change.",
        silent=True,
        cause="the adapter saves layers by their number in the stage; #7452 (finding 12)",
        instead="Resume with the stages that it was saved with.",
        unshown="needs Megatron-FSDP, which needs CUDA",
    ),
    Trap(
        id="mxfp8-gather-of-experts",
        range=">=0.13,<0.18",
        evidence=(_STEP, _FILL),
        defect=_gathered_by_each,
        when=frozenset({"moe", "mxfp8-param-gather"}),
        unless=frozenset({"overlap-param-gather"}),
        why="Weights become NaN in the second step: they are gathered before all optimizers are done.",
        silent=False,
        cause="each optimizer of a chain gathers the buffers that they share; #2272, #4800 in 0.18",
        instead="Overlap the gather of parameters, or use megatron-core 0.18 or later.",
        unshown="needs a device with MXFP8",
    ),
)
