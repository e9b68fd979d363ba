"""Multi-token prediction: its roll to the next token, its loss, and when it runs."""

import ast

from bundle.patches.definitions import Definition, Evidence
from bundle.patches.entry import (
    MEGATRONS_MTP_LOSS,
    NOTHING,
    DefectKind,
    Patch,
    Presence,
    Replacement,
    Trap,
    asks,
    called,
    reads,
)
from bundle.patches.syntax import found

MODULE = "megatron.core.transformer.multi_token_prediction"
_GPT = "megatron.core.models.gpt.gpt_model"
ROLL = f"{MODULE}:roll_tensor"
_ROLL_PACKED = f"{MODULE}:_roll_tensor_packed_seq"
_LOSS = f"{MODULE}:process_mtp_loss"
_POSTPROCESS = f"{_GPT}:GPTModel._postprocess"
FORWARD = f"{_GPT}:GPTModel.forward"
_BLOCK = f"{MODULE}:MultiTokenPredictionBlock.forward"  # where the loss was computed to 0.13
_PLACES = (_LOSS, _POSTPROCESS, FORWARD, _BLOCK)  # where the loss has been computed
_CHOSEN_BOUNDARIES = f"{MODULE}:_get_packed_roll_cu_seqlens"  # where they are chosen in newer code
LAYER = f"{MODULE}:MultiTokenPredictionLayer"
LAYER_FORWARD = f"{LAYER}.forward"
_EMBEDDINGS = f"{LAYER}._get_embeddings"
_BLOCK = f"{MODULE}:MultiTokenPredictionBlock.forward"
_ROLLED = {"tensor", "shifts", "dims"}  # what a roll is given to 0.13
_KNOWN_GATES = {"self", "mtp_process", "mtp_in_postprocess", "in_inference_mode", "is_spec_decode"}


@asks(ROLL, FORWARD)
def _roll_within_rank(source: Evidence) -> Presence:
    """Whether a roll cannot be told of other ranks."""
    roll = source[ROLL]
    if roll is None:
        return Presence.told(absent=without_prediction(source))
    return Presence.told(roll.parameters == _ROLLED, absent="cp_group" in roll.parameters)


def without_prediction(source: Evidence) -> bool:
    """Whether the model knows of no further tokens at all, as before 0.12."""
    model = source[FORWARD]
    return model is not None and not source.has_module(ROLL) and not any("mtp" in n for n in model.names)


@asks(ROLL, _ROLL_PACKED, _CHOSEN_BOUNDARIES)
def _boundaries(source: Evidence) -> Presence:
    """Whether packs are rolled at their boundaries without padding."""
    roll, codes = source[ROLL], source.there(_ROLL_PACKED, _CHOSEN_BOUNDARIES)
    prefers = "packed_seq_params.cu_seqlens_q_padded if _ else packed_seq_params.cu_seqlens_q"
    knows_none = not codes and roll is not None and "packed_seq_params" not in roll.parameters
    return Presence.told(
        any(code.has("cu_seqlens = packed_seq_params.cu_seqlens_q") for code in source.there(_ROLL_PACKED)),
        absent=knows_none or any(code.has(prefers) for code in codes),
    )


@asks(*_PLACES)
def _count_of_one_rank(source: Evidence) -> Presence:
    """Whether the loss is scaled by two token counts of which neither is summed over the ranks."""
    loss = source[_LOSS]
    if loss is None:  # the model, or the block of layers, divides by one count: no ratio
        return Presence.told(absent=_dividing(source))
    if "original_num_tokens" not in loss.names:
        return Presence.told(absent=loss.has("_ / num_tokens"))
    return Presence.told(loss.has("original_num_tokens / _") and not loss.calls("all_reduce"))


@asks(ROLL, *_PLACES)
def _count_of_one_rank_divides(source: Evidence) -> Presence:
    """Whether a depth's loss is divided by the count that the roll of one rank returns, and by that alone."""
    roll, loss = source[ROLL], source[_LOSS]
    if roll is None:
        return Presence.told(absent=without_prediction(source))
    if roll.parameters == _ROLLED or (loss and "original_num_tokens" in loss.names):
        return Presence.ABSENT  # there is no count over ranks yet, or a ratio of two
    counts = "cp_group" in roll.parameters and not roll.calls("all_reduce")
    return Presence.told(counts and _dividing(source))


