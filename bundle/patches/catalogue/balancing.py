"""Megatron's losses that balance experts, the counts of the bias that steers them, and rows of padding."""

import ast

from bundle.patches.catalogue import mtp
from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    MEGATRONS_BALANCING,
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

_TOPK_ROUTER_CLASS = "megatron.core.transformer.moe.router:TopKRouter"
_ATTACH_LOSS = f"{_TOPK_ROUTER_CLASS}.attach_and_log_load_balancing_loss"  # from 0.14
_OLD_BALANCING_LOSS_TARGET = f"{_TOPK_ROUTER_CLASS}.apply_load_balancing_loss"  # to 0.13
_Z_LOSS = f"{_TOPK_ROUTER_CLASS}.apply_z_loss"
_SEQ_AUX_LOSS = f"{_TOPK_ROUTER_CLASS}._apply_seq_aux_loss"  # from 0.14
_OLD_SEQ_AUX_LOSS_TARGET = f"{_TOPK_ROUTER_CLASS}.seq_aux_loss_load_balancing"  # to 0.13
_MAINTAIN_BIAS = f"{_TOPK_ROUTER_CLASS}._maintain_float32_expert_bias"
_ROUTER_INIT = f"{_TOPK_ROUTER_CLASS}.__init__"
_ROUTING = f"{_TOPK_ROUTER_CLASS}.routing"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_FORWARD_STEP = f"{_SCHEDULES}:forward_step"  # sets the scale to 0.13
_FORWARD_STEP_CALC_LOSS = f"{_SCHEDULES}:forward_step_calc_loss"  # from 0.14
_APPLY_EXPERT_BIAS = f"{_TOPK_ROUTER_CLASS}._apply_expert_bias"
_GLOBAL_AUX_LOSS_TARGET = f"{_TOPK_ROUTER_CLASS}._apply_global_aux_loss"
_SWITCH_BALANCING_LOSS_TARGET = "megatron.core.transformer.moe.router:switch_load_balancing_loss_func"
_MOE_UTILS_MODULE = "megatron.core.transformer.moe.moe_utils"
_EXPERT_TOKEN_COUNT_TARGET = f"{_MOE_UTILS_MODULE}:get_tokens_per_expert_and_token_count"
_TP_REGION_REDUCE_TARGET = f"{_MOE_UTILS_MODULE}:reduce_from_tensor_model_parallel_region"
_TP_ALL_REDUCE_FUNCTION = "megatron.core.tensor_parallel.mappings:_reduce"
_GPT_PREPROCESS = "megatron.core.models.gpt.gpt_model:GPTModel._preprocess"


def _build_forward_step_replacements(wrapper: str) -> tuple[Replacement, ...]:
    """Return the replacements of the function that sets the loss scale.

    From 0.14 on that is a function of its own, which both schedules call.
    """
    return build_signature_replacement(_FORWARD_STEP, f"moe:{wrapper}"), build_signature_replacement(
        _FORWARD_STEP_CALC_LOSS, f"moe:{wrapper}", optional=True
    )


@detect_in_definitions(
    (_ATTACH_LOSS, _OLD_BALANCING_LOSS_TARGET), _Z_LOSS, optional=((_FORWARD_STEP_CALC_LOSS, _FORWARD_STEP),)
)
def _weighs_by_own_tokens(attach: Definition, z_loss: Definition, setting: Definition | None) -> Presence:
    """Return whether the weight is this rank's tokens, and not those of all ranks of a micro-batch."""
    all_ranks = "_ * num_local_tokens * self.tp_cp_group.size()"
    if attach.has_pattern(all_ranks) and z_loss.has_pattern(all_ranks):
        return Presence.ABSENT
    aux_weights = ("aux_loss * activation.shape[0]", "aux_loss * num_tokens")
    z_weights = ("z_loss * logits.shape[0]", "z_loss * num_tokens")
    is_local = any(map(attach.has_pattern, aux_weights)) and any(map(z_loss.has_pattern, z_weights))
    # The wrapper multiplies the scale, so that the scale must be set anew each time.
    is_reset = setting is not None and setting.has_pattern("MoEAuxLossAutoScaler.set_loss_scale(loss_scale)")
    return Presence.from_matches(is_local and is_reset)


