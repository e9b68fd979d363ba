"""Every reason why a job cannot run as it is asked for, with what to change and the exit code it deserves."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bundle.capabilities import Capabilities, Variable
from bundle.environment import MOST_PER_NODE
from bundle.environment.machine import Hardware
from bundle.environment.packages import MegatronCode, Packages, SourcePredicate
from bundle.errors import ExitCode, bytes_shown
from bundle.fp8 import SCALINGS, Scaling
from bundle.patches import Action, Decision, mindspeed
from bundle.planning.activations import MTP_AGAIN
from bundle.planning.layout import RankLayout
from bundle.planning.memory import MemoryEstimate, splits_shared_embedding
from bundle.planning.size import MULTIPLIED, parameters, trained
from bundle.recipe import Recipe

SHARED_EMBEDDING = "shared-embedding-bucket"  # the patch; MindSpeed may own what it wraps
BF16_FROM = (8, 0)  # Transformer Engine's support matrix
# Modules that discard their output ask a name of Transformer Engine whether there is FP8.
DISCARD_ASKS_FP8 = SourcePredicate("tensor_parallel/random.py", "FP8GlobalStateManager", "0.13")
SHARED_EXPERTS_AGAIN = SourcePredicate("transformer/transformer_config.py", '"shared_experts"', "0.14")
SINKS = SourcePredicate("transformer/transformer_config.py", "softmax_type", "0.15")
DELTA_NETS = SourcePredicate("transformer/transformer_config.py", "linear_attention_freq", "0.16")
LAYOUT = SourcePredicate("transformer/transformer_config.py", "pipeline_model_parallel_layout", "0.13")
_DEALING = "transformer/pipeline_parallel_layer_layout.py"
LAYOUT_OF_MTP = SourcePredicate(_DEALING, "mtp_num_layers", "0.14")
MTP_APART = SourcePredicate(_DEALING, "mtp_standalone", "0.16")  # from the last layer, or from the head


BLOCKWISE = SourcePredicate("enums.py", 'blockwise = "blockwise"', "0.13")
# Before it no release recomputes these beside FP8; 0.12 does not refuse them.
AGAIN_IN_FP8 = SourcePredicate(
    "transformer/transformer_config.py", "Delayed scaling does not support moe_act", "0.14"
)
# Before it uniform recomputation asks for layers that the last unit of a chunk has not.
SHORTER_UNIT = (
    SourcePredicate("transformer/transformer_block.py", "chunk_end = min(", "0.17"),
    SourcePredicate("recompute.py", "chunk_end = min(", "0.18"),
)


class Need(NamedTuple):
    """What a family needs that not every supported megatron-core has, and what tells one that has it."""

    what: str
    sign: SourcePredicate


_OF_HYBRIDS = Need("gated delta nets", DELTA_NETS)
# Every other family is computed with every supported megatron-core.
NEEDED = {
    "gpt_oss": Need("learned sinks, windows in some layers and clamped gate", SINKS),
    "qwen3_next": _OF_HYBRIDS,
    "qwen3_5_text": _OF_HYBRIDS,
    "qwen3_5_moe_text": _OF_HYBRIDS,
}
_NUMBERS = r"\.\d+|\d+$"


class Problem(NamedTuple):
    """One violation: the recipe's (2), the machine's (3) or the patches' (4)."""

    code: ExitCode
    text: str


def lacking(family: str, code: MegatronCode) -> Need | None:
    """What a family needs and this megatron-core has not; None: it computes the family."""
    need = NEEDED.get(family)
    return None if need is None or code.has(need.sign) else need


def recipe_problem(text: str) -> Problem:
    """The recipe asks for something that cannot be done, wherever it runs."""
    return Problem(ExitCode.USAGE, text)


def hardware_problem(text: str) -> Problem:
    """This machine cannot run it; another one could."""
    return Problem(ExitCode.ENVIRONMENT_UNFIT, text)


def environment_problems(can: Capabilities, environment: Sequence[Variable]) -> Iterator[Problem]:
    """Variables of a rank that do not go together."""
    values = {variable.name: variable.value for variable in environment}
    yield from (recipe_problem(f"environment: {why}") for why in can.conflicts_of(values))


