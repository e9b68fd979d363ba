"""Every reason why a job cannot run as requested, with its remedy and its exit code."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bundle.capabilities import Capabilities, EnvVariable
from bundle.environment import MOST_RANKS_PER_NODE
from bundle.environment.hardware import count_node_0_open_files
from bundle.environment.machine import Hardware
from bundle.environment.packages import MegatronCode, Packages, SourcePredicate
from bundle.errors import ExitCode, format_bytes
from bundle.fp8 import SCALINGS, Scaling
from bundle.patches import Decision, PatchAction, mindspeed
from bundle.planning.activations import (
    MTP_RECOMPUTATION_SOURCE_PREDICATE,
    SHARED_FP8_INPUT_SOURCE_PREDICATE,
)
from bundle.planning.layout import RankLayout
from bundle.planning.memory import MemoryEstimate, is_shared_embedding_across_buckets
from bundle.planning.size import FP8_GEMM_WEIGHT_PATTERN, list_parameters, list_trained_parameters
from bundle.recipe import Recipe

SHARED_EMBEDDING_PATCH = "shared-embedding-bucket"  # the patch; MindSpeed may own what it wraps
MIN_BF16_COMPUTE_CAPABILITY = (8, 0)  # Transformer Engine's support matrix
# Modules that discard their output look up a name of Transformer Engine to see whether there is FP8.
DISCARDED_OUTPUT_FP8_LOOKUP_PREDICATE = SourcePredicate(
    "tensor_parallel/random.py", "FP8GlobalStateManager", "0.13"
)
SHARED_EXPERTS_RECOMPUTATION_EVIDENCE = SourcePredicate(
    "transformer/transformer_config.py", '"shared_experts"', "0.14"
)
ATTENTION_SINKS_PREDICATE = SourcePredicate("transformer/transformer_config.py", "softmax_type", "0.15")
DELTA_NET_SOURCE_PREDICATE = SourcePredicate(
    "transformer/transformer_config.py", "linear_attention_freq", "0.16"
)
LAYOUT_STRING_SUPPORT_PREDICATE = SourcePredicate(
    "transformer/transformer_config.py", "pipeline_model_parallel_layout", "0.13"
)
_MEGATRON_LAYOUT_FILE = "transformer/pipeline_parallel_layer_layout.py"
MTP_LAYOUT_SOURCE_PREDICATE = SourcePredicate(_MEGATRON_LAYOUT_FILE, "mtp_num_layers", "0.14")
STANDALONE_MTP_SOURCE_PREDICATE = SourcePredicate(
    _MEGATRON_LAYOUT_FILE, "mtp_standalone", "0.16"
)  # from the last layer, or from the head


BLOCKWISE_FP8_SOURCE_PREDICATE = SourcePredicate("enums.py", 'blockwise = "blockwise"', "0.13")
# From 0.14 on, shared experts let Transformer Engine save their input for any scaling, which refuses delayed.
DELAYED_FP8_SHARED_EXPERTS_SOURCE_PREDICATE = SourcePredicate(
    "transformer/moe/shared_experts.py", "fp8_recipe != 'delayed'", "0.16"
)
# Earlier releases do not recompute these together with FP8; 0.12 does not refuse them.
FP8_RECOMPUTATION_SOURCE_PREDICATE = SourcePredicate(
    "transformer/transformer_config.py", "Delayed scaling does not support moe_act", "0.14"
)
# In earlier releases uniform recomputation asks for layers that the last unit of a chunk lacks.
SHORT_LAST_UNIT_SOURCE_PREDICATES = (
    SourcePredicate("transformer/transformer_block.py", "chunk_end = min(", "0.17"),
    SourcePredicate("recompute.py", "chunk_end = min(", "0.18"),
)


class MegatronFeature(NamedTuple):
    """A feature that a family needs and some supported megatron-core lacks, with the predicate that tells."""

    description: str
    predicate: SourcePredicate


_DELTA_NET_MEGATRON_FEATURE = MegatronFeature("gated delta nets", DELTA_NET_SOURCE_PREDICATE)
# Every other family is computed with every supported megatron-core.
FEATURE_BY_FAMILY = {
    "gpt_oss": MegatronFeature(
        "learned sinks, windows in some layers and a clamped gate", ATTENTION_SINKS_PREDICATE
    ),
    "qwen3_next": _DELTA_NET_MEGATRON_FEATURE,
    "qwen3_5_text": _DELTA_NET_MEGATRON_FEATURE,
    "qwen3_5_moe_text": _DELTA_NET_MEGATRON_FEATURE,
}
_TENSOR_NAME_NUMBER_PATTERN = r"\.\d+|\d+$"


class Problem(NamedTuple):
    """One violation: of the recipe (2), the machine (3) or the patches (4)."""

    code: ExitCode
    text: str


def find_missing_feature(family: str, code: MegatronCode) -> MegatronFeature | None:
    """Return the feature that a family needs and this megatron-core lacks; None: it computes the family."""
    need = FEATURE_BY_FAMILY.get(family)
    return None if need is None or code.has(need.predicate) else need


def to_recipe_problem(text: str) -> Problem:
    """Return the problem of a recipe that asks for something that no machine can do."""
    return Problem(ExitCode.USAGE, text)


def to_hardware_problem(text: str) -> Problem:
    """Return the problem of a machine that cannot run the job, while another one could."""
    return Problem(ExitCode.ENVIRONMENT_UNFIT, text)


def find_rank_environment_conflicts(
    can: Capabilities, environment: Sequence[EnvVariable]
) -> Iterator[Problem]:
    """Yield the conflicts between the environment variables of a rank."""
    values = {variable.name: variable.value for variable in environment}
    yield from (to_recipe_problem(f"environment: {reason}") for reason in can.list_conflicts(values))


def find_backend_problems(
    recipe: Recipe, can: Capabilities, hardware: Hardware, code: MegatronCode
) -> Iterator[Problem]:
    """Yield what this backend, these devices and this megatron-core cannot do for a recipe."""
    refused = can.list_requested_kernel_refusals(recipe, hardware.oldest_generation.value)
    yield from (to_recipe_problem(f"model.attention: {reason}") for reason in refused)
    yield from (
        to_recipe_problem(f"model.operators: {reason}") for reason in can.list_operator_refusals(recipe)
    )
    model, capability = recipe.model, hardware.capability
    if model.dtype == "bf16" and capability is not None and capability < MIN_BF16_COMPUTE_CAPABILITY:
        has = ".".join(map(str, capability))
        yield to_hardware_problem(f"model.dtype: bf16 needs compute capability 8.0, not {has}. Use fp32")
    if model.fp8 is not None:
        reason = can.explain_fp8_refusal(
            model.fp8.scaling, model.fp8.format, hardware.oldest_generation.value
        )
        if reason is not None:
            yield to_hardware_problem(f"model.fp8: {reason}")
        if (
            can.backend == "cuda"
            and model.fp8.scaling == "blockwise"
            and not code.has(BLOCKWISE_FP8_SOURCE_PREDICATE)
        ):
            yield to_recipe_problem(
                f"model.fp8.scaling: megatron-core {code.release} does not support blockwise"
                f" ({code.describe_evidence_source(BLOCKWISE_FP8_SOURCE_PREDICATE)})."
                f" Use {BLOCKWISE_FP8_SOURCE_PREDICATE.since} or newer"
            )
        has_shared_experts = recipe.architecture.moe and recipe.architecture.moe.shared_ffn_hidden_size
        if (
            can.backend == "cuda"
            and model.fp8.scaling == "delayed"
            and has_shared_experts
            and code.has(SHARED_FP8_INPUT_SOURCE_PREDICATE)
            and not code.has(DELAYED_FP8_SHARED_EXPERTS_SOURCE_PREDICATE)
        ):
            evidence = code.describe_evidence_source(DELAYED_FP8_SHARED_EXPERTS_SOURCE_PREDICATE)
            yield to_recipe_problem(
                f"model.fp8.scaling: megatron-core {code.release} does not support delayed with shared"
                f" experts ({evidence}). Use tensorwise, or megatron-core"
                f" {DELAYED_FP8_SHARED_EXPERTS_SOURCE_PREDICATE.since} or newer"
            )
    if recipe.optimizer.name == "sgd" and not (recipe.optimizer.sgd_momentum or can.layers.plain_sgd):
        yield to_recipe_problem(
            f"optimizer.sgd_momentum: 0 is not supported on {can.backend}: its SGD always keeps a momentum,"
            " which the estimates of memory and checkpoints leave out. Set a value above 0"
        )
    family = recipe.architecture.model_type
    if missing_feature := find_missing_feature(family, code):
        yield to_recipe_problem(
            f"model.config: {family} needs {missing_feature.description}, which megatron-core"
            f" {code.release} does not have ({code.describe_evidence_source(missing_feature.predicate)}). Use"
            f" {missing_feature.predicate.since} or newer"
        )
    if recipe.architecture.zero_centered_norms and not can.has_delta_nets:
        yield to_recipe_problem(
            f"model.config: {family} needs gated delta nets, which backend {can.backend} does not support:"
            " it has no zero-centred RMSNorm"
        )
    yield from find_layout_string_problems(recipe, code)
    yield from _find_optimizer_problems(recipe, can)
    yield from _find_recomputation_problems(recipe, can, code)


def find_layout_string_problems(recipe: Recipe, code: MegatronCode) -> Iterator[Problem]:
    """Yield the parts of a layout string that a release does not build."""
    layout = recipe.parallel.pipeline_stages
    if not layout:
        return
    has_mtp = "m" in "".join(layout)
    for is_used, predicate, limitation in (
        (True, LAYOUT_STRING_SUPPORT_PREDICATE, "does not support it"),
        (has_mtp, MTP_LAYOUT_SOURCE_PREDICATE, "does not support MTP layers (m) in it"),
        (
            has_mtp and not {"t", "m"} <= set(layout[-1]),
            STANDALONE_MTP_SOURCE_PREDICATE,
            "supports MTP layers (m) only in the stage with the last decoder layer (t) and the head (L)",
        ),
    ):
        if is_used and not code.has(predicate):
            yield to_recipe_problem(
                f"parallel.pipeline_model_parallel_layout: megatron-core {code.release} {limitation}"
                f" ({code.describe_evidence_source(predicate)}). Use {predicate.since} or newer"
            )
            return


def find_mindspeed_problems(
    recipe: Recipe, can: Capabilities, code: MegatronCode, installed: Packages | None
) -> Iterator[Problem]:
    """Yield the problems of MindSpeed's layers, where a recipe asks for them.

    `installed` are the packages, where they are known.
    """
    if not recipe.backend_options.mindspeed:
        return
    key, release = "backend_options.mindspeed", str(code.release)
    if can.backend != "ascend":
        yield to_recipe_problem(f"{key}: MindSpeed runs on ascend, not on {can.backend}. Leave the key out")
        return
    branch = mindspeed.find_branch_by_megatron_version(release)
    if branch is None:
        has = ", ".join(
            f"{known_branch.branch} for {known_branch.megatron_range}"
            for known_branch in mindspeed.SUPPORTED_TRAINING_BRANCHES
        )
        yield to_hardware_problem(
            f"{key}: no reviewed MindSpeed branch fits megatron-core {release} (reviewed: {has}). Install"
            " one of these megatron-core versions, or leave the key out"
        )
    elif installed is not None:
        yield from _check_installed_mindspeed(key, release, branch, installed, code.root)
    if recipe.architecture.moe is not None and recipe.model.dtype == "fp32":
        yield to_recipe_problem(
            f"{key}: MindSpeed computes experts with npu_grouped_matmul, which does not support a float32"
            " tensor per expert. Set model.dtype to bf16"
        )
    for name, value in (
        ("model.lora", recipe.model.lora),
        ("vision_config", recipe.architecture.vision),
        ("parallel.pipeline_model_parallel_layout", recipe.parallel.pipeline_model_parallel_layout),
    ):
        if value is not None:
            yield to_recipe_problem(
                f"{key}: MindSpeed's layers are untested with {name}. Leave out one of these two keys"
            )


def _check_installed_mindspeed(
    key: str, release: str, branch: mindspeed.MindSpeedBranch, installed: Packages, root: Path | None
) -> Iterator[Problem]:
    """Yield why the installed MindSpeed does not fit this megatron-core or cannot be imported with it."""
    package = installed.find_package("mindspeed")
    install = f"Install MindSpeed's commit {branch.commit[:12]}, the head of the branch {branch.branch}"
    if package is None:
        yield to_hardware_problem(f"{key}: MindSpeed is not installed. {install}")
    elif package.commit != branch.commit:
        commit = (package.commit or "")[:12] or "an unknown commit"
        branch_text = mindspeed.BRANCH_BY_COMMIT.get(package.commit or "", "not reviewed")
        yield to_hardware_problem(
            f"{key}: MindSpeed is installed at {commit} ({branch_text}), but jobs with megatron-core"
            f" {release} were tested with another commit. {install}"
        )
    if (
        branch.imports == "megatron.training"
        and root is not None
        and not (root / "megatron/training").is_dir()
    ):
        yield to_hardware_problem(
            f"{key}: MindSpeed {branch.branch} imports megatron.training, which this megatron-core ({root})"
            f" does not include. On the Python path, replace it by Megatron-LM at the tag core_v{release}"
        )


def _find_optimizer_problems(recipe: Recipe, can: Capabilities) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if optimizer.use_precision_aware_optimizer and not can.layers.typed_adam:
        yield to_hardware_problem(
            "optimizer.use_precision_aware_optimizer: needs Transformer Engine's FusedAdam, which backend"
            f" {can.backend} does not have. Set it to false"
        )
    if optimizer.optimizer_cpu_offload and can.device == "cpu":
        yield to_hardware_problem(
            "optimizer.optimizer_cpu_offload: with backend cpu the optimizer is on the host already. Set it"
            " to false"
        )


def find_layout_problems(
    recipe: Recipe, can: Capabilities, layout: RankLayout, decisions: Sequence[Decision]
) -> Iterator[Problem]:
    """Yield what does not fit the layout: multiples of FP8, and buckets where no patch mends them."""
    if recipe.model.fp8 is not None:
        yield from _find_fp8_weight_size_problems(recipe, can, layout, recipe.model.fp8.scaling)
        if not recipe.data.packed:  # a pack is padded
            yield from _find_fp8_token_count_problems(recipe, recipe.model.fp8.scaling)
    if recipe.model.lora is not None:
        yield from _find_untrained_chunks(recipe, can, layout)
        return  # the embedding is frozen, and in no bucket
    unmended_actions = (PatchAction.OWNED, PatchAction.DRIFT, PatchAction.CONFLICT)
    is_divided = recipe.optimizer.use_distributed_optimizer
    if is_divided and any(d.id == SHARED_EMBEDDING_PATCH and d.action in unmended_actions for d in decisions):
        yield from _find_split_embedding_problems(recipe, can, layout)


def find_patch_problems(decisions: Sequence[Decision]) -> Iterator[Problem]:
    """Yield the problems of patches: a known trap is the recipe's, a patch that cannot be applied its own."""
    for decision in decisions:
        if decision.stops:
            code = ExitCode.USAGE if decision.action is PatchAction.TRAP else ExitCode.PATCHES
            yield Problem(code, decision.reason_line)


