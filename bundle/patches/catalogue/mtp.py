"""Multi-token prediction: its roll to the next token, its loss, and when it runs."""

import ast
from typing import TYPE_CHECKING

from bundle.patches.entry import MEGATRONS_MTP_LOSS, NOTHING, Patch, Presence, Replacement
from bundle.patches.pattern import found

if TYPE_CHECKING:
    from bundle.patches.definitions import Definition, Evidence

_MODULE = "megatron.core.transformer.multi_token_prediction"
_GPT = "megatron.core.models.gpt.gpt_model"
ROLL = f"{_MODULE}:roll_tensor"
_ROLL_PACKED = f"{_MODULE}:_roll_tensor_packed_seq"
_LOSS = f"{_MODULE}:process_mtp_loss"
_POSTPROCESS = f"{_GPT}:GPTModel._postprocess"
FORWARD = f"{_GPT}:GPTModel.forward"
_BLOCK = f"{_MODULE}:MultiTokenPredictionBlock.forward"  # where the loss was computed to 0.13
_CHOSEN_BOUNDARIES = f"{_MODULE}:_get_packed_roll_cu_seqlens"  # where they are chosen in newer code
_KNOWN_GATES = {"self", "mtp_process", "mtp_in_postprocess", "in_inference_mode", "is_spec_decode"}


def _roll_within_rank(source: "Evidence") -> Presence:
    roll = source[ROLL]
    if roll is None:
        return Presence.ABSENT if without_prediction(source) else Presence.UNKNOWN
    if roll.parameters == {"tensor", "shifts", "dims"}:
        return Presence.PRESENT
    return Presence.ABSENT if "cp_group" in roll.parameters else Presence.UNKNOWN


def without_prediction(source: "Evidence") -> bool:
    """Whether the model knows of no further tokens at all, as before 0.12."""
    model = source[FORWARD]
    return model is not None and not source.has_module(ROLL) and not any("mtp" in n for n in model.names)


def _boundaries(source: "Evidence") -> Presence:
    roll, packed, chosen = source[ROLL], source[_ROLL_PACKED], source[_CHOSEN_BOUNDARIES]
    prefers = "packed_seq_params.cu_seqlens_q_padded if _ else packed_seq_params.cu_seqlens_q"
    if packed is not None and packed.has("cu_seqlens = packed_seq_params.cu_seqlens_q"):
        return Presence.PRESENT
    if any(code is not None and code.has(prefers) for code in (packed, chosen)):
        return Presence.ABSENT
    if packed is None and chosen is None and roll is not None and "packed_seq_params" not in roll.parameters:
        return Presence.ABSENT
    return Presence.UNKNOWN


def _count_of_one_rank(source: "Evidence") -> Presence:
    """Whether the loss is scaled by two token counts of which neither is summed over the ranks."""
    loss = source[_LOSS]
    if loss is None:  # the model, or the block of layers, divides by one count: no ratio
        return Presence.ABSENT if _dividing(source) else Presence.UNKNOWN
    if "original_num_tokens" not in loss.names:
        return Presence.ABSENT if loss.has("_ / num_tokens") else Presence.UNKNOWN
    sums = loss.calls("all_reduce")
    return Presence.PRESENT if loss.has("original_num_tokens / _") and not sums else Presence.UNKNOWN


def _count_of_one_rank_divides(source: "Evidence") -> Presence:
    """Whether a depth's loss is divided by the count that the roll of one rank returns, and by that alone."""
    roll, loss = source[ROLL], source[_LOSS]
    if roll is None:
        return Presence.ABSENT if without_prediction(source) else Presence.UNKNOWN
    if roll.parameters == {"tensor", "shifts", "dims"} or (loss and "original_num_tokens" in loss.names):
        return Presence.ABSENT  # there is no count over ranks yet, or a ratio of two
    counts = "cp_group" in roll.parameters and not roll.calls("all_reduce")
    return Presence.PRESENT if counts and _dividing(source) else Presence.UNKNOWN


def _dividing(source: "Evidence") -> bool:
    """Whether one of the places where the loss has been computed divides it by what its roll returns."""
    places = (source[place] for place in (_LOSS, _POSTPROCESS, FORWARD, _BLOCK))
    return any(p is not None and p.calls("roll_tensor") and p.has("_ / num_tokens") for p in places)