def backend_problems(
    recipe: Recipe, can: Capabilities, hardware: Hardware, code: MegatronCode
) -> Iterator[Problem]:
    """What this backend, these devices and this code of megatron-core cannot do for a recipe."""
    if recipe.task == "rl":
        yield recipe_problem("task: rl is checked, and no command trains it yet. Use sft or dpo.")
    refused = can.attention_refusals(recipe, hardware.generation.value)
    yield from (recipe_problem(f"model.attention: {why}") for why in refused)
    yield from (recipe_problem(f"model.operators: {why}") for why in can.operator_refusals(recipe))
    model, capability = recipe.model, hardware.capability
    if model.dtype == "bf16" and capability is not None and capability < BF16_FROM:
        has = ".".join(map(str, capability))
        yield hardware_problem(f"bf16 needs compute capability 8.0; this device has {has}: use dtype fp32")
    if model.fp8 is not None:
        why = can.fp8_refusal(model.fp8.scaling, model.fp8.format, hardware.generation.value)
        if why is not None:
            yield hardware_problem(f"model.fp8: {why}")
        if can.backend == "cuda" and model.fp8.scaling == "blockwise" and not code.has(BLOCKWISE):
            yield recipe_problem(
                f"model.fp8.scaling: megatron-core {code.release} has no blockwise"
                f" ({code.said_by(BLOCKWISE)}); {BLOCKWISE.since} has"
            )
    if recipe.optimizer.name == "sgd" and not (recipe.optimizer.sgd_momentum or can.layers.plain_sgd):
        yield recipe_problem(
            f"optimizer.sgd_momentum: 0, but SGD on {can.backend} keeps a momentum all the same, which"
            " neither memory nor checkpoints count: more than 0"
        )
    family = recipe.architecture.model_type
    if lacks := lacking(family, code):
        yield recipe_problem(
            f"model.config: megatron-core {code.release} has no {lacks.what} ({code.said_by(lacks.sign)}),"
            f" which {family} needs; {lacks.sign.since} has"
        )
    if recipe.architecture.zero_centered_norms and not can.delta_nets:
        yield recipe_problem(
            f"model.config: gated delta nets, which {family} needs, are not computed on {can.backend}: its"
            " norms know no weights to which one is added"
        )
    yield from stage_problems(recipe, code)
    yield from _optimizer(recipe, can)
    yield from _recomputation(recipe, can, code)


def stage_problems(recipe: Recipe, code: MegatronCode) -> Iterator[Problem]:
    """What a release does not build of a layout string."""
    layout = recipe.parallel.layout
    if not layout:
        return
    predicting = "m" in "".join(layout)
    for asked, predicate, what in (
        (True, LAYOUT, "has no layout string"),
        (predicting, LAYOUT_OF_MTP, "builds no MTP layers (m) by it"),
        (
            predicting and not {"t", "m"} <= set(layout[-1]),
            MTP_APART,
            "builds MTP layers (m) beside the last layer of the decoder (t) and the head (L) alone",
        ),
    ):
        if asked and not code.has(predicate):
            yield recipe_problem(
                f"parallel.pipeline_model_parallel_layout: megatron-core {code.release} {what}"
                f" ({code.said_by(predicate)}); {predicate.since} does"
            )
            return


def mindspeed_problems(
    recipe: Recipe, can: Capabilities, code: MegatronCode, there: Packages | None
) -> Iterator[Problem]:
    """What is against MindSpeed's layers, where a recipe asks for them; `there`: packages, where known."""
    if not recipe.backend_options.mindspeed:
        return
    key, release = "backend_options.mindspeed", str(code.release)
    if can.backend != "ascend":
        yield recipe_problem(f"{key}: backend {can.backend} has no MindSpeed, ascend has: leave it out")
        return
    wanted = mindspeed.made_for(release)
    if wanted is None:
        has = ", ".join(f"{of.branch} for {of.megatron}" for of in mindspeed.ADAPTED)
        yield hardware_problem(
            f"{key}: there is no MindSpeed for megatron-core {release} that was read; there is {has}: install"
            " one of these, or leave it out"
        )
    elif there is not None:
        yield from _installed_mindspeed(key, release, wanted, there, code.root)
    if recipe.architecture.moe is not None and recipe.model.dtype == "fp32":
        yield recipe_problem(
            f"{key}: MindSpeed multiplies experts by npu_grouped_matmul, which takes float32 from one tensor"
            " and not from one for each expert: model.dtype bf16"
        )
    for name, asked in (
        ("model.lora", recipe.model.lora),
        ("vision_config", recipe.architecture.vision),
        ("parallel.pipeline_model_parallel_layout", recipe.parallel.pipeline_model_parallel_layout),
    ):
        if asked is not None:
            yield recipe_problem(
                f"{key}: {name} was never tried with MindSpeed's layers: leave one of them out"
            )


