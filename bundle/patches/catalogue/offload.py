"""The optimizer that keeps weights and states on the host."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import NOTHING, Patch, Presence, Replacement
from bundle.patches.pattern import found

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_RELOAD = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_params_to_main_params"
_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_NEW_STATE = f"{_HYBRID}._update_fp32_params_by_new_state"
_OFFLOADED = frozenset({"optimizer-cpu-offload"})


def _left_early(source: "Evidence") -> Presence:
    """Whether a hybrid optimizer ends the function with its fp32 copies filled at most."""
    reload = source[_RELOAD]
    if reload is None:
        return Presence.UNKNOWN
    branches = [node for node in reload.walk() if isinstance(node, ast.If) and _is_hybrid(node.test)]
    if len(branches) != 1 or _other_uses(reload, branches[0]):
        return Presence.UNKNOWN
    *filling, last = branches[0].body
    if not isinstance(last, ast.Return):
        return Presence.UNKNOWN
    known = {"self.optimizer.update_fp32_param_by_new_param()"}
    if {ast.unparse(statement) for statement in filling} <= known:
        return Presence.PRESENT
    calls = [node for statement in filling for node in ast.walk(statement) if isinstance(node, ast.Call)]
    reloads = any("reload_model_params" in ast.unparse(call.func) for call in calls)
    return Presence.ABSENT if reloads else Presence.UNKNOWN


def _is_hybrid(test: ast.expr) -> bool:
    return ast.unparse(test).startswith("isinstance(self.optimizer, Hybrid")


def _other_uses(reload: "Definition", branch: ast.If) -> bool:
    """Whether anything runs before the branch, or what is behind it reads the inner optimizer.

    The wrapper has the rest run as if there were none.
    """
    bodies = [node.body for node in reload.nodes if isinstance(node, ast.FunctionDef)]
    if len(bodies) != 1 or branch not in bodies[0]:
        return True
    before = bodies[0][: bodies[0].index(branch)]
    documentation = all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in before
    )
    own = {id(node) for node in ast.walk(branch)}
    used = found("self.optimizer", (node for node in reload.walk() if id(node) not in own))
    return bool(used) or not documentation


def _copy_of_every_parameter(source: "Evidence") -> Presence:
    """Whether the fp32 copy of a parameter is looked up as if each had one."""
    new_state = source[_NEW_STATE]
    if new_state is None:
        return Presence.UNKNOWN
    if new_state.has("self.param_to_fp32_param.get(param)"):
        return Presence.ABSENT
    tests = [ast.unparse(node.test) for node in new_state.walk() if isinstance(node, ast.If)]
    guarded = any("param_to_fp32_param" in test for test in tests) or "try:" in ast.unparse(
        new_state.nodes[0]
    )
    plain = new_state.assigned("fp32_param") == {"self.param_to_fp32_param[param]"}
    return Presence.PRESENT if plain and not guarded else Presence.UNKNOWN


PATCHES = (
    Patch(
        id="offload-stale-weights",
        replacements=(Replacement(_RELOAD, "bundle.wrappers.optimizer:every_copy", by_signature=True),),
        why=(
            "With the optimizer on the host, weights that were loaded without its state are overwritten by "
            "the first step with the random ones of the start: nobody fills the copies that it steps."
        ),
        silent=True,
        upstream=(
            "NVIDIA/Megatron-LM#1842, #5071 (open); NVIDIA-NeMo/RL#2371, NVIDIA-NeMo/Megatron-Bridge#4082"
        ),
        range="",
        when=_OFFLOADED,
        assumes="reload_model_params() is called when weights have been loaded, as without offload",
        evidence=(_RELOAD,),
        defect=_left_early,
    ),
    Patch(
        id="offload-resume-fp32",
        replacements=(
            Replacement(_NEW_STATE, "bundle.wrappers.optimizer:those_with_a_copy", by_signature=True),
        ),
        why=(
            "Loading the state of an optimizer on the host ends in a KeyError as soon as one of its "
            "parameters is fp32, as the shards of the distributed optimizer are."
        ),
        silent=False,
        upstream="NovaSky-AI/SkyRL#1401, #1403; fixed on main by NVIDIA/Megatron-LM#5929",
        range="",
        when=_OFFLOADED,
        assumes=NOTHING,
        evidence=(_NEW_STATE,),
        defect=_copy_of_every_parameter,
    ),
)