def _dividing(source: Evidence) -> bool:
    """Whether one of the places where the loss has been computed divides it by what its roll returns."""
    return any(p.calls("roll_tensor") and p.has("_ / num_tokens") for p in source.there(*_PLACES))


@asks(ROLL, *_PLACES)
def _rolled_sum(source: Evidence) -> Presence:
    """Whether the sum over the tokens that a roll leaves is weighted as if none had gone."""
    scaling = [place for place in source.there(*_PLACES) if "MTPLossAutoScaler" in place.names]
    if not scaling:
        return Presence.told(absent=without_prediction(source))
    weighted = all(p.has("mtp_loss_scale * mtp_loss * (original_num_tokens / _)") for p in scaling)
    plain = any(p.has("MTPLossAutoScaler.apply(_, mtp_loss_scale * mtp_loss)") for p in scaling)
    return Presence.told(plain and not weighted, absent=weighted)


@reads((_POSTPROCESS, FORWARD))
def _zero_is_some(model: Definition) -> Presence:
    """Whether the model asks if the number of layers is None, and so takes 0 for some."""
    asked = [n for n in model.each(ast.If) if any(map(_is_gate, _all_of(n.test)))]
    gated = {inner for node in asked for inner in ast.walk(node)}
    mentioned = set(found("self.config.mtp_num_layers", model.walk()))
    # elsewhere than behind the gate it may be asked in a way that is not seen here
    return Presence.told(
        model.has("self.config.mtp_num_layers is not None"), absent=mentioned <= gated | _truths(model)
    )


def _is_gate(test: ast.expr) -> bool:
    gates = ("self.config.mtp_num_layers", "self.mtp_process", "mtp_in_postprocess")
    return any(found(gate, [test]) for gate in gates)


def _all_of(test: ast.expr) -> list[ast.expr]:
    """The conditions that must all hold."""
    return list(test.values) if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _truths(model: Definition) -> set[ast.AST]:
    """What stands where only its truth counts."""
    branches: list[ast.If | ast.IfExp] = [*model.each(ast.If), *model.each(ast.IfExp)]
    return {condition for branch in branches for condition in _all_of(branch.test)}


@asks(_POSTPROCESS, FORWARD, _LOSS, ROLL)
def _runs_without_labels(source: Evidence) -> Presence:
    """Whether the MTP block is called under no condition that asks for labels, and none are made up."""
    return Presence.ABSENT if _labels_made_up(source) else _called_without_labels(source)


@asks(_POSTPROCESS, FORWARD, _LOSS, ROLL)
def _trains_on_the_input(source: Evidence) -> Presence:
    """Whether it is called so, and labels are made of the input."""
    return _called_without_labels(source) if _labels_made_up(source) else Presence.ABSENT


def _labels_made_up(source: Evidence) -> bool:
    """Whether the loss is given the input, which it needs for nothing but labels that are not given."""
    loss, model = source[_LOSS], source[_POSTPROCESS] or source[FORWARD]
    given = model is not None and bool(model.given("process_mtp_loss", "input_ids"))
    return given and loss is not None and "input_ids" in loss.parameters


def _called_without_labels(source: Evidence) -> Presence:
    calling = [code for code in source.there(_POSTPROCESS, FORWARD) if code.calls("mtp")]
    return _asked_for(calling[0]) if calling else Presence.told(absent=without_prediction(source))


def _asked_for(code: Definition) -> Presence:
    """By what is asked on the way to the call: labels of some kind, only what is known, or something else."""
    calls = set(code.calls("mtp"))
    tests = [
        node.test
        for node in code.each(ast.If)
        if calls & {n for statement in node.body for n in ast.walk(statement)}
    ]
    words = {word for test in tests for node in ast.walk(test) for word in _words(node)}
    return Presence.told(words <= _KNOWN_GATES, absent=any("labels" in word for word in words))


