"""Distributed checkpoints: newer torch and numpy, what a file may run, and the optimizer's state."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import (
    MEGATRONS_TIED_HEAD,
    NOTHING,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    asks,
    called,
    reads,
)

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_WRITE = f"{_CHECKPOINTING}.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data"
_COMMON = f"{_CHECKPOINTING}.strategies.common"
_LOADS = (
    f"{_COMMON}:load_common",
    f"{_COMMON}:TorchCommonLoadStrategy.load_common",
    f"{_COMMON}:TorchCommonLoadStrategy.load_sharded_objects",
)
_COUNTING = {  # the modules that count elements with numpy, and where they do
    "mapping": "ShardedTensor.local_coordinates",
    "validation": "_validate_sharding_for_key_flattened",
    "exchange_utils": "_shard_size",
}
_COUNTS = tuple(f"{_CHECKPOINTING}.{module}:{name}" for module, name in _COUNTING.items())
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STATE = f"{_OPTIMIZER}.sharded_state_dict"
_SHARDS = f"{_OPTIMIZER}.sharded_param_state_dp_reshardable"
_LOAD_STATE = f"{_OPTIMIZER}.load_parameter_state_from_dp_reshardable"
_SET_STATE = f"{_OPTIMIZER}._set_main_param_and_optimizer_states"
_CHECKED = f"{_CHECKPOINTING}.mapping:ShardedTensor.validate_metadata_integrity"
_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"
_LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule"
_TIES = f"{_LANGUAGE}.tie_embeddings_and_output_weights_state_dict"
_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__"


@reads(_WRITE)
def _format_unnamed(write: Definition) -> Presence:
    """Whether an item is written with the five arguments that torch wanted before 2.8."""
    calls = write.calls("_write_item")
    if not calls:
        return Presence.UNKNOWN
    plain = all(not call.keywords and len(call.args) == 5 for call in calls)
    starred = any(isinstance(arg, ast.Starred) for call in calls for arg in call.args)
    named = bool({"SerializationFormat", "serialization_format"} & write.names)
    return Presence.told((plain or starred) and not named, absent=named)


@asks(*_COUNTS)
def _by_product(source: Evidence) -> Presence:
    """Whether elements are counted by `numpy.product`, which numpy 2 does not have."""
    counting = source.there(*_COUNTS)
    removed = any(code.calls("product") for code in counting)
    return Presence.told(removed, absent=any(code.calls("prod") for code in counting))


@asks(*_LOADS)
def _unrestricted(source: Evidence) -> Presence:
    """Whether any of the loads asks torch to run whatever the file says."""
    asked = [_asked(call, "weights_only") for code in source.there(*_LOADS) for call in code.calls("load")]
    return Presence.told(False in asked, absent=bool(asked) and None not in asked)


def _asked(call: ast.Call, name: str) -> bool | None:
    """What a call gives for a flag that is on where it gives nothing; None where that cannot be read."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == name:
            value = keyword.value
            return bool(value.value) if isinstance(value, ast.Constant) else None
    return True


@reads(_STATE, _CHECKED)
def _default_is_refused(state: Definition, checked: Definition) -> Presence:
    """Whether the form that nobody asked for is one of flat ranges, and shards of flat ranges are refused."""
    refusing = {ast.unparse(node.test) for node in checked.each(ast.If) if _raises(node)}
    if "self.flattened_range is not None" not in refusing:
        said = any("flattened_range" in ast.unparse(node) for node in checked.each(ast.Raise))
        return Presence.told(absent=not said and "has_flattened_range" not in refusing)
    defaults = [
        call.args[1].value
        for call in state.calls("get")
        if len(call.args) == 2 and isinstance(call.args[1], ast.Constant)
    ]
    if not any(isinstance(default, str) and "shard" in default for default in defaults):
        return Presence.UNKNOWN
    return Presence.of("fully_sharded_model_space" in defaults)


def _raises(branch: ast.If) -> bool:
    """Whether the branch does nothing but raise that this is not supported."""
    (only, *others) = branch.body
    return not others and isinstance(only, ast.Raise) and "not supported" in ast.unparse(only)


@asks(_STATE, _SHARDS, _LOAD_STATE, _SET_STATE)
def _steps_of_another_time(source: Evidence) -> Presence:
    """Whether shards keep a rank's own step, and loading copies it over the one that was loaded."""
    shards, load, set_states = source[_SHARDS], source[_LOAD_STATE], source[_SET_STATE]
    if shards is None or load is None:
        return Presence.told(absent=source[_STATE] is not None)
    if set_states is None:
        return Presence.UNKNOWN
    if not shards.says("step"):
        return Presence.ABSENT  # to 0.15 a step cannot be saved
    if shards.has("if key == 'step':\n    continue"):
        return Presence.ABSENT  # it is saved with what is common to all ranks
    kept = shards.has(
        "if key == 'step':\n    tensors[key] = LocalNonpersistentObject(tensors[key])\n    continue"
    )
    if not kept or not set_states.has("dst_tensors[key].copy_(tensors[key])"):
        return Presence.UNKNOWN
    return Presence.of(not load.says("step") and not set_states.says("step"))