@detect_in_definitions((_FORWARD_STEP_CALC_LOSS, _FORWARD_STEP))
def _detect_cp_unaware_loss_scale(setting: Definition) -> Presence:
    """Return whether the scale of a mean is divided by micro-batches and ignores context-parallel ranks."""
    scaled = ("loss_scale", "loss_scale * cp_group_size", "loss_scale * cp_size_for_scaling")
    plain, *context_aware = (
        setting.has_pattern(f"MoEAuxLossAutoScaler.set_loss_scale({by} / num_microbatches)") for by in scaled
    )
    return Presence.from_matches(plain, any(context_aware))


@detect_in_source(_SEQ_AUX_LOSS, _ATTACH_LOSS, _OLD_BALANCING_LOSS_TARGET)
def _detect_weight_missing_batch_size(source: EvidenceDefinitions) -> Presence:
    """Return whether the loss over sequences is weighted by the tokens of one sequence."""
    apply, attach = source[_SEQ_AUX_LOSS], source[_ATTACH_LOSS]
    if apply is None or attach is None:
        return Presence.from_matches(absent=source[_OLD_BALANCING_LOSS_TARGET] is not None and attach is None)
    if "valid_token_count" not in attach.parameters:
        return Presence.from_matches(absent=attach.has_pattern("aux_loss * activation.shape[0]"))
    weights, scales = (
        apply.find_keyword_values("attach_and_log_load_balancing_loss", keyword)
        for keyword in ("valid_token_count", "aux_loss_scale_num_tokens")
    )
    # the tokens of one sequence, over the ranks
    is_local = weights == ("local_num_tokens",) and set(scales) <= {"total_num_tokens"}
    counted = bool(apply.find_calls("get_tokens_per_expert_and_token_count"))
    return Presence.from_matches(is_local and counted, absent=weights == ("local_num_tokens * bsz",))


@detect_in_definitions(_MAINTAIN_BIAS, _ROUTER_INIT)
def _counts_in_bf16(maintain: Definition, init: Definition) -> Presence:
    """Return whether the counts are a buffer that mixed precision casts and nothing casts back."""
    counts = "self.local_tokens_per_expert"
    if maintain.find_assigned_values(counts) or maintain.find_assigned_values(f"{counts}.data"):
        return Presence.ABSENT
    if "local_tokens_per_expert" in maintain.identifiers:
        return Presence.UNKNOWN
    buffer = init.has_pattern('self.register_buffer("local_tokens_per_expert", _, persistent=False)')
    return Presence.from_matches(buffer and "expert_bias" in maintain.identifiers)


@detect_in_definitions((_ATTACH_LOSS, _OLD_BALANCING_LOSS_TARGET))
def _detect_weighting_by_all_tokens(attach: Definition) -> Presence:
    """Return whether a per-token loss is weighted by all tokens that the router sees, learned or not."""
    if "calculate_per_token_loss" not in attach.identifiers:  # it is not weighed at all
        return Presence.from_matches(
            absent=attach.has_pattern("MoEAuxLossAutoScaler.apply(activation, aux_loss)")
        )
    attached = [call.args[1] for call in attach.find_calls("apply") if len(call.args) == 2]
    weights = [weighed.right for weighed in attached if isinstance(weighed, ast.BinOp)]
    seen = ("activation.shape[0]", "num_tokens", "self.tp_cp_group.size()", "aux_loss_scale_num_tokens")
    return Presence.from_matches(bool(weights) and all(ast.unparse(weight) in seen for weight in weights))