def _words(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ()
    return tuple(getattr(node, field) for field in ("id", "attr") if hasattr(node, field))


_LOSS_OF_MEGATRON = frozenset({"mtp", MEGATRONS_MTP_LOSS})
_LOSS_OVER_RANKS = _LOSS_OF_MEGATRON | {"cp"}


@asks(LAYER_FORWARD, FORWARD, ROLL)
def _packs_refused(source: Evidence) -> Presence:
    if without_prediction(source):
        return Presence.ABSENT
    forward = source[LAYER_FORWARD]
    if forward is None or "packed_seq_params" not in forward.parameters:
        return Presence.UNKNOWN
    asserted = ("assert packed_seq_params is None", "assert packed_seq_params is None, _")
    tests = [node.test for node in forward.each(ast.Assert)]
    tests += [n.test for n in forward.each(ast.If) if any(isinstance(of, ast.Raise) for of in ast.walk(n))]
    refusing = any(found("packed_seq_params", ast.walk(test)) for test in tests)
    return Presence.told(any(map(forward.has, asserted)), absent=not refusing)


@asks(LAYER, FORWARD, ROLL)
def _gather_that_reduces(source: Evidence) -> Presence:
    """Whether the projection is gathered by the function whose backward pass sums over the ranks."""
    if without_prediction(source):
        return Presence.ABSENT
    layer = source[LAYER]
    if layer is None:
        return Presence.UNKNOWN
    return Presence.told(
        layer.calls("all_gather_last_dim_from_tensor_parallel_region"),
        absent=layer.calls("gather_from_tensor_model_parallel_region"),
    )


@reads((_EMBEDDINGS, _BLOCK))  # to 0.13 the block takes them itself
def _embeddings_of_the_whole_sequence(code: Definition) -> Presence:
    """Whether the embeddings of the prediction layers are taken as the embedding returns them."""
    if not code.calls("embedding"):
        return Presence.UNKNOWN
    known = {"embedding(input_ids=input_ids, position_ids=position_ids)", "decoder_input.detach()"}
    scattered = code.calls("scatter_to_sequence_parallel_region")
    return Presence.told(not scattered and code.assigned("decoder_input") <= known, absent=scattered)


PATCHES = (
    Patch(
        id="mtp-context-parallel-roll",
        replacements=(Replacement(ROLL, "mtp:roll_over_ranks"),),
        why="Under context parallelism the next token is looked for on the own rank: wrong gradients.",
        kind=DefectKind.SILENT,
        upstream="fixed upstream in 0.14; found by comparing CP2 with CP1 (gradients off by 5e-1)",
        range="<0.14",
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "ids, labels and loss mask arrive cut for context parallel, two chunks a rank, and no "
            "token count has been summed over those ranks"
        ),
        defect=_roll_within_rank,
    ),
    Patch(
        id="mtp-packed-roll-boundaries",
        replacements=(Replacement(_ROLL_PACKED, "mtp:rolled_by_one_gather"),),
        why=(
            "Tokens are rolled at the unpadded boundaries of packed sequences, and so across sequences as "
            "soon as there is padding between them: wrong gradients, silently. And every boundary is read "
            "back from the device: 3,600 waits in a step that needs none."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing padded with unpadded packing (gradients off by 1e+0)",
        range=">=0.16",
        when=frozenset({"mtp", "packed"}),
        assumes="a pack with padding comes with its padded boundaries, cu_seqlens_*_padded",
        defect=_boundaries,
    ),
    Patch(
        id="mtp-loss-context-parallel-count",
        replacements=(Replacement(ROLL, "mtp:count_over_ranks"),),
        why=(
            "The loss of each depth is divided by the tokens of one context-parallel rank: the logged loss "
            "is a mean of means, and so are the gradients unless the loss is one per token."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing CP2 with CP1 (log off by 5e-3, gradients by 1e-1)",
        range=">=0.14,<0.17",  # where the code moved; mtp-loss-context-parallel-normalisation goes on there
        when=_LOSS_OVER_RANKS,
        assumes=(
            "no token count has been summed over context-parallel ranks, and gradients are averaged "
            "over them, or divided by all tokens under a loss per token"
        ),
        defect=_count_of_one_rank_divides,
    ),
    Patch(
        id="mtp-loss-context-parallel-normalisation",
        replacements=(
            Replacement(ROLL, "mtp:count_over_ranks"),
            Replacement(_LOSS, "mtp:count_mask_over_ranks"),
        ),
        why=(
            "The loss of each depth is scaled by the ratio of two token counts of one context-parallel rank, "
            "although the token that the roll removes is missing on one rank only."
        ),
        kind=DefectKind.SILENT,
        upstream="not reported; found by comparing CP2 with CP1 (gradients off by 2e-1)",
        range=">=0.17",
        when=_LOSS_OVER_RANKS,
        assumes=(
            "no token count has been summed over context-parallel ranks; under a loss per token the "
            "loss function returns three values"
        ),
        defect=_count_of_one_rank,
    ),
    Patch(
        id="mtp-per-token-weight",
        replacements=(Replacement(ROLL, "mtp:as_heavy_as_before"),),
        why=(
            "Under a loss per token the prediction of further tokens weighs too little, much too little in "
            "short sequences: its sum has a token less for each roll, and is divided by the tokens of the "
            "main loss."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#2417, #1532; fixed by #3159 in 0.17",
        range="<0.17",
        when=_LOSS_OF_MEGATRON,
        assumes="the loss mask is of floats, and labels and mask arrive cut for context parallel",
        defect=_rolled_sum,
    ),
    Patch(
        id="mtp-zero-layers",
        replacements=(
            called(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "mtp:no_layers",
            ),
        ),
        why="mtp_num_layers=0 enters the branch of multi-token prediction, which then wants labels.",
        kind=DefectKind.ERROR,
        upstream="verl-project/verl#6374",
        range=">=0.16,<0.17",
        assumes=NOTHING,
        defect=_zero_is_some,
    ),
    Patch(
        id="mtp-without-labels",
        replacements=(called(FORWARD, "mtp:only_with_labels"),),
        why=(
            "Logits without labels, as reinforcement learning wants them, are an error to 0.16; in 0.17 and "
            "0.18 the prediction layers run for nothing."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#4549; measured in every release",
        range="<0.19",  # where mtp-labels-from-input begins
        when=frozenset({"mtp"}),
        assumes=NOTHING,
        defect=_runs_without_labels,
    ),
    Patch(
        id="mtp-labels-from-input",
        replacements=(called(FORWARD, "mtp:only_with_labels"),),
        why=(
            "Logits without labels, as reinforcement learning wants them: the prediction layers are trained "
            "on the input all the same, prompts too, and their loss is logged in evaluation."
        ),
        kind=DefectKind.SILENT,
        upstream="NVIDIA/Megatron-LM#3457 brings it on purpose in 0.19; measured there",
        range=">=0.19",
        when=frozenset({"mtp"}),
        assumes=(
            "who gives the model no labels wants no prediction layers trained; megatron-core means such "
            "calls to train them"
        ),
        defect=_trains_on_the_input,
    ),
    Patch(
        id="mtp-whole-embeddings",
        replacements=(called(_BLOCK, "mtp:scattered_embeddings"),),
        why=(
            "Multi-token prediction fails under sequence parallelism in a model whose embedding does not "
            "share out the sequence (scatter_embedding_sequence_parallel=False, as in multimodal models)."
        ),
        kind=DefectKind.ERROR,
        upstream="NVIDIA/Megatron-LM#6256, on main since August 2026; NVIDIA-NeMo/RL#3494",
        range="",
        when=frozenset({"mtp", "sp", "multimodal"}),
        assumes="the caller shares out what it gives the model as decoder_input",
        defect=_embeddings_of_the_whole_sequence,
    ),
)
TRAPS = (
    Trap(
        id="mtp-packed",
        range="<0.16",
        defect=_packs_refused,
        when=frozenset({"mtp", "packed"}),
        why="Multi-token prediction refuses packed sequences.",
        cause="MultiTokenPredictionLayer.forward asserts packed_seq_params is None; lifted in 0.16.0",
        kind=DefectKind.ERROR,
        instead="Set data.packed to false, or use megatron-core 0.16 or later.",
    ),
    Trap(
        id="mtp-tensor-parallel",
        range="<0.13",
        defect=_gather_that_reduces,
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
