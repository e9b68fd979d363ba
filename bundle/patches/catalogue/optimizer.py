"""The distributed optimizer: without an accelerator, on the host, and what its ranks gather."""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import NOTHING, Patch, Presence, Trap, called, reads
from bundle.patches.syntax import found

_MODULE = "megatron.core.fp8_utils"
_IMPLEMENTATION = f"{_MODULE}:_quantize_param_shard_impl"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_RELOAD = f"{_DISTRIBUTED}._copy_model_params_to_main_params"
_STEP = f"{_DISTRIBUTED}.step_with_ready_grads"
_FILL = f"{_DISTRIBUTED}._copy_main_params_to_param_buffer"
_HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_NEW_STATE = f"{_HYBRID}._update_fp32_params_by_new_state"
_OFFLOADED = frozenset({"optimizer-cpu-offload"})


@reads(_IMPLEMENTATION)
def _always_raises(implementation: Definition) -> Presence:
    """Whether the last alternative, without Transformer Engine, only raises, even for no parameters."""
    functions = [node for node in implementation.nodes if isinstance(node, ast.FunctionDef)]
    if len(functions) < max(2, len(implementation.nodes)):
        return Presence.UNKNOWN
    last = functions[-1]
    raises = isinstance(last.body[0], ast.Raise)
    return Presence.told(raises, absent=found("len(model_params) == 0", ast.walk(last)))


@reads(_RELOAD)
def _left_early(reload: Definition) -> Presence:
    """Whether a hybrid optimizer ends the function with its fp32 copies filled at most."""
    branches = [node for node in reload.each(ast.If) if _is_hybrid(node.test)]
    if len(branches) != 1 or _other_uses(reload, branches[0]):
        return Presence.UNKNOWN
    *filling, last = branches[0].body
    if not isinstance(last, ast.Return):
        return Presence.UNKNOWN
    known = {"self.optimizer.update_fp32_param_by_new_param()"}
    calls = [node for statement in filling for node in ast.walk(statement) if isinstance(node, ast.Call)]
    reloads = any("reload_model_params" in ast.unparse(call.func) for call in calls)
    return Presence.told({ast.unparse(statement) for statement in filling} <= known, absent=reloads)


def _is_hybrid(test: ast.expr) -> bool:
    return ast.unparse(test).startswith("isinstance(self.optimizer, Hybrid")


def _other_uses(reload: Definition, branch: ast.If) -> bool:
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


@reads(_NEW_STATE)
def _copy_of_every_parameter(new_state: Definition) -> Presence:
    """Whether the fp32 copy of a parameter is looked up as if each had one."""
    asked = new_state.has("self.param_to_fp32_param.get(param)")
    tests = [ast.unparse(node.test) for node in new_state.each(ast.If)]
    guarded = any("param_to_fp32_param" in test for test in tests) or "try:" in ast.unparse(
        new_state.nodes[0]
    )
    plain = new_state.assigned("fp32_param") == {"self.param_to_fp32_param[param]"}
    return Presence.told(plain and not guarded and not asked, absent=asked)


@reads(_STEP, also=(_FILL,))
def _gathered_by_each(step: Definition, fill: Definition | None) -> Presence:
    """Whether each optimizer gathers weights from buffers that others have not filled yet."""
    if fill is None:
        return Presence.ABSENT  # weights do not go through the gradients' buffers yet
    waits = "_defer_param_sync" in step.names or step.has("getattr(self, '_defer_param_sync', False)")
    alone = step.has("not self.ddp_config.overlap_param_gather") and step.calls("start_param_sync")
    return Presence.told(alone and not waits, absent=waits)


PATCHES = (
    Patch(
        id="cpu-optimizer-without-fp8-quantize",
        replacements=(called(f"{_MODULE}:quantize_param_shard", "gradients:quantize_only_what_there_is"),),
        why="Every step ends in an error without Transformer Engine, although no parameter is FP8.",
        silent=False,
        upstream="fixed upstream in 0.13",
        range="<0.13",
        fixed_in="0.13.0",
        backends=("cpu",),
        assumes=NOTHING,
        defect=_always_raises,
    ),
    Patch(
        id="offload-stale-weights",
        replacements=(called(_RELOAD, "gradients:every_copy"),),
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
        defect=_left_early,
    ),
    Patch(
        id="offload-resume-fp32",
        replacements=(called(_NEW_STATE, "gradients:those_with_a_copy"),),
        why=(
            "Loading the state of an optimizer on the host ends in a KeyError as soon as one of its "
            "parameters is fp32, as the shards of the distributed optimizer are."
        ),
        silent=False,
        upstream="NovaSky-AI/SkyRL#1401, #1403; fixed on main by NVIDIA/Megatron-LM#5929",
        range="",
        when=_OFFLOADED,
        assumes=NOTHING,
        defect=_copy_of_every_parameter,
    ),
)
TRAPS = (
    Trap(
        id="mxfp8-gather-of-experts",
        range=">=0.13,<0.18",
        defect=_gathered_by_each,
        when=frozenset({"moe", "mxfp8-param-gather"}),
        unless=frozenset({"overlap-param-gather"}),
        why="Weights become NaN in the second step: they are gathered before all optimizers are done.",
        cause="each optimizer of a chain gathers the buffers that they share; #2272, #4800 in 0.18",
        silent=False,
        instead="Overlap the gather of parameters, or use megatron-core 0.18 or later.",
        unshown="needs a device with MXFP8",
    ),
)
