"""Distributed checkpoints: newer torch and numpy, the code that a file may run, and the optimizer's state."""

import ast

from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    MEGATRON_TIED_HEAD_FEATURE,
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

_DIST_CHECKPOINTING_PACKAGE = "megatron.core.dist_checkpointing"
_WRITE_PRELOADED_DATA_TARGET = (
    f"{_DIST_CHECKPOINTING_PACKAGE}.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data"
)
_COMMON_STRATEGIES_MODULE = f"{_DIST_CHECKPOINTING_PACKAGE}.strategies.common"
_COMMON_STRATEGY_LOAD_TARGETS = (
    f"{_COMMON_STRATEGIES_MODULE}:load_common",
    f"{_COMMON_STRATEGIES_MODULE}:TorchCommonLoadStrategy.load_common",
    f"{_COMMON_STRATEGIES_MODULE}:TorchCommonLoadStrategy.load_sharded_objects",
)
_NP_PRODUCT_CALLERS_BY_MODULE = {  # the modules that count elements with numpy, and the functions
    "mapping": "ShardedTensor.local_coordinates",
    "validation": "_validate_sharding_for_key_flattened",
    "exchange_utils": "_shard_size",
}
_REMOVED_NP_PRODUCT_CALLERS = tuple(
    f"{_DIST_CHECKPOINTING_PACKAGE}.{module}:{name}" for module, name in _NP_PRODUCT_CALLERS_BY_MODULE.items()
)
_DISTRIBUTED_OPTIMIZER_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZER_SHARDED_STATE_DICT = f"{_DISTRIBUTED_OPTIMIZER_CLASS}.sharded_state_dict"
_DP_RESHARDABLE_PARAM_STATE = f"{_DISTRIBUTED_OPTIMIZER_CLASS}.sharded_param_state_dp_reshardable"
_DP_RESHARDABLE_LOAD_TARGET = f"{_DISTRIBUTED_OPTIMIZER_CLASS}.load_parameter_state_from_dp_reshardable"
_GATHER_STATE = f"{_DISTRIBUTED_OPTIMIZER_CLASS}.get_parameter_state_dp_zero"
_SET_OPTIMIZER_STATES_TARGET = f"{_DISTRIBUTED_OPTIMIZER_CLASS}._set_main_param_and_optimizer_states"
_VALIDATE_METADATA = f"{_DIST_CHECKPOINTING_PACKAGE}.mapping:ShardedTensor.validate_metadata_integrity"
_GPT_MODEL_INIT = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"
_LANGUAGE_MODULE_CLASS = "megatron.core.models.common.language_module.language_module:LanguageModule"
_TIE_EMBEDDINGS = f"{_LANGUAGE_MODULE_CLASS}.tie_embeddings_and_output_weights_state_dict"
_MEGATRON_FSDP_INIT = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__"


@detect_in_definitions(_WRITE_PRELOADED_DATA_TARGET)
def _detect_missing_serialization_format(write: Definition) -> Presence:
    """Return whether an item is written with the five arguments that torch wanted before 2.8."""
    calls = write.find_calls("_write_item")
    if not calls:
        return Presence.UNKNOWN
    plain = all(not call.keywords and len(call.args) == 5 for call in calls)
    starred = any(isinstance(arg, ast.Starred) for call in calls for arg in call.args)
    named = bool({"SerializationFormat", "serialization_format"} & write.identifiers)
    return Presence.from_matches((plain or starred) and not named, absent=named)


@detect_in_source(*_REMOVED_NP_PRODUCT_CALLERS)
def _uses_removed_numpy_product(source: EvidenceDefinitions) -> Presence:
    """Return whether elements are counted by `numpy.product`, which numpy 2 does not have."""
    counting = source.find_existing(*_REMOVED_NP_PRODUCT_CALLERS)
    removed = any(code.find_calls("product") for code in counting)
    return Presence.from_matches(removed, absent=any(code.find_calls("prod") for code in counting))


@detect_in_source(*_COMMON_STRATEGY_LOAD_TARGETS)
def _loads_unrestricted(source: EvidenceDefinitions) -> Presence:
    """Return whether one of the loads lets torch run any code that the file holds."""
    flags = [
        _read_flag_defaulting_true(call, "weights_only")
        for code in source.find_existing(*_COMMON_STRATEGY_LOAD_TARGETS)
        for call in code.find_calls("load")
    ]
    return Presence.from_matches(False in flags, absent=bool(flags) and None not in flags)


