"""Multi-token prediction: its roll to the next token, its loss, and the conditions under which it runs."""

import ast

from bundle.patches.definitions import Definition, EvidenceDefinitions
from bundle.patches.entry import (
    MEGATRONS_MTP_LOSS,
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
from bundle.patches.syntax import find_matches

MODULE = "megatron.core.transformer.multi_token_prediction"
_GPT_MODEL_MODULE = "megatron.core.models.gpt.gpt_model"
ROLL_TENSOR = f"{MODULE}:roll_tensor"
_ROLL_PACKED = f"{MODULE}:_roll_tensor_packed_seq"
_LOSS = f"{MODULE}:process_mtp_loss"
_POSTPROCESS = f"{_GPT_MODEL_MODULE}:GPTModel._postprocess"
MODEL_FORWARD = f"{_GPT_MODEL_MODULE}:GPTModel.forward"
_PREDICTION_BLOCK_FORWARD = (
    f"{MODULE}:MultiTokenPredictionBlock.forward"  # where the loss was computed to 0.13
)
_LOSS_COMPUTATION_TARGETS = (
    _LOSS,
    _POSTPROCESS,
    MODEL_FORWARD,
    _PREDICTION_BLOCK_FORWARD,
)  # where the loss has been computed
_CU_SEQLENS_CHOICE_TARGET = f"{MODULE}:_get_packed_roll_cu_seqlens"  # where they are chosen in newer code
LAYER = f"{MODULE}:MultiTokenPredictionLayer"
LAYER_FORWARD = f"{LAYER}.forward"
_EMBEDDINGS = f"{LAYER}._get_embeddings"
_PREDICTION_BLOCK_FORWARD = f"{MODULE}:MultiTokenPredictionBlock.forward"
_OLD_ROLL_PARAMETERS = {"tensor", "shifts", "dims"}  # the parameters of a roll to 0.13
_KNOWN_CONDITION_IDENTIFIERS = {
    "self",
    "mtp_process",
    "mtp_in_postprocess",
    "in_inference_mode",
    "is_spec_decode",
}


@detect_in_source(ROLL_TENSOR, MODEL_FORWARD)
def _rolls_within_rank(source: EvidenceDefinitions) -> Presence:
    """Return whether a roll has no parameter for other ranks."""
    roll = source[ROLL_TENSOR]
    if roll is None:
        return Presence.from_matches(absent=has_no_mtp_support(source))
    return Presence.from_matches(
        roll.parameters == _OLD_ROLL_PARAMETERS, absent="cp_group" in roll.parameters
    )


def has_no_mtp_support(source: EvidenceDefinitions) -> bool:
    """Return whether the model has no multi-token prediction at all, as before 0.12."""
    model = source[MODEL_FORWARD]
    return (
        model is not None
        and not source.has_module(ROLL_TENSOR)
        and not any("mtp" in n for n in model.identifiers)
    )


@detect_in_source(ROLL_TENSOR, _ROLL_PACKED, _CU_SEQLENS_CHOICE_TARGET)
def _rolls_at_unpadded_boundaries(source: EvidenceDefinitions) -> Presence:
    """Return whether packs are rolled at their boundaries without padding."""
    roll, codes = source[ROLL_TENSOR], source.find_existing(_ROLL_PACKED, _CU_SEQLENS_CHOICE_TARGET)
    prefers = "packed_seq_params.cu_seqlens_q_padded if _ else packed_seq_params.cu_seqlens_q"
    knows_none = not codes and roll is not None and "packed_seq_params" not in roll.parameters
    return Presence.from_matches(
        any(
            code.has_pattern("cu_seqlens = packed_seq_params.cu_seqlens_q")
            for code in source.find_existing(_ROLL_PACKED)
        ),
        absent=knows_none or any(code.has_pattern(prefers) for code in codes),
    )


@detect_in_source(*_LOSS_COMPUTATION_TARGETS)
def _scales_by_local_counts(source: EvidenceDefinitions) -> Presence:
    """Return whether the loss is scaled by two token counts, neither of which is summed over the ranks."""
    loss = source[_LOSS]
    if loss is None:  # the model, or the block of layers, divides by one count: no ratio
        return Presence.from_matches(absent=_has_loss_division_by_count(source))
    if "original_num_tokens" not in loss.identifiers:
        return Presence.from_matches(absent=loss.has_pattern("_ / num_tokens"))
    return Presence.from_matches(
        loss.has_pattern("original_num_tokens / _") and not loss.find_calls("all_reduce")
    )


@detect_in_source(ROLL_TENSOR, *_LOSS_COMPUTATION_TARGETS)
def _divides_by_local_count(source: EvidenceDefinitions) -> Presence:
    """Return whether a depth's loss is divided only by the token count that one rank's roll returns."""
    roll, loss = source[ROLL_TENSOR], source[_LOSS]
    if roll is None:
        return Presence.from_matches(absent=has_no_mtp_support(source))
    if roll.parameters == _OLD_ROLL_PARAMETERS or (loss and "original_num_tokens" in loss.identifiers):
        return Presence.ABSENT  # there is no count over ranks yet, or a ratio of two
    counts = "cp_group" in roll.parameters and not roll.find_calls("all_reduce")
    return Presence.from_matches(counts and _has_loss_division_by_count(source))


def _has_loss_division_by_count(source: EvidenceDefinitions) -> bool:
    """Return whether one of the functions that compute the loss divides it by the count of its roll."""
    return any(
        p.find_calls("roll_tensor") and p.has_pattern("_ / num_tokens")
        for p in source.find_existing(*_LOSS_COMPUTATION_TARGETS)
    )


@detect_in_source(ROLL_TENSOR, *_LOSS_COMPUTATION_TARGETS)
def _underweights_rolled_sum(source: EvidenceDefinitions) -> Presence:
    """Return whether the sum over the tokens left after a roll is weighted as if no token were gone."""
    scaling = [
        place
        for place in source.find_existing(*_LOSS_COMPUTATION_TARGETS)
        if "MTPLossAutoScaler" in place.identifiers
    ]
    if not scaling:
        return Presence.from_matches(absent=has_no_mtp_support(source))
    weighted = all(p.has_pattern("mtp_loss_scale * mtp_loss * (original_num_tokens / _)") for p in scaling)
    plain = any(p.has_pattern("MTPLossAutoScaler.apply(_, mtp_loss_scale * mtp_loss)") for p in scaling)
    return Presence.from_matches(plain and not weighted, absent=weighted)


@detect_in_definitions((_POSTPROCESS, MODEL_FORWARD))
def _runs_for_zero_layers(model: Definition) -> Presence:
    """Return whether the model checks only that the number of layers is not None, and so runs for 0."""
    gates = [n for n in model.iter_nodes(ast.If) if any(map(_is_mtp_condition, _split_conjunction(n.test)))]
    gated = {inner for node in gates for inner in ast.walk(node)}
    mentioned = set(find_matches("self.config.mtp_num_layers", model.walk()))
    # outside the gate the number may be checked in a way that is not recognised here
    return Presence.from_matches(
        model.has_pattern("self.config.mtp_num_layers is not None"),
        absent=mentioned <= gated | _collect_branch_conditions(model),
    )


def _is_mtp_condition(test: ast.expr) -> bool:
    gates = ("self.config.mtp_num_layers", "self.mtp_process", "mtp_in_postprocess")
    return any(find_matches(gate, [test]) for gate in gates)


def _split_conjunction(test: ast.expr) -> list[ast.expr]:
    """Return the conditions that must all hold."""
    return list(test.values) if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _collect_branch_conditions(model: Definition) -> set[ast.AST]:
    """Return the expressions of which only the truth counts: the conditions of branches."""
    branches: list[ast.If | ast.IfExp] = [*model.iter_nodes(ast.If), *model.iter_nodes(ast.IfExp)]
    return {condition for branch in branches for condition in _split_conjunction(branch.test)}


@detect_in_source(_POSTPROCESS, MODEL_FORWARD, _LOSS, ROLL_TENSOR)
def _runs_without_labels(source: EvidenceDefinitions) -> Presence:
    """Return whether the MTP block is called without a check for labels, and none are derived."""
    return Presence.ABSENT if _derives_labels_from_input(source) else _calls_without_labels(source)


@detect_in_source(_POSTPROCESS, MODEL_FORWARD, _LOSS, ROLL_TENSOR)
def _trains_on_input_derived_labels(source: EvidenceDefinitions) -> Presence:
    """Return whether the MTP block is called without a check for labels, which are derived from the input."""
    return _calls_without_labels(source) if _derives_labels_from_input(source) else Presence.ABSENT


def _derives_labels_from_input(source: EvidenceDefinitions) -> bool:
    """Return whether the loss gets the input, which it needs only to derive missing labels."""
    loss, model = source[_LOSS], source[_POSTPROCESS] or source[MODEL_FORWARD]
    passes_input = model is not None and bool(model.find_keyword_values("process_mtp_loss", "input_ids"))
    return passes_input and loss is not None and "input_ids" in loss.parameters


def _calls_without_labels(source: EvidenceDefinitions) -> Presence:
    calling = [code for code in source.find_existing(_POSTPROCESS, MODEL_FORWARD) if code.find_calls("mtp")]
    return (
        _classify_call_conditions(calling[0])
        if calling
        else Presence.from_matches(absent=has_no_mtp_support(source))
    )


def _classify_call_conditions(code: Definition) -> Presence:
    """Return the presence of the defect by the conditions of the call.

    PRESENT: the conditions have only known names. ABSENT: one of them asks for labels. UNKNOWN: any other.
    """
    calls = set(code.find_calls("mtp"))
    tests = [
        node.test
        for node in code.iter_nodes(ast.If)
        if calls & {n for statement in node.body for n in ast.walk(statement)}
    ]
    words = {
        word for test in tests for node in ast.walk(test) for word in _list_single_node_identifiers(node)
    }
    return Presence.from_matches(
        words <= _KNOWN_CONDITION_IDENTIFIERS, absent=any("labels" in word for word in words)
    )


def _list_single_node_identifiers(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ()
    return tuple(getattr(node, field) for field in ("id", "attr") if hasattr(node, field))


_MEGATRON_LOSS_FEATURES = frozenset({"mtp", MEGATRONS_MTP_LOSS})
_MEGATRON_LOSS_CP_FEATURES = _MEGATRON_LOSS_FEATURES | {"cp"}


@detect_in_source(LAYER_FORWARD, MODEL_FORWARD, ROLL_TENSOR)
def _refuses_packs(source: EvidenceDefinitions) -> Presence:
    if has_no_mtp_support(source):
        return Presence.ABSENT
    forward = source[LAYER_FORWARD]
    if forward is None or "packed_seq_params" not in forward.parameters:
        return Presence.UNKNOWN
    asserted = ("assert packed_seq_params is None", "assert packed_seq_params is None, _")
    tests = [node.test for node in forward.iter_nodes(ast.Assert)]
    tests += [
        n.test
        for n in forward.iter_nodes(ast.If)
        if any(isinstance(statement, ast.Raise) for statement in ast.walk(n))
    ]
    refusing = any(find_matches("packed_seq_params", ast.walk(test)) for test in tests)
    return Presence.from_matches(any(map(forward.has_pattern, asserted)), absent=not refusing)


@detect_in_source(LAYER, MODEL_FORWARD, ROLL_TENSOR)
def _detect_reducing_gather_backward(source: EvidenceDefinitions) -> Presence:
    """Return whether the projection is gathered by the function whose backward pass sums over the ranks."""
    if has_no_mtp_support(source):
        return Presence.ABSENT
    layer = source[LAYER]
    if layer is None:
        return Presence.UNKNOWN
    return Presence.from_matches(
        layer.find_calls("all_gather_last_dim_from_tensor_parallel_region"),
        absent=layer.find_calls("gather_from_tensor_model_parallel_region"),
    )


@detect_in_definitions((_EMBEDDINGS, _PREDICTION_BLOCK_FORWARD))  # to 0.13 the block takes them itself
def _keeps_embeddings_unscattered(code: Definition) -> Presence:
    """Return whether the prediction layers take the embeddings as the embedding returns them."""
    if not code.find_calls("embedding"):
        return Presence.UNKNOWN
    known = {"embedding(input_ids=input_ids, position_ids=position_ids)", "decoder_input.detach()"}
    scattered = code.find_calls("scatter_to_sequence_parallel_region")
    return Presence.from_matches(
        not scattered and code.find_assigned_values("decoder_input") <= known, absent=scattered
    )


PATCHES = (
    Patch(
        id="mtp-context-parallel-roll",
        replacements=(Replacement(ROLL_TENSOR, "mtp:roll_over_context_ranks"),),
        why=(
            "Under context parallelism each rank looks for the next token among its own tokens: wrong "
            "gradients."
        ),
        kind=DefectKind.SILENT,
        upstream="fixed upstream in 0.14; found by comparing CP2 with CP1 (gradients off by 5e-1)",
        range="<0.14",
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "ids, labels and loss mask arrive cut for context parallel, two chunks a rank, and no "
            "token count has been summed over those ranks"
        ),
        defect=_rolls_within_rank,
    ),
    Patch(
        id="mtp-packed-roll-boundaries",
        replacements=(Replacement(_ROLL_PACKED, "mtp:roll_packed_by_gather"),),
        why=(
            "With padding between packed sequences, the labels of multi-token prediction come from the "
            "wrong sequence. The gradients are wrong, and no error is raised. The reason: tokens are "
            "shifted at the unpadded boundaries. Every boundary is also copied to the host: 3,600 "
            "unnecessary waits in a step."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing padded with unpadded packing (gradients off by 1e+0)",
        range=">=0.16",
        when=frozenset({"mtp", "packed"}),
        assumes="a pack with padding comes with its padded boundaries, cu_seqlens_*_padded",
        defect=_rolls_at_unpadded_boundaries,
    ),
    Patch(
        id="mtp-loss-context-parallel-count",
        replacements=(Replacement(ROLL_TENSOR, "mtp:average_rolled_token_count"),),
        why=(
            "The loss of each depth of multi-token prediction is divided by the tokens of one context-"
            "parallel rank, not of all. The logged loss is then the mean of the ranks' means. The "
            "gradients have the same error unless calculate_per_token_loss is on."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing CP2 with CP1 (log off by 5e-3, gradients by 1e-1)",
        range=">=0.14,<0.17",  # where the code moved; mtp-loss-context-parallel-normalisation goes on there
        when=_MEGATRON_LOSS_CP_FEATURES,
        assumes=(
            "the caller sums no token count over context-parallel ranks; it averages gradients over these "
            "ranks or, with calculate_per_token_loss, divides them by the number of all tokens"
        ),
        defect=_divides_by_local_count,
    ),
    Patch(
        id="mtp-loss-context-parallel-normalisation",
        replacements=(
            Replacement(ROLL_TENSOR, "mtp:average_rolled_token_count"),
            Replacement(_LOSS, "mtp:average_cp_token_count"),
        ),
        why=(
            "The loss of each depth of multi-token prediction is scaled by the ratio of two token counts "
            "of one context-parallel rank. But the shift by one token removes a token from only one of "
            "these ranks."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing CP2 with CP1 (gradients off by 2e-1)",
        range=">=0.17",
        when=_MEGATRON_LOSS_CP_FEATURES,
        assumes=(
            "the caller sums no token count over context-parallel ranks; with calculate_per_token_loss, its "
            "loss function returns three values"
        ),
        defect=_scales_by_local_counts,
    ),
    Patch(
        id="mtp-per-token-weight",
        replacements=(Replacement(ROLL_TENSOR, "mtp:rescale_rolled_mask_sum"),),
        why=(
            "With calculate_per_token_loss, multi-token prediction has too small a weight, most of all in "
            "short sequences. The sum of its loss loses one token with each depth, but it is divided by "
            "the tokens of the main loss."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#2417, #1532; fixed by #3159 in 0.17",
        range="<0.17",
        when=_MEGATRON_LOSS_FEATURES,
        assumes="the loss mask is of floats, and labels and mask arrive cut for context parallel",
        defect=_underweights_rolled_sum,
    ),
    Patch(
        id="mtp-zero-layers",
        replacements=(
            build_signature_replacement(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "mtp:disable_empty_mtp",
            ),
        ),
        why="mtp_num_layers=0 enters the branch of multi-token prediction, which then needs labels.",
        kind=DefectKind.ERROR,
        upstream="verl-project/verl#6374",
        range=">=0.16,<0.17",
        assumes=NO_CALLER_ASSUMPTION,
        defect=_runs_for_zero_layers,
    ),
    Patch(
        id="mtp-without-labels",
        replacements=(build_signature_replacement(MODEL_FORWARD, "mtp:disable_mtp_without_labels"),),
        why=(
            "A call of the model without labels, as in reinforcement learning, ends in an error up to 0.16."
            " In 0.17 and 0.18 the prediction layers run, but nothing uses their output."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#4549; measured in every release",
        range="<0.19",  # where mtp-labels-from-input begins
        when=frozenset({"mtp"}),
        assumes=NO_CALLER_ASSUMPTION,
        defect=_runs_without_labels,
    ),
    Patch(
        id="mtp-labels-from-input",
        replacements=(build_signature_replacement(MODEL_FORWARD, "mtp:disable_mtp_without_labels"),),
        why=(
            "Reinforcement learning calls the model without labels to get logits. megatron-core then derives"
            " labels from the input and trains the MTP layers with these labels, prompt tokens included."
            " In evaluation megatron-core also logs an MTP loss."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#3457 adds this intentionally in 0.19; measured there",
        range=">=0.19",
        when=frozenset({"mtp"}),
        assumes=(
            "calls without labels are not meant to train prediction layers; megatron-core trains them then"
        ),
        defect=_trains_on_input_derived_labels,
    ),
    Patch(
        id="mtp-whole-embeddings",
        replacements=(build_signature_replacement(_PREDICTION_BLOCK_FORWARD, "mtp:scatter_embeddings"),),
        why=(
            "Multi-token prediction fails under sequence parallelism if the embedding does not divide the"
            " sequence (scatter_embedding_sequence_parallel=False, as in multimodal models)."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#6256, on main since August 2026; NVIDIA-NeMo/RL#3494",
        range="",
        when=frozenset({"mtp", "sp", "multimodal"}),
        assumes="the caller divides the decoder_input that it passes to the model",
        defect=_keeps_embeddings_unscattered,
    ),
)
TRAPS = (
    Trap(
        id="mtp-packed",
        range="<0.16",
        defect=_refuses_packs,
        when=frozenset({"mtp", "packed"}),
        why="Multi-token prediction refuses packed sequences.",
        cause="MultiTokenPredictionLayer.forward asserts packed_seq_params is None; lifted in 0.16.0",
        kind=DefectKind.ERROR,
        instead="Set data.packed to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="mtp-tensor-parallel",
        range="<0.13",
        defect=_detect_reducing_gather_backward,
        when=frozenset({"mtp", "tp"}),
        why="The gradients of multi-token prediction are reduced once too often over tensor-parallel ranks.",
        cause=(
            "MultiTokenPredictionLayer.forward gathers with all_gather_last_dim_from_tensor_parallel_region, "
            "whose backward reduces; 0.13.0 uses gather_from_tensor_model_parallel_region"
        ),
        kind=DefectKind.SILENT,
        instead="Set parallel.tp to 1, or use megatron-core 0.13 or later.",
    ),
)