def _installed_mindspeed(
    key: str, release: str, wanted: mindspeed.Adapted, there: Packages, root: Path | None
) -> Iterator[Problem]:
    """Why the MindSpeed that is there is not this megatron-core's, or cannot be imported beside it."""
    found = there.package("mindspeed")
    install = f"install it at {wanted.commit[:12]}, the head of {wanted.branch}"
    if found is None:
        yield hardware_problem(f"{key}: MindSpeed is not installed: {install}")
    elif found.commit != wanted.commit:
        commit = (found.commit or "")[:12] or "an unknown commit"
        of = mindspeed.BRANCHES.get(found.commit or "", "which was not read")
        yield hardware_problem(
            f"{key}: MindSpeed is here at {commit} ({of}), and jobs with megatron-core {release} were proven"
            f" with another: {install}"
        )
    if (
        wanted.imports == "megatron.training"
        and root is not None
        and not (root / "megatron/training").is_dir()
    ):
        yield hardware_problem(
            f"{key}: {wanted.branch} imports megatron.training, which is not beside this megatron-core"
            f" ({root}): put Megatron-LM at the tag core_v{release} on the path, not the package"
        )


def _optimizer(recipe: Recipe, can: Capabilities) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if optimizer.use_precision_aware_optimizer and not can.layers.typed_adam:
        yield hardware_problem(
            "optimizer.use_precision_aware_optimizer: needs Transformer Engine's FusedAdam, which backend"
            f" {can.backend} does not have: false"
        )
    if optimizer.optimizer_cpu_offload and can.device == "cpu":
        yield hardware_problem("optimizer.optimizer_cpu_offload: backend cpu is on the host already: false")


def layout_problems(
    recipe: Recipe, can: Capabilities, layout: RankLayout, decisions: Sequence[Decision]
) -> Iterator[Problem]:
    """What does not fit where the layout puts it: FP8's multiples, and buckets where no patch mends them."""
    if recipe.model.fp8 is not None:
        yield from _fp8_weights(recipe, can, layout, recipe.model.fp8.scaling)
        if not recipe.data.packed:  # a pack is padded
            yield from _fp8_rows(recipe, recipe.model.fp8.scaling)
    if recipe.model.lora is not None:
        yield from _without_adapters(recipe, can, layout)
        return  # the embedding is frozen, and in no bucket
    unmended = (Action.OWNED, Action.DRIFT, Action.CONFLICT)
    divided = recipe.optimizer.use_distributed_optimizer
    if divided and any(d.id == SHARED_EMBEDDING and d.action in unmended for d in decisions):
        yield from _shared_embedding(recipe, can, layout)


def patch_problems(decisions: Sequence[Decision]) -> Iterator[Problem]:
    """A known trap is the recipe's problem, a patch that cannot be applied is its own."""
    for decision in decisions:
        if decision.stops:
            code = ExitCode.USAGE if decision.action is Action.TRAP else ExitCode.PATCHES
            yield Problem(code, decision.problem)


def devices_problems(hardware: Hardware, per_node: int) -> Iterator[Problem]:
    """Too few devices, ones that are not for training, or more ranks than a machine can start."""
    present = len(hardware.devices)
    if per_node > MOST_PER_NODE:
        yield recipe_problem(f"devices.per_node: {per_node} ranks on one machine, {MOST_PER_NODE} at most")
    if hardware.backend != "cpu" and per_node > present:
        yield hardware_problem(
            f"devices.per_node: {per_node} wanted, {present} visible here ({hardware.reason}): "
            "lower devices.per_node, or use a machine that has them"
        )
    if hardware.unfit:
        yield hardware_problem(hardware.unfit)


