"""Gradients over ranks, the loss over a vocabulary that ranks share, and the optimizer."""

import ast

from bundle.patches.definitions import Definition
from bundle.patches.entry import (
    LOCAL_LAYER_BACKENDS,
    MEGATRON_TIED_HEAD_FEATURE,
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    build_signature_replacement,
    detect_in_definitions,
)
from bundle.patches.syntax import find_matches

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_PARAM_GRAD_BUFFER_INIT = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__"
_TE_EXTENSION_MODULE = "megatron.core.extensions.transformer_engine"
_TE_LINEAR_INIT = f"{_TE_EXTENSION_MODULE}:TELinear.__init__"
_TE_GROUPED_LINEAR_INIT = f"{_TE_EXTENSION_MODULE}:TEGroupedLinear.__init__"
_EXPERT_ATTRIBUTES_SETTER = f"{_TE_EXTENSION_MODULE}:_set_expert_parameter_attributes"
_COLUMN_PARALLEL_LINEAR_INIT = "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__"
_REGISTER_READY = (
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready"
)
_BATCHED_P2P_TARGET = "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops"
_FROZEN_BACKWARD = "megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward"
_CROSS_ENTROPY_MODULE = "megatron.core.tensor_parallel.cross_entropy"
_CROSS_ENTROPY = f"{_CROSS_ENTROPY_MODULE}:vocab_parallel_cross_entropy"
_CROSS_ENTROPY_FORWARD = f"{_CROSS_ENTROPY_MODULE}:_VocabParallelCrossEntropy.forward"
_LANGUAGE_MODEL_LOSS_TARGET = (
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
)
_FP8_UTILS_MODULE = "megatron.core.fp8_utils"
_QUANTIZE_IMPLEMENTATION = f"{_FP8_UTILS_MODULE}:_quantize_param_shard_impl"
_DISTRIBUTED_OPTIMIZER_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_MODEL_TO_MAIN_PARAMS_COPY = f"{_DISTRIBUTED_OPTIMIZER_CLASS}._copy_model_params_to_main_params"
_STEP_WITH_READY_GRADS = f"{_DISTRIBUTED_OPTIMIZER_CLASS}.step_with_ready_grads"
_FILL_PARAM_BUFFER_TARGET = f"{_DISTRIBUTED_OPTIMIZER_CLASS}._copy_main_params_to_param_buffer"
_HYBRID_OPTIMIZER_CLASS = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
_HYBRID_FP32_PARAMS_UPDATE = f"{_HYBRID_OPTIMIZER_CLASS}._update_fp32_params_by_new_state"
_OPTIMIZER_OFFLOAD_FEATURES = frozenset({"optimizer-cpu-offload"})


@detect_in_definitions(_FINALIZE)
def _counts_data_ranks_only(finalize: Definition) -> Presence:
    """Return whether the token count is summed over a data-parallel group without context-parallel ranks."""
    counted = [
        call for call in finalize.find_calls("all_reduce") if call.args and _is_token_count(call.args[0])
    ]
    if len(counted) != 1:
        return Presence.UNKNOWN
    group = next((keyword.value for keyword in counted[0].keywords if keyword.arg == "group"), counted[0])
    over_all = find_matches("parallel_state.get_data_parallel_group(with_context_parallel=True)", [group])
    return Presence.from_matches(
        find_matches("parallel_state.get_data_parallel_group()", [group]),
        absent=over_all or find_matches("dp_cp_group", [group]),
    )


def _is_token_count(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Name) and argument.id == "num_tokens"


@detect_in_definitions(_PARAM_GRAD_BUFFER_INIT)
def _detect_unpadded_shared_param_start(buffer: Definition) -> Presence:
    """Return whether a shared parameter starts after padding only where ranks do not divide its start."""
    sometimes = buffer.has_pattern("param_start_index % self.data_parallel_world_size != 0")
    remainders = [n for n in buffer.iter_nodes(ast.BinOp) if isinstance(n.op, ast.Mod)]
    is_tested = any(
        isinstance(n, ast.Name) and n.id == "param_start_index" for r in remainders for n in ast.walk(r)
    )
    closes = buffer.has_pattern("param_start_index = _update_bucket_metadata(param_start_index)")
    is_precomputed = buffer.has_pattern(
        "self.param_index_map = param_layout.param_index_map"
    )  # worked out elsewhere
    return Presence.from_matches(sometimes, absent=(closes or is_precomputed) and not is_tested)