@reads(_FSDP, where=_FSDP)
def _names_of_a_stage(init: Definition) -> Presence:
    """Whether layers are saved under the numbers that they have in their stage."""
    saving = "self.module.state_dict_for_save_checkpoint"
    return Presence.told(init.assigned(saving) == {"self.module.state_dict"})


@reads(_TIES, _MODEL)
def _refuses_the_head_that_it_made(ties: Definition, model: Definition) -> Presence:
    """Whether a stage with MTP may have no head of its own, and is given one that is left out on others."""
    asserts = len(tuple(ties.each(ast.Assert)))
    classes = ("ColumnParallelLinear", "output_layer_cls")
    left_out = [given for each in classes for given in model.given(each, "skip_weight_param_allocation")]
    if not left_out or not ties.says("mtp_process"):
        return Presence.UNKNOWN
    return Presence.of(asserts > 1 and not any("mtp" in expression for expression in left_out))


PATCHES = (
    Patch(
        id="dist-checkpoint-serialization",
        replacements=(called(_WRITE, "checkpoints:name_the_format"),),
        why="Saving fails with torch 2.8 and later, whose _write_item has one more argument.",
        kind=DefectKind.ERROR,
        upstream="verl-project/verl#6322",
        range="<0.13",
        requires=(("torch", ">=2.8"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NOTHING,
        defect=_format_unnamed,
    ),
    Patch(
        id="dist-checkpoint-numpy-product",
        replacements=tuple(
            Replacement(f"{_CHECKPOINTING}.{module}:np", "checkpoints:with_product") for module in _COUNTING
        ),
        why="The first checkpoint fails with numpy 2: module 'numpy' has no attribute 'product'.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.16; numpy 2.0's release notes list the name as removed",
        range="<0.16",
        requires=(("numpy", ">=2"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NOTHING,
        defect=_by_product,
    ),
    Patch(
        id="restricted-unpickle",
        replacements=tuple(called(load, "checkpoints:data_only", optional=True) for load in _LOADS),
        why="Loading a checkpoint runs whatever code its common state holds.",
        kind=DefectKind.SILENT,
        upstream=(
            "fixed upstream in 0.14, back in 0.17.0, fixed again in 0.17.1: by torch's own default, "
            "so that with torch below 2.6 no release is mended"
        ),
        range="<0.17.1,!=0.14.*,!=0.15.*,!=0.16.*",
        when=frozenset({"distributed-checkpoint"}),
        assumes=(
            "common state holds nothing but data and Megatron's own classes; others are to be put "
            "among torch's safe globals"
        ),
        defect=_unrestricted,
    ),
    Patch(
        id="optimizer-checkpoint-default",
        replacements=(Replacement(_STATE, "checkpoints:reshardable_by_default"),),
        why=(
            "Saving the optimizer fails where its form is not asked for: the default, "
            "fully_sharded_model_space, makes shards of flat ranges, which are refused."
        ),
        kind=DefectKind.ERROR,
        upstream="areal-project/AReaL#1468; refused since NVIDIA/Megatron-LM#2126",
        range=">=0.16",
        when=frozenset({"optimizer-default-sharding"}),
        assumes="a form that is asked for, in metadata or as sharding_type, is meant",
        defect=_default_is_refused,
    ),
    Patch(
        id="dp-reshardable-steps",
        replacements=(Replacement(_LOAD_STATE, "checkpoints:steps_as_loaded"),),
        why=(
            "After a resume from a checkpoint of the optimizer by buckets (dp_reshardable) Adam counts its "
            "steps from the start again, without Transformer Engine's or with the optimizer on the host: the "
            "bias of its moments is corrected as if they were young."
        ),
        kind=DefectKind.SILENT,
        upstream="NovaSky-AI/SkyRL#1403",
        range=">=0.16",
        when=frozenset({"dp-reshardable"}),
        assumes=NOTHING,
        defect=_steps_of_another_time,
    ),
)
TRAPS = (
    Trap(
        id="tied-mtp-checkpoint",
        range="",
        defect=_refuses_the_head_that_it_made,
        when=frozenset({"mtp", "tied-embeddings", "pp", "distributed-checkpoint", MEGATRONS_TIED_HEAD}),
        why="No checkpoint can be saved: an assertion at the first one.",
        cause=(
            "LanguageModule asserts that the last stage has no output_layer.weight where MTP has a copy of "
            "the embedding there, and GPTModel allocates it wherever the first stage is another; found by "
            "saving a tied Qwen3 with MTP at PP2"
        ),
        kind=DefectKind.ERROR,
        instead="Untie the head, or set parallel.pp to 1.",
    ),
    Trap(
        id="fsdp-checkpoint-stages",
        range=">=0.14",
        defect=_names_of_a_stage,
        when=frozenset({"megatron-fsdp", "pp", "resume-other-layout"}),
        why="Megatron-FSDP's checkpoints give later stages the layers of the first if stages change.",
        cause="the adapter saves layers by their number in the stage; #7452 (finding 12)",
        kind=DefectKind.SILENT,
        instead="Resume with the stages that it was saved with.",
        unshown="needs Megatron-FSDP, which needs CUDA",
    ),
)