@detect_in_definitions(_ROUTING, (_SEQ_AUX_LOSS, _OLD_SEQ_AUX_LOSS_TARGET))
def _treats_rows_as_sequences(routing: Definition, loss: Definition) -> Presence:
    """Return whether a row of the logits counts as one sequence, whatever boundaries it has inside."""
    bounded = any("cu_seqlens" in name for name in routing.identifiers | loss.identifiers)
    return Presence.from_matches(routing.has_pattern("seq_length, bsz = logits.shape[:2]") and not bounded)


@detect_in_definitions(_ROUTING)
def _counts_padding_rows(routing: Definition) -> Presence:
    """Return whether a router has no way to learn which rows are padding."""
    knows_padding = any(
        "mask" in name or "valid" in name for name in routing.identifiers | routing.parameters
    )
    return Presence.from_matches(not knows_padding, absent="padding_mask" in routing.parameters)


_BALANCING_FEATURES = frozenset({"moe", MEGATRONS_BALANCING})


@detect_in_definitions(_ROUTING, optional=(_APPLY_EXPERT_BIAS,))
def _detect_unbroadcast_padding_mask(routing: Definition, bias: Definition | None) -> Presence:
    """Return whether the map [tokens, experts] is combined with the mask [tokens] without a new dimension."""
    if "padding_mask" not in routing.parameters:
        return Presence.ABSENT  # a router has no parameter for padding
    if bias is None:
        return Presence.UNKNOWN
    combinations = (node for node in bias.iter_nodes(ast.BinOp) if isinstance(node.op, ast.BitAnd | ast.Mult))
    combined = {ast.unparse(node.right) for node in combinations}
    if combined == {"~padding_mask"}:
        passes_mask = routing.has_pattern("self._apply_expert_bias(routing_map, padding_mask=padding_mask)")
        return Presence.from_matches(passes_mask and not bias.find_assigned_values("padding_mask"))
    return Presence.from_matches(absent=any("unsqueeze" in right for right in combined))