def find_device_problems(hardware: Hardware, per_node: int) -> Iterator[Problem]:
    """Yield the problems of too few devices, of devices that cannot train, and of too many ranks."""
    present = len(hardware.devices)
    if per_node > MOST_RANKS_PER_NODE:
        yield to_recipe_problem(
            f"devices.per_node: {per_node} ranks are too many for one machine. Use at most"
            f" {MOST_RANKS_PER_NODE}"
        )
    if hardware.backend != "cpu" and per_node > present:
        yield to_hardware_problem(
            f"devices.per_node: {per_node} is more than the {present} devices here ({hardware.reason})."
            f" Lower devices.per_node, or use a machine with {per_node} devices"
        )
    if hardware.unfit_reason:
        yield to_hardware_problem(hardware.unfit_reason)


def find_open_file_problems(hardware: Hardware, nodes: int, per_node: int) -> Iterator[Problem]:
    """Yield the problem that node 0 cannot have a connection from each rank and each node."""
    most, needed = hardware.host.open_files, count_node_0_open_files(nodes, per_node)
    if nodes > 1 and most.value is not None and needed > most.value:
        yield to_hardware_problem(
            f"open files: node 0 needs {needed} for {nodes} nodes of {per_node} ranks, but may have"
            f" {most.value:g} ({most.reason}). Raise its hard limit (`ulimit -Hn`)"
        )