def _rolled_sum(source: "Evidence") -> Presence:
    """Whether the sum over the tokens that a roll leaves is weighted as if none had gone."""
    places = [source[place] for place in (_LOSS, _POSTPROCESS, FORWARD, _BLOCK)]
    scaling = [p for p in places if p is not None and "MTPLossAutoScaler" in p.names]
    if not scaling:
        return Presence.ABSENT if without_prediction(source) else Presence.UNKNOWN
    if all(p.has("mtp_loss_scale * mtp_loss * (original_num_tokens / _)") for p in scaling):
        return Presence.ABSENT
    plain = any(p.has("MTPLossAutoScaler.apply(_, mtp_loss_scale * mtp_loss)") for p in scaling)
    return Presence.PRESENT if plain else Presence.UNKNOWN


def _zero_is_some(source: "Evidence") -> Presence:
    """Whether the model asks if the number of layers is None, and so takes 0 for some."""
    model = source[_POSTPROCESS] or source[FORWARD]
    if model is None:
        return Presence.UNKNOWN
    if model.has("self.config.mtp_num_layers is not None"):
        return Presence.PRESENT
    asked = [n for n in model.walk() if isinstance(n, ast.If) and any(map(_is_gate, _all_of(n.test)))]
    gated = {inner for node in asked for inner in ast.walk(node)}
    mentioned = set(found("self.config.mtp_num_layers", model.walk()))
    # elsewhere than behind the gate it may be asked in a way that is not seen here
    return Presence.ABSENT if mentioned <= gated | _truths(model) else Presence.UNKNOWN


def _is_gate(test: ast.expr) -> bool:
    gates = ("self.config.mtp_num_layers", "self.mtp_process", "mtp_in_postprocess")
    return any(found(gate, [test]) for gate in gates)


def _all_of(test: ast.expr) -> list[ast.expr]:
    """The conditions that must all hold."""
    return list(test.values) if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _truths(model: "Definition") -> set[ast.AST]:
    """What stands where only its truth counts."""
    tests = [node.test for node in model.walk() if isinstance(node, ast.If | ast.IfExp)]
    return {condition for test in tests for condition in _all_of(test)}


def _runs_without_labels(source: "Evidence") -> Presence:
    """Whether the MTP block is called under no condition that asks for labels."""
    for code in (source[_POSTPROCESS], source[FORWARD]):
        if code is not None and code.calls("mtp"):
            return _asked_for(code)
    return Presence.ABSENT if without_prediction(source) else Presence.UNKNOWN


def _asked_for(code: "Definition") -> Presence:
    """By what is asked on the way to the call: labels of some kind, only what is known, or something else."""
    calls = set(code.calls("mtp"))
    tests = [
        node.test
        for node in code.walk()
        if isinstance(node, ast.If) and calls & {n for statement in node.body for n in ast.walk(statement)}
    ]
    words = {word for test in tests for node in ast.walk(test) for word in _words(node)}
    if any("labels" in word for word in words):
        return Presence.ABSENT
    return Presence.PRESENT if words <= _KNOWN_GATES else Presence.UNKNOWN


def _words(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Constant):
        return (node.value,) if isinstance(node.value, str) else ()
    return tuple(getattr(node, field) for field in ("id", "attr") if hasattr(node, field))


_LOSS_OF_MEGATRON = frozenset({"mtp", MEGATRONS_MTP_LOSS})
_LOSS_OVER_RANKS = _LOSS_OF_MEGATRON | {"cp"}