@detect_in_definitions(_TE_LINEAR_INIT)
def _marks_whole_weights_as_split(linear: Definition) -> Presence:
    """Return whether duplicated weights keep the mark that Transformer Engine gives to every weight."""
    if "sequence_parallel" not in _collect_setattr_names(linear):
        return Presence.UNKNOWN
    unmarked = linear.has_pattern('setattr(param, "tensor_model_parallel", False)')
    return Presence.from_matches(not unmarked and not _has_tp_attribute_reference(linear), absent=unmarked)


@detect_in_definitions(_TE_GROUPED_LINEAR_INIT, optional=(_EXPERT_ATTRIBUTES_SETTER,))
def _detect_experts_without_tp_mark(grouped: Definition, attributes: Definition | None) -> Presence:
    """Return whether the grouped layer marks where its weights are reduced, but not that they are split."""
    if attributes is not None and grouped.find_calls("_set_expert_parameter_attributes"):
        return Presence.from_matches(
            absent=attributes.has_pattern("param.tensor_model_parallel = is_partitioned")
        )
    return Presence.from_matches(
        "allreduce" in _collect_setattr_names(grouped) and not _has_tp_attribute_reference(grouped)
    )


def _has_tp_attribute_reference(code: Definition) -> bool:
    return "tensor_model_parallel" in code.identifiers | _collect_setattr_names(code)


def _collect_setattr_names(code: Definition) -> set[object]:
    """Return the names of the attributes that the code sets by `setattr`."""
    names = (call.args[1] for call in code.find_calls("setattr") if len(call.args) == 3)
    return {name.value for name in names if isinstance(name, ast.Constant)}


@detect_in_definitions(_COLUMN_PARALLEL_LINEAR_INIT)
def _ignores_expert_tp(column: Definition) -> Presence:
    """Return whether expert parallelism alone decides which ranks sum an expert's gradient."""
    marked = 'setattr(self.weight, "allreduce", not {})'.format
    knows_expert_tp = "expert_tensor_parallel_size" in column.identifiers
    return Presence.from_matches(
        column.has_pattern(marked("(self.is_expert and self.expert_parallel)")),
        absent=knows_expert_tp and column.has_pattern(marked("use_expert_pgs")),
    )


@detect_in_definitions(_REGISTER_READY)
def _waits_for_every_weight(ready: Definition) -> Presence:
    """Return whether a bucket is sent only when every one of its weights has a gradient."""
    counts = ready.has_pattern("self.per_param_grad_ready_counts == self.golden_per_param_grad_ready_counts")
    return Presence.from_matches(
        ready.has_pattern("len(self.params_with_grad) == len(self.params)"), absent=counts
    )


@detect_in_definitions(_BATCHED_P2P_TARGET)
def _omits_message_tags(batched: Definition) -> Presence:
    """Return whether the messages of a batch carry no tag."""
    messages = batched.find_calls("P2POp")
    if not messages or not batched.find_calls("batch_isend_irecv"):
        return Presence.UNKNOWN
    return Presence.from_bool(
        any(len(m.args) < 5 and all(k.arg != "tag" for k in m.keywords) for m in messages)
    )


@detect_in_definitions(_FROZEN_BACKWARD)
def _detect_unflattened_gradient_product(backward: Definition) -> Presence:
    """Return whether the gradient reaches its product without being made a matrix first."""
    reshaped = {"reshape", "view", "flatten"} & backward.identifiers
    return Presence.from_matches(
        backward.has_pattern("grad_output.matmul(weight)") and not reshaped, absent=reshaped
    )


@detect_in_definitions(_CROSS_ENTROPY_FORWARD)
def _detect_local_vocab_smoothing(forward: Definition) -> Presence:
    """Return whether smoothing divides by the columns of `exp_logits`, which are those of one rank."""
    if "label_smoothing" not in forward.parameters:
        return Presence.UNKNOWN
    sizes = forward.find_assigned_values("vocab_size")
    is_global = any("world_size" in size for size in sizes)
    return Presence.from_matches(sizes == {"exp_logits.size(-1)"}, absent=is_global)


@detect_in_definitions(_LANGUAGE_MODEL_LOSS_TARGET)
def _treats_logits_as_shard(loss: Definition) -> Presence:
    """Return whether logits enter the loss over shared columns unchanged, as if they were one rank's part."""
    arguments = [
        ast.unparse(call.args[0]) for call in loss.find_calls("vocab_parallel_cross_entropy") if call.args
    ]
    if "logits" not in loss.parameters or arguments != ["logits"]:
        return Presence.UNKNOWN
    changed = loss.find_assigned_values("logits")
    shared_out = any("scatter_to_tensor_model_parallel_region(" in value for value in changed)
    return Presence.from_matches(not changed, absent=shared_out)