def find_memory_problems(
    recipe: Recipe, stages: Sequence[MemoryEstimate], hardware: Hardware, per_node: int
) -> Iterator[Problem]:
    """Yield every stage that does not fit its devices; on the cpu, ranks that together exceed the host."""
    if not stages:
        return
    worst = max(stages, key=lambda stage: stage.peak_bytes)
    if hardware.backend == "cpu":
        host = hardware.host.memory.value
        if host is not None and worst.peak_bytes * per_node > host:
            needed = f"{per_node} ranks of {format_bytes(worst.peak_bytes)}"
            yield to_hardware_problem(
                f"memory: {needed} do not fit the {format_bytes(host)} of this host"
                f" ({_advise_less_memory(recipe, worst)})"
            )
        return
    host, offloaded = hardware.host.memory.value, per_node * max(stage.states.host for stage in stages)
    if host is not None and offloaded > host:
        yield to_hardware_problem(
            f"memory: the {per_node} ranks of a node offload more optimizer state ({format_bytes(offloaded)})"
            f" than the host has memory ({format_bytes(host)}). Lower optimizer.optimizer_offload_fraction,"
            " or use more nodes"
        )
    size = hardware.smallest_device_memory.value
    for stage in stages:
        if size is not None and stage.peak_bytes > size:
            yield to_hardware_problem(
                f"memory: a rank of stage {stage.stage} needs {format_bytes(stage.peak_bytes)}, but a device"
                f" has {format_bytes(size)} ({_advise_less_memory(recipe, stage)})"
            )


