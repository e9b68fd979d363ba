"""The distributed optimizer's state in distributed checkpoints."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STATE = f"{_OPTIMIZER}.sharded_state_dict"
_SHARDS = f"{_OPTIMIZER}.sharded_param_state_dp_reshardable"
_LOAD = f"{_OPTIMIZER}.load_parameter_state_from_dp_reshardable"
_SET = f"{_OPTIMIZER}._set_main_param_and_optimizer_states"
_CHECKED = "megatron.core.dist_checkpointing.mapping:ShardedTensor.validate_metadata_integrity"
_WRAPPERS = "bundle.wrappers.checkpoints"


def _default_is_refused(source: "Evidence") -> Presence:
    """Whether the form that nobody asked for is one of flat ranges, and shards of flat ranges are refused."""
    state, checked = source[_STATE], source[_CHECKED]
    if state is None or checked is None:
        return Presence.UNKNOWN
    refusing = {
        ast.unparse(node.test) for node in checked.walk() if isinstance(node, ast.If) and _raises(node)
    }
    if "self.flattened_range is not None" not in refusing:
        said = any(
            "flattened_range" in ast.unparse(node) for node in checked.walk() if isinstance(node, ast.Raise)
        )
        return Presence.UNKNOWN if said or "has_flattened_range" in refusing else Presence.ABSENT
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


def _steps_of_another_time(source: "Evidence") -> Presence:
    """Whether shards keep a rank's own step, and loading copies it over the one that was loaded."""
    shards, load, set_states = source[_SHARDS], source[_LOAD], source[_SET]
    if shards is None or load is None:
        return Presence.ABSENT if source[_STATE] else Presence.UNKNOWN
    if set_states is None:
        return Presence.UNKNOWN
    if not _speaks_of(shards, "step"):
        return Presence.ABSENT  # to 0.15 a step cannot be saved
    if shards.has("if key == 'step':\n    continue"):
        return Presence.ABSENT  # it is saved with what is common to all ranks
    kept = shards.has(
        "if key == 'step':\n    tensors[key] = LocalNonpersistentObject(tensors[key])\n    continue"
    )
    if not kept or not set_states.has("dst_tensors[key].copy_(tensors[key])"):
        return Presence.UNKNOWN
    return Presence.of(not _speaks_of(load, "step") and not _speaks_of(set_states, "step"))


def _speaks_of(code: "Definition", text: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == text for node in code.walk())


PATCHES = (
    Patch(
        id="optimizer-checkpoint-default",
        replacements=(Replacement(_STATE, f"{_WRAPPERS}:reshardable_by_default"),),
        why=(
            "Saving the optimizer fails where its form is not asked for: the default, "
            "fully_sharded_model_space, makes shards of flat ranges, which are refused."
        ),
        silent=False,
        upstream="areal-project/AReaL#1468; refused since NVIDIA/Megatron-LM#2126",
        range=">=0.16",
        when=frozenset({"optimizer-default-sharding"}),
        assumes="a form that is asked for, in metadata or as sharding_type, is meant",
        evidence=(_STATE, _CHECKED),
        defect=_default_is_refused,
    ),
    Patch(
        id="dp-reshardable-steps",
        replacements=(Replacement(_LOAD, f"{_WRAPPERS}:steps_as_loaded"),),
        why=(
            "After a resume from a checkpoint of the optimizer by buckets (dp_reshardable) Adam counts its "
            "steps from the start again, without Transformer Engine's or with the optimizer on the host: the "
            "bias of its moments is corrected as if they were young."
        ),
        silent=True,
        upstream="NovaSky-AI/SkyRL#1403",
        range=">=0.16",
        when=frozenset({"dp-reshardable"}),
        assumes=NOTHING,
        evidence=(_STATE, _SHARDS, _LOAD, _SET),
        defect=_steps_of_another_time,
    ),
)