def _read_flag_defaulting_true(call: ast.Call, name: str) -> bool | None:
    """Return the value that a call passes for a flag whose default is True; None where it cannot be read."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == name:
            value = keyword.value
            return bool(value.value) if isinstance(value, ast.Constant) else None
    return True


@detect_in_definitions(_OPTIMIZER_SHARDED_STATE_DICT, _VALIDATE_METADATA)
def _detect_refused_default_sharding(state: Definition, checked: Definition) -> Presence:
    """Return whether the default form makes shards of flat ranges, and such shards are refused."""
    refusing = {
        ast.unparse(node.test) for node in checked.iter_nodes(ast.If) if _is_unsupported_error_branch(node)
    }
    if "self.flattened_range is not None" not in refusing:
        is_mentioned = any("flattened_range" in ast.unparse(node) for node in checked.iter_nodes(ast.Raise))
        return Presence.from_matches(absent=not is_mentioned and "has_flattened_range" not in refusing)
    defaults = [
        call.args[1].value
        for call in state.find_calls("get")
        if len(call.args) == 2 and isinstance(call.args[1], ast.Constant)
    ]
    if not any(isinstance(default, str) and "shard" in default for default in defaults):
        return Presence.UNKNOWN
    return Presence.from_bool("fully_sharded_model_space" in defaults)


def _is_unsupported_error_branch(branch: ast.If) -> bool:
    """Return whether the branch does nothing but raise an error that says "not supported"."""
    (only, *rest) = branch.body
    return not rest and isinstance(only, ast.Raise) and "not supported" in ast.unparse(only)


@detect_in_source(
    _OPTIMIZER_SHARDED_STATE_DICT,
    _DP_RESHARDABLE_PARAM_STATE,
    _DP_RESHARDABLE_LOAD_TARGET,
    _SET_OPTIMIZER_STATES_TARGET,
)
def _overwrites_loaded_steps(source: EvidenceDefinitions) -> Presence:
    """Return whether shards keep a rank's own step, and loading copies that step over the loaded one."""
    shards, load, set_states = (
        source[_DP_RESHARDABLE_PARAM_STATE],
        source[_DP_RESHARDABLE_LOAD_TARGET],
        source[_SET_OPTIMIZER_STATES_TARGET],
    )
    if shards is None or load is None:
        return Presence.from_matches(absent=source[_OPTIMIZER_SHARDED_STATE_DICT] is not None)
    if set_states is None:
        return Presence.UNKNOWN
    if not shards.has_string("step"):
        return Presence.ABSENT  # to 0.15 a step cannot be saved
    if shards.has_pattern("if key == 'step':\n    continue"):
        return Presence.ABSENT  # it is saved with the state common to all ranks
    keeps_step = shards.has_pattern(
        "if key == 'step':\n    tensors[key] = LocalNonpersistentObject(tensors[key])\n    continue"
    )
    if not keeps_step or not set_states.has_pattern("dst_tensors[key].copy_(tensors[key])"):
        return Presence.UNKNOWN
    return Presence.from_bool(not load.has_string("step") and not set_states.has_string("step"))


@detect_in_definitions(_GATHER_STATE)
def _detect_device_bucket_gather(gather: Definition) -> Presence:
    """Return whether the shares of all ranks are gathered on the device, one bucket at a time."""
    devices = {"'cpu' if use_gloo_comm else torch.cuda.current_device()"}
    is_sent = "send_tensor.cuda()" in gather.find_assigned_values("send_tensor")
    is_received = gather.find_assigned_values("device") == devices
    on_host_alone = "use_gloo_comm" not in gather.identifiers  # to 0.14
    return Presence.from_matches(is_sent and is_received, absent=on_host_alone)


@detect_in_definitions(_MEGATRON_FSDP_INIT, required_module=_MEGATRON_FSDP_INIT)
def _saves_stage_layer_numbers(init: Definition) -> Presence:
    """Return whether layers are saved under the numbers that they have in their stage."""
    saving = "self.module.state_dict_for_save_checkpoint"
    return Presence.from_matches(init.find_assigned_values(saving) == {"self.module.state_dict"})


@detect_in_definitions(_TIE_EMBEDDINGS, _GPT_MODEL_INIT)
def _detect_refused_mtp_tied_head(ties: Definition, model: Definition) -> Presence:
    """Return whether a stage with MTP may not have a head of its own, and the model allocates one there."""
    asserts = len(tuple(ties.iter_nodes(ast.Assert)))
    classes = ("ColumnParallelLinear", "output_layer_cls")
    left_out = [
        argument
        for class_name in classes
        for argument in model.find_keyword_values(class_name, "skip_weight_param_allocation")
    ]
    if not left_out or not ties.has_string("mtp_process"):
        return Presence.UNKNOWN
    return Presence.from_bool(asserts > 1 and not any("mtp" in expression for expression in left_out))