@detect_in_definitions(_QUANTIZE_IMPLEMENTATION)
def _detect_empty_quantize_error(implementation: Definition) -> Presence:
    """Return whether the last alternative, without Transformer Engine, raises even for no parameters."""
    functions = [node for node in implementation.nodes if isinstance(node, ast.FunctionDef)]
    if len(functions) < max(2, len(implementation.nodes)):
        return Presence.UNKNOWN
    last = functions[-1]
    raises = isinstance(last.body[0], ast.Raise)
    return Presence.from_matches(raises, absent=find_matches("len(model_params) == 0", ast.walk(last)))


@detect_in_definitions(_MODEL_TO_MAIN_PARAMS_COPY)
def _detect_hybrid_reload_early_return(reload: Definition) -> Presence:
    """Return whether a hybrid optimizer ends the function after it has filled its fp32 copies at most."""
    branches = [node for node in reload.iter_nodes(ast.If) if _is_hybrid_optimizer_test(node.test)]
    if len(branches) != 1 or _is_optimizer_used_outside_branch(reload, branches[0]):
        return Presence.UNKNOWN
    *filling, last = branches[0].body
    if not isinstance(last, ast.Return):
        return Presence.UNKNOWN
    known = {"self.optimizer.update_fp32_param_by_new_param()"}
    calls = [node for statement in filling for node in ast.walk(statement) if isinstance(node, ast.Call)]
    reloads = any("reload_model_params" in ast.unparse(call.func) for call in calls)
    return Presence.from_matches({ast.unparse(statement) for statement in filling} <= known, absent=reloads)


def _is_hybrid_optimizer_test(test: ast.expr) -> bool:
    return ast.unparse(test).startswith("isinstance(self.optimizer, Hybrid")


def _is_optimizer_used_outside_branch(reload: Definition, branch: ast.If) -> bool:
    """Return whether code runs before the branch, or code after it reads the inner optimizer.

    The wrapper runs the rest of the function as if there were no inner optimizer.
    """
    bodies = [node.body for node in reload.nodes if isinstance(node, ast.FunctionDef)]
    if len(bodies) != 1 or branch not in bodies[0]:
        return True
    before = bodies[0][: bodies[0].index(branch)]
    documentation = all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in before
    )
    branch_nodes = {id(node) for node in ast.walk(branch)}
    used = find_matches("self.optimizer", (node for node in reload.walk() if id(node) not in branch_nodes))
    return bool(used) or not documentation


@detect_in_definitions(_HYBRID_FP32_PARAMS_UPDATE)
def _assumes_fp32_copies(new_state: Definition) -> Presence:
    """Return whether the fp32 copy of a parameter is looked up as if every parameter had one."""
    uses_get = new_state.has_pattern("self.param_to_fp32_param.get(param)")
    tests = [ast.unparse(node.test) for node in new_state.iter_nodes(ast.If)]
    guarded = any("param_to_fp32_param" in test for test in tests) or "try:" in ast.unparse(
        new_state.nodes[0]
    )
    plain = new_state.find_assigned_values("fp32_param") == {"self.param_to_fp32_param[param]"}
    return Presence.from_matches(plain and not guarded and not uses_get, absent=uses_get)


@detect_in_definitions(_STEP_WITH_READY_GRADS, optional=(_FILL_PARAM_BUFFER_TARGET,))
def _detect_premature_param_gather(step: Definition, fill: Definition | None) -> Presence:
    """Return whether each optimizer gathers weights from buffers that others have not filled yet."""
    if fill is None:
        return Presence.ABSENT  # weights do not go through the gradients' buffers yet
    waits = "_defer_param_sync" in step.identifiers or step.has_pattern(
        "getattr(self, '_defer_param_sync', False)"
    )
    alone = step.has_pattern("not self.ddp_config.overlap_param_gather") and step.find_calls(
        "start_param_sync"
    )
    return Presence.from_matches(alone and not waits, absent=waits)