@detect_in_source(_EXPERT_TOKEN_COUNT_TARGET, _TP_ALL_REDUCE_FUNCTION, _ROUTING)
def _detect_overwritten_rank_token_count(source: EvidenceDefinitions) -> Presence:
    """Return whether a count is summed over ranks in place and then read as the rank's own count."""
    count, reduce = source[_EXPERT_TOKEN_COUNT_TARGET], source[_TP_ALL_REDUCE_FUNCTION]
    if count is None:
        routing = source[_ROUTING]
        return Presence.from_matches(absent=routing and "padding_mask" not in routing.parameters)
    summed = [
        call.args[0] for call in count.find_calls("reduce_from_tensor_model_parallel_region") if call.args
    ]
    if len(summed) != 1 or reduce is None or not reduce.find_calls("all_reduce"):
        return Presence.UNKNOWN
    if not isinstance(summed[0], ast.Name):
        return Presence.from_matches(absent=ast.unparse(summed[0]).endswith(".clone()"))
    name = summed[0].id
    # Its sum is taken under an `if`, behind the call that has changed it.
    after = (node for branch in count.iter_nodes(ast.If) for node in ast.walk(branch))
    is_reread = any(isinstance(node, ast.Attribute) and ast.unparse(node) == f"{name}.sum" for node in after)
    read = [n for n in count.iter_nodes(ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
    return Presence.from_matches(is_reread, absent=len(read) == 1)


@detect_in_source(_GLOBAL_AUX_LOSS_TARGET, _ROUTING)
def _divides_by_last_microbatch_tokens(source: EvidenceDefinitions) -> Presence:
    """Return whether micro-batches add up the experts' counts, and not the count of tokens."""
    loss = source[_GLOBAL_AUX_LOSS_TARGET]
    if loss is None:
        return Presence.from_matches(absent=source[_ROUTING])
    summed = {ast.unparse(node.target) for node in loss.iter_nodes(ast.AugAssign)}
    known = summed == {"self.global_tokens_per_expert", "self.ga_steps"}
    return Presence.from_matches(known and loss.find_calls("switch_load_balancing_loss_func"))


@detect_in_source(_GPT_PREPROCESS, mtp.MODEL_FORWARD)
def _scatters_mask_only_with_embedding(source: EvidenceDefinitions) -> Presence:
    """Return whether only the stage with the embedding scatters the padding mask."""
    prepared = source[_GPT_PREPROCESS]
    if prepared is None or "padding_mask" not in prepared.parameters:
        older = source[mtp.MODEL_FORWARD]
        return Presence.from_matches(absent=older and "padding_mask" not in older.identifiers)
    sharing = [
        node
        for node in prepared.iter_nodes(ast.Assign)
        if ast.unparse(node.targets[0]) == "padding_mask"
        and "scatter_to_sequence_parallel_region" in ast.unparse(node.value)
    ]
    first = [n for n in prepared.iter_nodes(ast.If) if ast.unparse(n.test) == "self.pre_process"]
    inside = {id(node) for branch in first for statement in branch.body for node in ast.walk(statement)}
    return Presence.from_matches(sharing and all(id(node) in inside for node in sharing))


PATCHES = (
    Patch(
        id="balancing-per-token-ranks",
        replacements=_build_forward_step_replacements("scale_forward_step_token_losses"),
        why=(
            "With calculate_per_token_loss, the gradients of the experts' balancing loss and z-loss are "
            "divided by the number of tensor- and context-parallel ranks. At TP2 or CP2 their coefficients "
            "count half, and no error is raised."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#1652, #3672; fixed by #5047 in 0.19",
        range="<0.19",
        when=_BALANCING_FEATURES,
        assumes=(
            "calculate_per_token_loss is on, and the loss function returns three values: a sum, this rank's "
            "own token count, and what is reported. Several tensor-parallel ranks have sequence parallelism"
        ),
        defect=_weighs_by_own_tokens,
    ),
    Patch(
        id="balancing-mean-context-parallel",
        replacements=_build_forward_step_replacements("scale_cp_mean_aux_losses"),
        why=(
            "Without calculate_per_token_loss, the gradients of the experts' balancing loss and z-loss are "
            "divided by the number of context-parallel ranks. At CP2 their coefficients count half, and no "
            "error is raised."
        ),
        kind=DefectKind.SILENT,
        upstream="fixed by NVIDIA/Megatron-LM#2217 in 0.16",
        range="<0.16",
        when=_BALANCING_FEATURES | {"cp"},
        assumes="a mean loss: calculate_per_token_loss is off",
        defect=_detect_cp_unaware_loss_scale,
    ),
    Patch(
        id="balancing-per-token-rows",
        replacements=(Replacement(_SEQ_AUX_LOSS, "moe:scale_token_count_by_batch"),),
        why=(
            "With calculate_per_token_loss, the balancing loss over sequences (seq_aux_loss) is divided by "
            "the number of rows of a micro-batch. No error is raised."
        ),
        kind=DefectKind.SILENT,
        upstream="fixed by NVIDIA/Megatron-LM#5798 in 0.19",
        range=">=0.16,<0.19",
        when=_BALANCING_FEATURES,
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_weight_missing_batch_size,
    ),
    Patch(
        id="expert-bias-counts",
        replacements=(Replacement(_MAINTAIN_BIAS, "moe:keep_float32_counts"),),
        why=(
            "In a bf16 model the tokens of each expert are counted in bf16, which has no number between "
            "256 and 258. The bias that balances the experts then moves in the wrong direction."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7081",
        range="",
        when=frozenset({"expert-bias", "bf16"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_counts_in_bf16,
    ),
    Patch(
        id="padding-mask-expert-bias",
        replacements=(build_signature_replacement(_APPLY_EXPERT_BIAS, "moe:broadcast_padding_mask"),),
        why=(
            "If routers have an expert bias, a padding mask of shape [tokens] is applied to a tensor of "
            "shape [tokens, experts], which ends in a RuntimeError. With as many experts as tokens there "
            "is no error, but the mask leaves out experts instead of tokens."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#6111, fixed by #6114 on main",
        range=">=0.16",
        when=frozenset({"moe", "expert-bias", "padding-mask"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_detect_unbroadcast_padding_mask,
    ),
    Patch(
        id="padding-mask-own-count",
        replacements=(build_signature_replacement(_TP_REGION_REDUCE_TARGET, "moe:clone_before_all_reduce"),),
        why=(
            "With a padding mask and calculate_per_token_loss, the gradient of the balancing loss is tp x "
            "cp times too large. The reason: the rank's own count of tokens is overwritten with the sum "
            "over all these ranks."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7452 (finding 10), #7481 (open)",
        range=">=0.16",
        when=frozenset({"moe", "padding-mask"}),
        assumes=(
            "below 0.19 the loss of a rank is scaled to the tokens of all tp x cp ranks: there the defect"
            " makes up for a missing scale in sequence-parallel jobs"
        ),
        defect=_detect_overwritten_rank_token_count,
    ),
    Patch(
        id="global-aux-loss-tokens",
        replacements=(
            build_signature_replacement(_GLOBAL_AUX_LOSS_TARGET, "moe:enable_expert_count_rescaling"),
            Replacement(_SWITCH_BALANCING_LOSS_TARGET, "moe:rescale_global_loss_counts"),
        ),
        why=(
            "The global balancing loss depends on how the tokens are divided into micro-batches. Therefore "
            "it also depends on padding. It divides the experts' counts of all micro-batches so far by the "
            "tokens of the last micro-batch alone."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#7213, #7214 (open)",
        range=">=0.15",
        when=frozenset({"moe", "global-aux-loss"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_divides_by_last_microbatch_tokens,
    ),
)
TRAPS = (
    Trap(
        id="balancing-of-prompts",
        range="",
        defect=_detect_weighting_by_all_tokens,
        when=_BALANCING_FEATURES | {"per-token-loss"},
        why=(
            "Under a loss per token the weights of the experts' balancing loss and z-loss are too large,"
            " silently. The factor is the number of tokens per learned token: 4 if a quarter is learned."
        ),
        cause=(
            "the router multiplies by its tokens (transformer/moe/router.py), but finalize_model_grads"
            " divides by those that the loss counts; #5047 assumes that both are equal"
        ),
        kind=DefectKind.SILENT,
        instead="Use a mean loss, or multiply the coefficients by the share of learned tokens.",
    ),
    Trap(
        id="balancing-of-packs",
        range="",
        defect=_treats_rows_as_sequences,
        when=_BALANCING_FEATURES | {"seq-aux-loss", "packed"},
        why="The balancing loss over sequences (seq_aux_loss) treats a pack as one sequence.",
        cause=(
            "TopKRouter.routing treats rows of the logits as sequences, but a pack is one row; #6108,"
            " #6115 (open); tokens_per_sample of 0.19 helps if all sequences of a pack are equally long"
        ),
        kind=DefectKind.SILENT,
        instead="Do not pack, or use aux_loss.",
    ),
    Trap(
        id="balancing-of-padding",
        range="<0.16",
        defect=_counts_padding_rows,
        when=_BALANCING_FEATURES | {"padding"},
        why="Rows of padding are balanced like tokens: more padding means less balancing of tokens.",
        cause="TopKRouter.routing has no padding mask before #2142 in 0.16.0; #1984",
        kind=DefectKind.SILENT,
        instead="Leave padding out of micro-batches, or use megatron-core 0.16 or later, with the mask.",
    ),
    Trap(
        id="padding-mask-stages",
        range=">=0.16",
        defect=_scatters_mask_only_with_embedding,
        when=frozenset({"moe", "padding-mask", "sp", "pp"}),
        why="From the second stage on, routers get the mask of the whole sequence instead of their part.",
        cause=(
            "GPTModel._preprocess divides the mask only on the stage with the embedding, between the ranks"
            " of the layout; #7452 (finding 5), #5563, #5088"
        ),
        kind=DefectKind.SILENT,
        instead="Divide the mask before the model is called, or set parallel.pp to 1.",
        unshown="read only: no engine of ours gives a model this mask",
    ),
)