def _advise_less_memory(recipe: Recipe, stage: MemoryEstimate) -> str:
    """Return what would shrink the larger part of a stage and is not done yet.

    More stages keep as many activations: each holds less of more micro-batches.
    """
    model, optimizer = recipe.model, recipe.optimizer
    if stage.activations.total_peak <= stage.states.device_total:
        layout = "tp, pp or ep" if recipe.architecture.moe else "tp or pp"
        divided = ", or use more data-parallel ranks" if optimizer.use_distributed_optimizer else ""
        return f"mostly weights and optimizer: raise {layout}{divided}"
    ways = ["lower train.micro_batch_size"] if recipe.train.micro_batch_size_or_one > 1 else []
    ways += ["lower data.sequence_length"]
    has_tower = recipe.architecture.vision is not None and stage.stage == 0
    if has_tower and model.lora is None and not model.vision.freeze_tower:
        ways += ["set model.vision.freeze_tower and freeze_projector"]
    if model.recompute is None or model.recompute.granularity != "full":
        ways += ["set model.recompute"]
    return f"mostly activations: {', '.join(ways)}, raise tp or cp"


def _find_recomputation_problems(recipe: Recipe, can: Capabilities, code: MegatronCode) -> Iterator[Problem]:
    """Yield what megatron-core recomputes only with other layers, or only from some release on."""
    recompute = recipe.model.recompute
    if recompute is not None and recompute.method == "uniform":
        yield from _find_recompute_unit_problems(recipe, recompute.layers or 1, code)
    modules = set(recompute.modules) if recompute is not None else set()
    key = "model.recompute.modules"
    if "moe_act" in modules and not can.layers.grouped_experts:
        yield to_recipe_problem(f"{key}: moe_act needs grouped experts, which {can.backend} does not have")
    if (
        "layernorm" in modules
        and not can.layers.fused_norms
        and code.has(DISCARDED_OUTPUT_FP8_LOOKUP_PREDICATE)
    ):
        reason = "without Transformer Engine, megatron-core fails with NameError (FP8GlobalStateManager)"
        reason += f" ({code.describe_evidence_source(DISCARDED_OUTPUT_FP8_LOOKUP_PREDICATE)})"
        yield to_recipe_problem(f"{key}: layernorm: {reason}. Recompute another module on {can.backend}")
    fp8, discarded = recipe.model.fp8, sorted(modules & {"layernorm", "moe_act"})
    if (
        fp8 is not None
        and discarded
        and (fp8.scaling == "delayed" or not code.has(FP8_RECOMPUTATION_SOURCE_PREDICATE))
    ):
        yield to_recipe_problem(
            f"{key}: with FP8, megatron-core recomputes {' and '.join(discarded)} only from"
            f" {FP8_RECOMPUTATION_SOURCE_PREDICATE.since} on, and not with delayed scaling"
        )
    if "shared_experts" in modules and not code.has(SHARED_EXPERTS_RECOMPUTATION_EVIDENCE):
        subject = f"megatron-core {code.release} does not know shared_experts"
        yield to_recipe_problem(
            f"{key}: {subject} ({code.describe_evidence_source(SHARED_EXPERTS_RECOMPUTATION_EVIDENCE)})."
            " Use 0.14 or newer"
        )


