"""What a backend or a release of megatron-core cannot do for a recipe, before anything is started."""

from collections.abc import Collection, Iterator

from packaging.version import Version

from bundle.capabilities import Capabilities
from bundle.hardware import Hardware
from bundle.planning.buffers import breaks_before_0_13
from bundle.planning.code import DISCARD_ASKS_FP8, SHARED_EXPERTS_AGAIN, Code
from bundle.planning.fp8 import fp8_problems
from bundle.planning.parameters import parameters
from bundle.planning.placement import Placement
from bundle.planning.problem import Problem, hardware_problem, recipe_problem
from bundle.recipe import Recipe

BUCKETS_MENDED = Version("0.13")
SHARED_EMBEDDING = "shared-embedding-bucket"  # the patch; MindSpeed may own what it wraps
BF16_FROM = (8, 0)  # Transformer Engine's support matrix


def refusals(
    recipe: Recipe,
    can: Capabilities,
    hardware: Hardware,
    code: Code,
    placement: Placement | None,
    patches: Collection[str],
) -> Iterator[Problem]:
    """Every reason against the recipe on this backend, these devices and this code with these patches."""
    yield from (recipe_problem(f"model.attention: {why}") for why in can.attention_refusals(recipe))
    yield from _arithmetic(recipe, can, hardware)
    yield from _recomputation(recipe, can, code)
    if placement is None:
        return
    yield from fp8_problems(recipe, placement, can.layers)
    if code.release < BUCKETS_MENDED and SHARED_EMBEDDING not in patches:
        yield from _shared_embedding(recipe, can, placement)


def _arithmetic(recipe: Recipe, can: Capabilities, hardware: Hardware) -> Iterator[Problem]:
    model, capability = recipe.model, hardware.capability
    if model.dtype == "bf16" and capability is not None and capability < BF16_FROM:
        shown = ".".join(map(str, capability))
        yield hardware_problem(f"bf16 needs compute capability 8.0; this device has {shown}: use dtype fp32")
    if model.fp8 is not None:
        why = can.fp8_refusal(model.fp8.scaling, model.fp8.format, hardware.generation.value)
        if why is not None:
            yield hardware_problem(f"model.fp8: {why}")


def _recomputation(recipe: Recipe, can: Capabilities, code: Code) -> Iterator[Problem]:
    """Modules that megatron-core recomputes only with other layers, or only from some release on."""
    recompute = recipe.model.recompute
    modules = set(recompute.modules) if recompute is not None else set()
    key = "model.recompute.modules"
    if "moe_act" in modules and not can.layers.grouped_experts:
        yield recipe_problem(f"{key}: moe_act needs grouped experts, which {can.backend} does not have")
    if "layernorm" in modules and not can.layers.fused_norms and code.has(DISCARD_ASKS_FP8):
        why = "without Transformer Engine megatron-core fails by NameError (FP8GlobalStateManager)"
        why += f" ({code.said_by(DISCARD_ASKS_FP8)})"
        yield recipe_problem(f"{key}: layernorm: {why}; recompute another module on {can.backend}")
    if "shared_experts" in modules and not code.has(SHARED_EXPERTS_AGAIN):
        who = f"megatron-core {code.release} does not know shared_experts"
        yield recipe_problem(f"{key}: {who} ({code.said_by(SHARED_EXPERTS_AGAIN)}); 0.14 does")


def _shared_embedding(recipe: Recipe, can: Capabilities, placement: Placement) -> Iterator[Problem]:
    ranks = placement.size("dp") * placement.size("cp")
    for chunk in (chunk for chunks in placement.stages for chunk in chunks):
        tensors = parameters(recipe.architecture, recipe.parallel, chunk, can.layers)
        if breaks_before_0_13(tensors, ranks):
            yield recipe_problem(
                f"parallel.pp: megatron-core 0.12 lays the embedding that the first and the last stage share "
                f"across two buckets of stage {chunk.stage}, which then fails or trains it wrongly, and the "
                f"patch {SHARED_EMBEDDING} is not applied: use megatron-core 0.13 or newer, or pp 1"
            )
            return