PATCHES = (
    Patch(
        id="mtp-context-parallel-roll",
        replacements=(Replacement(ROLL, "bundle.wrappers.mtp:roll_over_ranks"),),
        why="Under context parallelism the next token is looked for on the own rank: wrong gradients.",
        silent=True,
        upstream="fixed upstream in 0.14; found by comparing CP2 with CP1 (gradients off by 5e-1)",
        range="<0.14",
        fixed_in="0.14.0",
        when=frozenset({"mtp", "cp"}),
        assumes=(
            "ids, labels and loss mask arrive cut for context parallel, two chunks a rank, and no "
            "token count has been summed over those ranks"
        ),
        evidence=(ROLL, FORWARD),
        defect=_roll_within_rank,
    ),
    Patch(
        id="mtp-packed-roll-boundaries",
        replacements=(Replacement(_ROLL_PACKED, "bundle.wrappers.mtp:rolled_by_one_gather"),),
        why=(
            "Tokens are rolled at the unpadded boundaries of packed sequences, and so across sequences as "
            "soon as there is padding between them: wrong gradients, silently. And every boundary is read "
            "back from the device: 3,600 waits in a step that needs none."
        ),
        silent=True,
        upstream="not reported; found by comparing padded with unpadded packing (gradients off by 1e+0)",
        range=">=0.16",
        when=frozenset({"mtp", "packed"}),
        assumes="a pack with padding comes with its padded boundaries, cu_seqlens_*_padded",
        evidence=(ROLL, _ROLL_PACKED, _CHOSEN_BOUNDARIES),
        defect=_boundaries,
    ),
    Patch(
        id="mtp-loss-context-parallel-count",
        replacements=(Replacement(ROLL, "bundle.wrappers.mtp:count_over_ranks"),),
        why=(
            "The loss of each depth is divided by the tokens of one context-parallel rank: the logged loss "
            "is a mean of means, and so are the gradients unless the loss is one per token."
        ),
        silent=True,
        upstream="not reported; found by comparing CP2 with CP1 (log off by 5e-3, gradients by 1e-1)",
        range=">=0.14,<0.17",
        fixed_in="0.17.0",  # where the code moved; mtp-loss-context-parallel-normalisation goes on there
        when=_LOSS_OVER_RANKS,
        assumes=(
            "no token count has been summed over context-parallel ranks, and gradients are averaged "
            "over them, or divided by all tokens under a loss per token"
        ),
        evidence=(ROLL, _LOSS, _POSTPROCESS, FORWARD, _BLOCK),
        defect=_count_of_one_rank_divides,
    ),
    Patch(
        id="mtp-loss-context-parallel-normalisation",
        replacements=(
            Replacement(ROLL, "bundle.wrappers.mtp:count_over_ranks"),
            Replacement(_LOSS, "bundle.wrappers.mtp:count_mask_over_ranks"),
        ),
        why=(
            "The loss of each depth is scaled by the ratio of two token counts of one context-parallel rank, "
            "although the token that the roll removes is missing on one rank only."
        ),
        silent=True,
        upstream="not reported; found by comparing CP2 with CP1 (gradients off by 2e-1)",
        range=">=0.17",
        when=_LOSS_OVER_RANKS,
        assumes=(
            "no token count has been summed over context-parallel ranks; under a loss per token the "
            "loss function returns three values"
        ),
        evidence=(_LOSS, _POSTPROCESS, FORWARD, _BLOCK),
        defect=_count_of_one_rank,
    ),
    Patch(
        id="mtp-per-token-weight",
        replacements=(Replacement(ROLL, "bundle.wrappers.mtp:as_heavy_as_before"),),
        why=(
            "Under a loss per token the prediction of further tokens weighs too little, much too little in "
            "short sequences: its sum has a token less for each roll, and is divided by the tokens of the "
            "main loss."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#2417, #1532; fixed by #3159 in 0.17",
        range="<0.17",
        fixed_in="0.17.0",
        when=_LOSS_OF_MEGATRON,
        assumes="the loss mask is of floats, and labels and mask arrive cut for context parallel",
        evidence=(ROLL, _LOSS, _POSTPROCESS, FORWARD, _BLOCK),
        defect=_rolled_sum,
    ),
    Patch(
        id="mtp-zero-layers",
        replacements=(
            Replacement(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "bundle.wrappers.mtp:no_layers",
                by_signature=True,
            ),
        ),
        why="mtp_num_layers=0 enters the branch of multi-token prediction, which then wants labels.",
        silent=False,
        upstream="verl-project/verl#6374",
        range=">=0.16,<0.17",
        fixed_in="0.17.0",
        assumes=NOTHING,
        evidence=(_POSTPROCESS, FORWARD),
        defect=_zero_is_some,
    ),
    Patch(
        id="mtp-without-labels",
        replacements=(Replacement(FORWARD, "bundle.wrappers.mtp:only_with_labels", by_signature=True),),
        why=(
            "Logits without labels, as reinforcement learning wants them: an error to 0.16, wasted work in "
            "0.17 and 0.18, and from 0.19 on the layers are trained on the input, in evaluation too."
        ),
        silent=True,
        upstream="NVIDIA/Megatron-LM#4549; measured in every release",
        range="",
        when=frozenset({"mtp"}),
        assumes=(
            "labels are given as `labels`; a fork that gives them in mtp_kwargs (slime, miles) would "
            "train no prediction layers"
        ),
        evidence=(_POSTPROCESS, FORWARD, ROLL),
        defect=_runs_without_labels,
    ),
)