PATCHES = (
    Patch(
        id="per-token-loss-context-parallel",
        replacements=(Replacement(_FINALIZE, "gradients:sum_tokens_over_context_ranks"),),
        why="Gradients of a per-token loss are twice too large at CP2: only data ranks' tokens are counted.",
        kind=DefectKind.SILENT,
        upstream="fixed upstream in 0.13; found by comparing CP2 with CP1",
        range="<0.13",
        when=frozenset({"cp"}),
        assumes=(
            "the loss function returns three values, and the token count among them is this rank's own. "
            "Megatron's pretrain_gpt.py of 0.12 returns one summed over context-parallel ranks, and with it "
            "gradients become too small"
        ),
        defect=_counts_data_ranks_only,
    ),
    Patch(
        id="shared-embedding-bucket",
        replacements=(Replacement(_PARAM_GRAD_BUFFER_INIT, "gradients:pad_before_embedding_bucket"),),
        why=(
            "The optimizer ends with an error for an embedding that pipeline stages share (tied, or read by"
            " MTP). This happens if the weights before it have 64 elements more than a multiple of 128. The"
            " bucket of the embedding then begins at the next multiple of 128, but the embedding itself 64"
            " elements before it."
        ),
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.13",
        range="<0.13",
        when=frozenset({"pp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_unpadded_shared_param_start,
    ),
    Patch(
        id="cuda-norm-of-whole-weights",
        replacements=(
            build_signature_replacement(_TE_LINEAR_INIT, "gradients:mark_duplicated_weights_unsplit"),
        ),
        why=(
            "The gradient norm is too large, so clipping is too strong. Every tensor-parallel rank has the"
            " whole down projections of latent attention. They keep Transformer Engine's mark of a split"
            " weight, so each rank counts them."
        ),
        kind=DefectKind.SILENT,
        upstream="fixed upstream in 0.17; found by comparing TP2 with one H200 (norm off by 2e-2)",
        range="<0.17",
        backends=("cuda",),
        when=frozenset({"mla", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_marks_whole_weights_as_split,
    ),
    Patch(
        id="cuda-norm-of-expert-weights",
        replacements=(
            build_signature_replacement(_TE_GROUPED_LINEAR_INIT, "gradients:mark_expert_weights_as_split"),
        ),
        why=(
            "The gradient norm is too small, so clipping is too weak. From Transformer Engine 2.13 on the "
            "weights of grouped experts are not marked as split. Only those of the first tensor-parallel "
            "rank are counted."
        ),
        kind=DefectKind.SILENT,
        upstream="fixed upstream in 0.19; found by comparing TP2 ETP1 EP2 with one H200 (norm off by 3e-2)",
        range="<0.19",
        backends=("cuda",),
        when=frozenset({"moe", "tp"}),
        assumes=NO_CALLER_ASSUMPTION,
        requires=(("transformer-engine", ">=2.13"),),
        defect=_detect_experts_without_tp_mark,
    ),
    Patch(
        id="frozen-weight-product",
        replacements=(
            build_signature_replacement(_FROZEN_BACKWARD, "gradients:normalize_grad_output_strides"),
        ),
        why=(
            "If a micro-batch has one row or pack, a frozen output layer multiplies its gradient token by "
            "token, not in one matrix product. The reason: the gradient's dimension of size 1 has an "
            "unusual stride, with which torch does not fold it. LoRA of Qwen3-8B then ran at 3,000 "
            "tokens/s on an H200: this product took 4,245 of the 4,419 ms of a step."
        ),
        kind=DefectKind.SLOW,
        upstream="fixed upstream in 0.19; found by a profile of a LoRA run",
        range="<0.19",
        backends=("cpu", "cuda"),  # torch-npu has a product of its own, which repeats no matrix
        when=frozenset({"lora"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_unflattened_gradient_product,
    ),
    Patch(
        id="label-smoothing-over-ranks",
        replacements=(build_signature_replacement(_CROSS_ENTROPY, "gradients:smooth_over_all_columns"),),
        why=(
            "Label smoothing over tensor-parallel ranks gives each rank another loss, and a wrong"
            " gradient. The uniform part is the mean over one rank's columns, as if they were all columns."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#737, #7464, #7452 (finding 1), #7466 (open)",
        range="",
        when=frozenset({"tp", "label-smoothing"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_local_vocab_smoothing,
    ),
    Patch(
        id="loss-of-gathered-logits",
        replacements=(
            build_signature_replacement(_LANGUAGE_MODEL_LOSS_TARGET, "gradients:select_rank_columns"),
        ),
        why=(
            "If a model gathers its logits (parallel_output=False, runtime_gather_output) and gets labels, "
            "its loss is wrong by log(tp) or more. The loss function treats the logits of the whole "
            "vocabulary as if they were one rank's shard. On some ranks the gradient also lacks the term of "
            "the label."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 2)",
        range="",
        when=frozenset({"tp", "gathered-logits"}),
        assumes="labels are given to the model; logits that it returns without labels stay as they are",
        defect=_treats_logits_as_shard,
    ),
    Patch(
        id="optimizer-without-fp8-quantize",
        replacements=(
            build_signature_replacement(
                f"{_FP8_UTILS_MODULE}:quantize_param_shard", "gradients:skip_empty_quantization"
            ),
        ),
        why="Every step ends in an error without Transformer Engine, although no parameter is FP8.",
        kind=DefectKind.ERROR,
        upstream="fixed upstream in 0.13",
        range="<0.13",
        backends=LOCAL_LAYER_BACKENDS,
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_empty_quantize_error,
    ),
    Patch(
        id="offload-stale-weights",
        replacements=(
            build_signature_replacement(
                _MODEL_TO_MAIN_PARAMS_COPY, "gradients:copy_params_to_hybrid_optimizer"
            ),
        ),
        why=(
            "With the optimizer on the host, the first step overwrites weights that were loaded without"
            " its state. They become the random initial weights, because the copies that the optimizer"
            " updates are never filled."
        ),
        kind=DefectKind.SILENT,
        upstream=(
            "NVIDIA/Megatron-LM#1842, #5071 (open); NVIDIA-NeMo/RL#2371, NVIDIA-NeMo/Megatron-Bridge#4082"
        ),
        range="",
        when=_OPTIMIZER_OFFLOAD_FEATURES,
        assumes="reload_model_params() is called when weights have been loaded, as without offload",
        defect=_detect_hybrid_reload_early_return,
    ),
    Patch(
        id="offload-resume-fp32",
        replacements=(
            build_signature_replacement(
                _HYBRID_FP32_PARAMS_UPDATE, "gradients:skip_params_without_fp32_copy"
            ),
        ),
        why=(
            "With the optimizer on the host, loading its state ends in a KeyError if one of its parameters "
            "is fp32. With the distributed optimizer this is always so, because its shards are fp32."
        ),
        kind=DefectKind.ERROR,
        upstream="NovaSky-AI/SkyRL#1401, #1403; fixed on main by NVIDIA/Megatron-LM#5929",
        range="",
        when=_OPTIMIZER_OFFLOAD_FEATURES,
        assumes=NO_CALLER_ASSUMPTION,
        defect=_assumes_fp32_copies,
    ),
)
TRAPS = (
    Trap(
        id="moe-tensor-without-expert-parallel",
        range="<0.19",
        defect=_ignores_expert_tp,
        when=frozenset({"moe", "etp-unlike-tp"}),
        unless=frozenset({"ep"}),
        why=(
            "The experts' gradients are silently wrong: they are summed over the wrong ranks. Ranks with the"
            " same shard are left out, or ranks with another shard are included."
        ),
        cause=(
            "tensor_parallel/layers.py marks expert weights `allreduce = not (is_expert and EP > 1)` and"
            " ignores ETP != TP; fixed by #5916 in 0.19.0 (use_expert_pgs)"
        ),
        kind=DefectKind.SILENT,
        instead="Set parallel.etp to parallel.tp, or parallel.ep above 1.",
    ),
    Trap(
        id="overlap-tied-mtp",
        range="<0.16",
        defect=_waits_for_every_weight,
        when=frozenset({"overlap-grad-reduce", "mtp", "tied-embeddings", "pp", MEGATRON_TIED_HEAD_FEATURE}),
        why="The last stage has an unused output weight, and its bucket is never sent: a hang.",
        cause=(
            "LanguageModule allocates output_layer.weight there although it is tied. A bucket waits for a "
            "gradient of each of its weights; from 0.16 on only for those that had one in the first step"
        ),
        kind=DefectKind.ERROR,
        instead="Set distributed.overlap_grad_reduce to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="interleaved-batched-exchange",
        range="",
        defect=_omits_message_tags,
        when=frozenset({"vpp", "batched-exchange"}),
        why="With two stages, activations and gradients of interleaved chunks are swapped: silently wrong.",
        cause=(
            "previous and next stage are the same rank and the messages have one shape: a backend that "
            "matches batched messages by order confuses them (measured on gloo in 0.12 and 0.16)"
        ),
        kind=DefectKind.SILENT,
        instead="Use overlap_p2p_comm without batch_p2p_comm.",
    ),
    Trap(
        id="mxfp8-gather-of-experts",
        range=">=0.13,<0.18",
        defect=_detect_premature_param_gather,
        when=frozenset({"moe", "mxfp8-param-gather"}),
        unless=frozenset({"overlap-param-gather"}),
        why="Weights become NaN in the second step: they are gathered before all optimizers are done.",
        cause="each optimizer of a chain gathers the shared buffers; #2272, #4800 in 0.18",
        kind=DefectKind.ERROR,
        instead="Overlap the gather of parameters, or use megatron-core 0.18 or later.",
        unshown="needs a device with MXFP8",
    ),
)