def _find_recompute_unit_problems(recipe: Recipe, unit: int, code: MegatronCode) -> Iterator[Problem]:
    """Yield units of uniform recomputation that do not fit into a chunk, or together with MTP layers."""
    key, a = "model.recompute.layers", recipe.architecture
    if a.mtp_layers and unit > 1 and code.has(MTP_RECOMPUTATION_SOURCE_PREDICATE):
        yield to_recipe_problem(
            f"{key}: {unit} is not allowed, because MTP layers are recomputed one at a time"
            f" ({code.describe_evidence_source(MTP_RECOMPUTATION_SOURCE_PREDICATE)}). Set it to 1, or set"
            " model.recompute.method to block"
        )
    if any(code.has(predicate) for predicate in SHORT_LAST_UNIT_SOURCE_PREDICATES):
        return
    loop = SHORT_LAST_UNIT_SOURCE_PREDICATES[0]
    stages = recipe.parallel.compute_stages(a.num_layers, a.mtp_layers) or ()
    if uneven := sorted({chunk.layers for stage in stages for chunk in stage if chunk.layers % unit}):
        yield to_recipe_problem(
            f"{key}: {unit} does not divide the {', '.join(map(str, uneven))} layers of a chunk, and"
            f" megatron-core {code.release} then looks for missing layers"
            f" ({code.describe_evidence_source(loop)}). Use a divisor, or megatron-core {loop.since} or newer"
        )