def memory_problems(
    recipe: Recipe, stages: Sequence[MemoryEstimate], hardware: Hardware, per_node: int
) -> Iterator[Problem]:
    """Every stage that does not fit its devices; on the cpu, ranks that do not fit the host together."""
    if not stages:
        return
    worst = max(stages, key=lambda stage: stage.total)
    if hardware.backend == "cpu":
        host = hardware.host.memory.value
        if host is not None and worst.total * per_node > host:
            needed = f"{per_node} ranks of {bytes_shown(worst.total)}"
            yield hardware_problem(
                f"memory: {needed} do not fit this host's {bytes_shown(host)} ({_less(recipe, worst)})"
            )
        return
    host, offloaded = hardware.host.memory.value, per_node * max(stage.states.host for stage in stages)
    if host is not None and offloaded > host:
        yield hardware_problem(
            f"memory: {per_node} ranks keep {bytes_shown(offloaded)} of the optimizer on a host with"
            f" {bytes_shown(host)}: a smaller optimizer.optimizer_offload_fraction, or more nodes"
        )
    size = hardware.device_memory.value
    for stage in stages:
        if size is not None and stage.total > size:
            yield hardware_problem(
                f"memory: a rank of stage {stage.stage} needs {bytes_shown(stage.total)}, "
                f"a device has {bytes_shown(size)} ({_less(recipe, stage)})"
            )


def _less(recipe: Recipe, stage: MemoryEstimate) -> str:
    """What would shrink the larger part of a stage, of what is not done yet.

    More stages keep as many activations: each holds less of more micro-batches.
    """
    model, optimizer = recipe.model, recipe.optimizer
    if stage.activations.total <= stage.states.total:
        layout = "tp, pp or ep" if recipe.architecture.moe else "tp or pp"
        divided = ", or more data-parallel ranks" if optimizer.use_distributed_optimizer else ""
        return f"mostly weights and optimizer: more {layout}{divided}"
    ways = ["a smaller train.micro_batch_size"] if recipe.train.micro_batch_size > 1 else []
    ways += ["a shorter data.sequence_length"]
    tower = recipe.architecture.vision is not None and stage.stage == 0
    if tower and model.lora is None and not model.vision.freeze_tower:
        ways += ["model.vision.freeze_tower and freeze_projector"]
    if model.recompute is None or model.recompute.granularity != "full":
        ways += ["model.recompute"]
    return f"mostly activations: {', '.join(ways)}, more tp or cp"


def _recomputation(recipe: Recipe, can: Capabilities, code: MegatronCode) -> Iterator[Problem]:
    """What megatron-core recomputes only with other layers, or only from some release on."""
    recompute = recipe.model.recompute
    if recompute is not None and recompute.method == "uniform":
        yield from _units(recipe, recompute.layers or 1, code)
    modules = set(recompute.modules) if recompute is not None else set()
    key = "model.recompute.modules"
    if "moe_act" in modules and not can.layers.grouped_experts:
        yield recipe_problem(f"{key}: moe_act needs grouped experts, which {can.backend} does not have")
    if "layernorm" in modules and not can.layers.fused_norms and code.has(DISCARD_ASKS_FP8):
        why = "without Transformer Engine megatron-core fails by NameError (FP8GlobalStateManager)"
        why += f" ({code.said_by(DISCARD_ASKS_FP8)})"
        yield recipe_problem(f"{key}: layernorm: {why}; recompute another module on {can.backend}")
    fp8, discarded = recipe.model.fp8, sorted(modules & {"layernorm", "moe_act"})
    if fp8 is not None and discarded and (fp8.scaling == "delayed" or not code.has(AGAIN_IN_FP8)):
        yield recipe_problem(
            f"{key}: {' and '.join(discarded)} beside FP8, which megatron-core computes from"
            f" {AGAIN_IN_FP8.since} on, with another scaling than delayed"
        )
    if "shared_experts" in modules and not code.has(SHARED_EXPERTS_AGAIN):
        who = f"megatron-core {code.release} does not know shared_experts"
        yield recipe_problem(f"{key}: {who} ({code.said_by(SHARED_EXPERTS_AGAIN)}); 0.14 does")