PATCHES = (
    Patch(
        id="dist-checkpoint-serialization",
        replacements=(
            build_signature_replacement(
                _WRITE_PRELOADED_DATA_TARGET, "checkpoints:pass_serialization_format"
            ),
        ),
        why="Saving fails with torch 2.8 and later, where _write_item has one more argument.",
        kind=DefectKind.ERROR,
        upstream="verl-project/verl#6322",
        range="<0.13",
        requires=(("torch", ">=2.8"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_missing_serialization_format,
    ),
    Patch(
        id="dist-checkpoint-numpy-product",
        replacements=tuple(
            Replacement(f"{_DIST_CHECKPOINTING_PACKAGE}.{module}:np", "checkpoints:restore_numpy_product")
            for module in _NP_PRODUCT_CALLERS_BY_MODULE
        ),
        why="The first checkpoint fails with numpy 2: module 'numpy' has no attribute 'product'.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.16; numpy 2.0's release notes list the name as removed",
        range="<0.16",
        requires=(("numpy", ">=2"),),
        when=frozenset({"distributed-checkpoint"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_uses_removed_numpy_product,
    ),
    Patch(
        id="restricted-unpickle",
        replacements=tuple(
            build_signature_replacement(load, "checkpoints:unpickle_data_only", optional=True)
            for load in _COMMON_STRATEGY_LOAD_TARGETS
        ),
        why="Loading a checkpoint executes any code in its common state.",
        kind=DefectKind.SILENT,
        upstream=(
            "fixed upstream in 0.14, back in 0.17.0, fixed again in 0.17.1 by torch's own default; with"
            " torch below 2.6 no release is fixed"
        ),
        range="<0.17.1,!=0.14.*,!=0.15.*,!=0.16.*",
        when=frozenset({"distributed-checkpoint"}),
        assumes=(
            "the common state holds only data and Megatron's own classes; other classes must be added to"
            " torch's safe globals"
        ),
        defect=_loads_unrestricted,
    ),
    Patch(
        id="optimizer-checkpoint-default",
        replacements=(Replacement(_OPTIMIZER_SHARDED_STATE_DICT, "checkpoints:default_to_reshardable"),),
        why=(
            "Saving the optimizer fails if its form is not set. The default, fully_sharded_model_space,"
            " makes shards of flat ranges, which are refused."
        ),
        kind=DefectKind.ERROR,
        upstream="areal-project/AReaL#1468; refused since NVIDIA/Megatron-LM#2126",
        range=">=0.16",
        when=frozenset({"optimizer-default-sharding"}),
        assumes="a form that is set, in metadata or as sharding_type, is intended",
        defect=_detect_refused_default_sharding,
    ),
    Patch(
        id="dp-reshardable-steps",
        replacements=(Replacement(_DP_RESHARDABLE_LOAD_TARGET, "checkpoints:keep_loaded_steps"),),
        why=(
            "After a resume from an optimizer checkpoint by buckets (dp_reshardable), Adam counts its"
            " steps from the start again. This happens without Transformer Engine's Adam, or with the"
            " optimizer on the host. Adam then corrects the bias of its moments as in the first steps."
        ),
        kind=DefectKind.SILENT,
        upstream="NovaSky-AI/SkyRL#1403",
        range=">=0.16",
        when=frozenset({"dp-reshardable"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_overwrites_loaded_steps,
    ),
    Patch(
        id="optimizer-gather-memory",
        replacements=(Replacement(_GATHER_STATE, "checkpoints:gather_state_in_pieces"),),
        why=(
            "The first checkpoint runs out of memory. Optimizer state that any layout can load"
            " (fully_reshardable) is gathered on the device, in two or three fp32 copies of the largest"
            " bucket."
        ),
        kind=DefectKind.SLOW,
        upstream="found by saving a vision model on one H100: 30 GiB beside 45 GiB of states",
        range=">=0.15",
        when=frozenset({"distributed-checkpoint"}),
        assumes="the shards are on the host and are gathered by torch.distributed.all_gather",
        defect=_detect_device_bucket_gather,
    ),
)
TRAPS = (
    Trap(
        id="tied-mtp-checkpoint",
        range="",
        defect=_detect_refused_mtp_tied_head,
        when=frozenset(
            {"mtp", "tied-embeddings", "pp", "distributed-checkpoint", MEGATRON_TIED_HEAD_FEATURE}
        ),
        why="No checkpoint can be saved: the first one ends in an AssertionError.",
        cause=(
            "LanguageModule asserts that the last stage has no output_layer.weight where MTP has a copy of "
            "the embedding there. GPTModel allocates this weight wherever the first stage is another. Found "
            "by saving a tied Qwen3 with MTP at PP2"
        ),
        kind=DefectKind.ERROR,
        instead="Untie the head, or set parallel.pp to 1.",
    ),
    Trap(
        id="fsdp-checkpoint-stages",
        range=">=0.14",
        defect=_saves_stage_layer_numbers,
        when=frozenset({"megatron-fsdp", "pp", "resume-other-layout"}),
        why="Megatron-FSDP's checkpoints give later stages the layers of the first if the stages change.",
        cause="the adapter saves layers by their number in the stage; #7452 (finding 12)",
        kind=DefectKind.SILENT,
        instead="Resume with the stages of the saved run.",
        unshown="needs Megatron-FSDP, which needs CUDA",
    ),
)