def _find_fp8_weight_size_problems(
    recipe: Recipe, can: Capabilities, layout: RankLayout, scaling: Scaling
) -> Iterator[Problem]:
    """Yield the weights whose sizes FP8 products do not take; a weight of several layers is named once."""
    multiple = SCALINGS[scaling]
    refused = {
        (re.sub(_TENSOR_NAME_NUMBER_PATTERN, "", tensor.name), tensor.shape)
        for chunk in layout.iterate_chunks()
        for tensor in list_parameters(recipe.architecture, recipe.parallel, chunk, can.layers)
        if FP8_GEMM_WEIGHT_PATTERN.search(tensor.name)
        and any(size % multiple.row_multiple for size in tensor.shape)
    }
    for name, shape in sorted(refused):
        yield to_recipe_problem(
            f"model.fp8: {scaling} FP8 needs sizes that are multiples of {multiple.row_multiple}, and on each"
            f" rank {name} is {list(shape)} ({multiple.source}). Change that size of the model, or tp and etp"
        )


def _find_fp8_token_count_problems(recipe: Recipe, scaling: Scaling) -> Iterator[Problem]:
    rows, length = recipe.micro_batch_full_rows, recipe.data.sequence_length
    multiple, of_rank = recipe.alignment.total_multiple, SCALINGS[scaling].row_multiple
    if rows * length % multiple:
        share = f" ({of_rank} for each of {multiple // of_rank} ranks)" if multiple != of_rank else ""
        yield to_recipe_problem(
            f"data.sequence_length: a micro-batch has {rows} x {length} tokens, but {scaling} FP8 with this"
            f" layout needs a multiple of {multiple} tokens{share}. Change"
            " the length or train.micro_batch_size, or set data.packed: true"
        )


def _find_untrained_chunks(recipe: Recipe, can: Capabilities, layout: RankLayout) -> Iterator[Problem]:
    for chunk in layout.iterate_chunks():
        if not list_trained_parameters(recipe.architecture, recipe.parallel, chunk, can.layers, recipe.model):
            where = f"a model chunk of pipeline stage {chunk.stage}"
            if chunk.layers:
                layers = ", ".join(map(str, chunk.layers))
                yield to_recipe_problem(
                    f"model.lora.targets: {where} (layers: {layers}) has no LoRA target, so it would train"
                    " nothing. Add targets, or use fewer stages"
                )
            else:
                yield to_recipe_problem(
                    f"model.lora: {where} has no layers, so it would train nothing. Give it a layer in"
                    " parallel.pipeline_model_parallel_layout"
                )


def _find_split_embedding_problems(
    recipe: Recipe, can: Capabilities, layout: RankLayout
) -> Iterator[Problem]:
    ranks = layout.find_axis_size("dp") * layout.find_axis_size("cp")
    for chunk in layout.iterate_chunks():
        tensors = list_parameters(recipe.architecture, recipe.parallel, chunk, can.layers)
        if is_shared_embedding_across_buckets(tensors, ranks):
            yield to_recipe_problem(
                "parallel.pp: this megatron-core splits the embedding shared by the first and last stage"
                f" across two buckets of stage {chunk.stage}, which then fails or trains it wrongly. The"
                f" patch {SHARED_EMBEDDING_PATCH}, which corrects this, is not applied. Use megatron-core"
                " 0.13 or newer, or pp 1"
            )
            return