def _units(recipe: Recipe, unit: int, code: MegatronCode) -> Iterator[Problem]:
    """Units of uniform recomputation that do not fit into a chunk, or beside MTP layers."""
    key, a = "model.recompute.layers", recipe.architecture
    if a.mtp_layers and unit > 1 and code.has(MTP_AGAIN):
        yield recipe_problem(
            f"{key}: {unit}, but MTP layers are computed again one at a time ({code.said_by(MTP_AGAIN)}):"
            " must be 1, or model.recompute.method block"
        )
    if any(code.has(each) for each in SHORTER_UNIT):
        return
    loop = SHORTER_UNIT[0]
    stages = recipe.parallel.stages(a.num_layers, a.mtp_layers) or ()
    if uneven := sorted({chunk.layers for stage in stages for chunk in stage if chunk.layers % unit}):
        yield recipe_problem(
            f"{key}: {unit} does not divide the {', '.join(map(str, uneven))} layers of a chunk, and"
            f" megatron-core {code.release} asks for layers that are not there ({code.said_by(loop)});"
            f" {loop.since} does not"
        )


def _fp8_weights(
    recipe: Recipe, can: Capabilities, layout: RankLayout, scaling: Scaling
) -> Iterator[Problem]:
    """Weights whose sizes FP8 products do not take; one of several layers is named once."""
    multiple = SCALINGS[scaling]
    refused = {
        (re.sub(_NUMBERS, "", tensor.name), tensor.shape)
        for chunk in layout.all_chunks()
        for tensor in parameters(recipe.architecture, recipe.parallel, chunk, can.layers)
        if MULTIPLIED.search(tensor.name) and any(size % multiple.rows for size in tensor.shape)
    }
    for name, shape in sorted(refused):
        yield recipe_problem(
            f"model.fp8: {scaling} FP8 multiplies in multiples of {multiple.rows}, and on each rank {name} is"
            f" {list(shape)}: change that size of the model, or tp and etp ({multiple.source})"
        )


def _fp8_rows(recipe: Recipe, scaling: Scaling) -> Iterator[Problem]:
    rows, length = recipe.rows, recipe.data.sequence_length
    multiple = recipe.alignment.total
    if rows * length % multiple:
        yield recipe_problem(
            f"data.sequence_length: {scaling} FP8 takes multiples of {SCALINGS[scaling].rows} tokens on every"
            f" rank, so a micro-batch of {rows} x {length} must be a multiple of {multiple}: change"
            " the length or train.micro_batch_size, or pack (data.packed)"
        )


def _without_adapters(recipe: Recipe, can: Capabilities, layout: RankLayout) -> Iterator[Problem]:
    for chunk in layout.all_chunks():
        if not trained(recipe.architecture, recipe.parallel, chunk, can.layers, recipe.model):
            where = f"a chunk of stage {chunk.stage}, and nothing would be trained there"
            if chunk.layers:
                layers = ", ".join(map(str, chunk.layers))
                yield recipe_problem(
                    f"model.lora.targets: none is in layers {layers}, which are all of {where}:"
                    " add targets, or use fewer stages"
                )
            else:
                yield recipe_problem(
                    f"model.lora: no layers are in {where}:"
                    " move one there in parallel.pipeline_model_parallel_layout"
                )


def _shared_embedding(recipe: Recipe, can: Capabilities, layout: RankLayout) -> Iterator[Problem]:
    ranks = layout.size("dp") * layout.size("cp")
    for chunk in layout.all_chunks():
        tensors = parameters(recipe.architecture, recipe.parallel, chunk, can.layers)
        if splits_shared_embedding(tensors, ranks):
            yield recipe_problem(
                "parallel.pp: this megatron-core lays the embedding that the first and the last stage share "
                f"across two buckets of stage {chunk.stage}, which then fails or trains it wrongly, and the "
                f"patch {SHARED_EMBEDDING} is not applied: use megatron-core 0.13 or newer, or pp 1"
            )
            return
